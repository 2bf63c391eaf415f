"""Counts a model's parameters from the fields of its Hugging Face `config.json`.

Counts are exact for the common decoder families (Llama, Mistral, Qwen, Gemma, Mixtral, DeepSeek); for an unknown family
or a part that is left out there is a note. Nothing is downloaded and no model code runs: only numbers are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import yaml_text

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
}

PLAIN_MLP = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode", "mpt")
"""Families with only an up and a down projection, and with biases in their norms."""
PLAIN_WITHOUT_BIAS = ("falcon", "mpt")
QKV_BIAS = ("qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "chatglm")
QK_NORM = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "gemma3", "gemma3_text")
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "bloom", "falcon", "gpt_bigcode")
GATED = (
    *("llama", "mistral", "mixtral", "gemma", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4", "phi3", "olmo"),
    *("internlm2", "baichuan", "yi", "cohere", "granite", "minicpm", "glm4_moe", "kimi_k2"),
    *(*QKV_BIAS, *QK_NORM, *FOUR_NORMS),
)
LARGEST = 10**9
"""Larger values are mistakes: no field of an existing model is larger."""


@dataclass(frozen=True)
class Architecture:
    """A model's shape and its exact parameter counts by the formulas of its family."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    embedding: int
    head: int
    attention_per_layer: int
    dense_mlp: int
    expert_mlp: int
    dense_layers: int
    experts: int
    experts_per_token: int
    shared_mlp: int
    router: int
    norms_per_layer: int
    norm_count: int
    qk_norm: bool
    final_norm: int
    kv_per_token_and_layer: int
    kv_shards: int
    mlp_width: int
    notes: tuple[str, ...] = ()

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert_parameters(self) -> int:
        """Parameters that expert parallelism divides."""
        return self.moe_layers * self.experts * self.expert_mlp

    @property
    def layer_parameters(self) -> int:
        each = self.attention_per_layer + self.norms_per_layer
        dense = self.dense_layers * self.dense_mlp
        return self.layers * each + dense + self.moe_layers * (self.shared_mlp + self.router) + self.expert_parameters

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.layer_parameters + self.final_norm

    @property
    def active_parameters(self) -> int:
        idle = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_mlp
        return self.parameters - idle


def read(path: Path) -> Architecture:
    """Read a `config.json`, or the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    text = yaml_text.read_text(file)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"this is not valid JSON: {error.msg}", where=f"{file}, line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not valid JSON: {error!s:.200}", where=str(file)) from None
    if not isinstance(data, dict):
        raise InputError("a model's config.json holds a mapping of keys", where=str(file))
    return from_config(data, str(file))


def from_config(data: Mapping[str, Any], name: str) -> Architecture:
    """The architecture that a configuration states; `name` is used in errors."""
    notes: list[str] = []
    inner = next((data[key] for key in ("text_config", "llm_config", "language_config") if key in data), None)
    if isinstance(inner, Mapping):
        data = {**{key: value for key, value in data.items() if key == "tie_word_embeddings"}, **inner}
        notes.append("only the language model is counted, not the vision or audio parts")
    fields = _Fields(data, name)
    kind = data.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    plain = kind in PLAIN_MLP
    if not plain and kind not in GATED:
        notes.append(f"model type {kind or 'not stated'} is not known here: a gated MLP without biases is assumed")
    layer_types = data.get("layer_types")
    if isinstance(layer_types, list) and any("linear" in str(entry) for entry in layer_types):
        notes.append("layers with linear attention are counted as full attention")

    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    heads = fields.count("num_attention_heads")
    vocabulary = fields.count("vocab_size")
    kv_heads = 1 if data.get("multi_query") is True else fields.count("num_key_value_heads", default=heads)
    if kv_heads > heads:
        raise InputError("num_key_value_heads is more than num_attention_heads", where=f"{name}: num_key_value_heads")
    if data.get("head_dim") is None and data.get("kv_lora_rank") is None and hidden % heads:
        raise InputError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}",
            where=f"{name}: hidden_size",
            hint="add head_dim if the heads have a size of their own",
        )
    head_size = fields.count("head_dim", default=hidden // heads or 1)
    latent = data.get("kv_lora_rank") is not None
    if latent:
        head_size = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
    attention, kv_values = _attention(fields, kind, hidden, heads, kv_heads, head_size)
    tied = data.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)
    embedding = vocabulary * hidden
    if kind in ("gpt2", "gpt_bigcode"):
        embedding += fields.count("n_positions") * hidden
    elif kind == "opt":
        embedding += (fields.count("max_position_embeddings") + 2) * hidden

    experts = fields.count("num_experts", default=0, minimum=0)
    width = fields.count("intermediate_size", default=4 * hidden if plain else None)
    moe_width = fields.count("moe_intermediate_size", default=width)
    per_token = fields.count("experts_per_token", default=min(experts, 2), minimum=0) if experts else 0
    if per_token > experts:
        raise InputError("more experts per token than there are experts", where=f"{name}: num_experts_per_tok")
    shared, router = _shared_experts(fields, kind, hidden, experts, moe_width)
    norm = hidden * (2 if plain else 1)
    norm_count = 4 if kind in FOUR_NORMS else 2
    return Architecture(
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=vocabulary,
        embedding=embedding,
        head=0 if tied else vocabulary * hidden,
        attention_per_layer=attention,
        dense_mlp=_mlp(kind, hidden, width, data.get("mlp_bias") is True),
        expert_mlp=_mlp(kind, hidden, moe_width, False) if experts else 0,
        dense_layers=_dense_layers(fields, layers, experts),
        experts=experts,
        experts_per_token=per_token,
        shared_mlp=shared,
        router=router,
        norms_per_layer=norm * norm_count,
        norm_count=norm_count,
        qk_norm=kind in QK_NORM,
        final_norm=norm,
        kv_per_token_and_layer=kv_values,
        kv_shards=1 if latent else kv_heads,  # a compressed cache has no heads to divide between GPUs
        mlp_width=per_token * moe_width + shared // (3 * hidden) if experts else width,
        notes=tuple(notes),
    )


def _attention(fields: _Fields, kind: str, hidden: int, heads: int, kv_heads: int, head_size: int) -> tuple[int, int]:
    """(parameters of one layer's attention, values cached per token and layer)."""
    if fields.data.get("kv_lora_rank") is not None:
        return _latent_attention(fields, hidden, heads)
    query, key_value = heads * head_size, kv_heads * head_size
    parameters = hidden * query + 2 * hidden * key_value + query * hidden
    every_bias = fields.data.get("attention_bias") is True or (kind in PLAIN_MLP and kind not in PLAIN_WITHOUT_BIAS)
    if every_bias or kind in QKV_BIAS or fields.data.get("qkv_bias") is True:
        parameters += query + 2 * key_value
    if every_bias:
        parameters += hidden
    if kind in QK_NORM:
        parameters += 2 * head_size
    return parameters, 2 * key_value


def _latent_attention(fields: _Fields, hidden: int, heads: int) -> tuple[int, int]:
    """DeepSeek's attention: caches one compressed vector and one rotary key per token."""
    rank = fields.count("kv_lora_rank")
    rope, nope = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value = fields.count("v_head_dim")
    query = heads * (nope + rope)
    if fields.data.get("q_lora_rank") is None:
        parameters = hidden * query
    else:
        query_rank = fields.count("q_lora_rank")
        parameters = hidden * query_rank + query_rank + query_rank * query
    parameters += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    return parameters, rank + rope


def _mlp(kind: str, hidden: int, width: int, bias: bool) -> int:
    if kind in PLAIN_MLP:
        return 2 * hidden * width + (0 if kind in PLAIN_WITHOUT_BIAS else width + hidden)
    return 3 * hidden * width + (2 * width + hidden if bias else 0)


def _shared_experts(fields: _Fields, kind: str, hidden: int, experts: int, moe_width: int) -> tuple[int, int]:
    """(parameters of the experts that every token uses, parameters of the router), per MoE layer."""
    if not experts:
        return 0, 0
    router = hidden * experts
    if kind in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        router += experts  # the load-balancing bias
    shared = fields.count("shared_expert_intermediate_size", default=0, minimum=0)
    if shared:
        return 3 * hidden * shared, router + hidden  # Qwen gates its shared expert
    return 3 * hidden * moe_width * fields.count("n_shared_experts", default=0, minimum=0), router


def _dense_layers(fields: _Fields, layers: int, experts: int) -> int:
    if not experts:
        return layers
    first = min(layers, fields.count("first_k_dense_replace", default=0, minimum=0))
    every = fields.count("decoder_sparse_step", default=1)
    only = fields.data.get("mlp_only_layers")
    dense = set(only) if isinstance(only, list) and all(isinstance(layer, int) for layer in only) else set()
    if every == 1:
        return len(set(range(first)) | {layer for layer in dense if 0 <= layer < layers})
    return sum(layer < first or layer in dense or (layer + 1) % every > 0 for layer in range(min(layers, 10_000)))


class _Fields:
    """Checked numbers of a configuration."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data = data
        self.name = name

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """The whole number under a key or one of its aliases."""
        names = ALIASES.get(key, (key,))
        found = next((name for name in names if self.data.get(name) is not None), None)
        if found is None:
            if default is None:
                aliases = f" (also known as {', '.join(names[1:])})" if len(names) > 1 else ""
                raise InputError(
                    f"the model's configuration has no {key}{aliases}",
                    where=f"{self.name}: {key}",
                    hint="give the config.json of a decoder model, as published beside its weights",
                )
            return default
        value = self.data[found]
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
            raise InputError(
                f"{found} is {value!r:.60}, not a whole number from {minimum}", where=f"{self.name}: {found}"
            )
        return value
