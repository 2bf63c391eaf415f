"""What a model costs, from the fields of its Hugging Face `config.json`: parameters, cached values, FLOPs.

Counts are exact for the common decoder families (Llama, Mistral, Qwen, Gemma, Mixtral, DeepSeek, GLM, gpt-oss); for an
unknown family or a part that is left out there is a note. Nothing is downloaded, no model code runs: only numbers are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"),
    "shared_width": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
}

PLAIN_MLP = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode", "mpt")
"""Families with only an up and a down projection, and with biases in their norms."""
PLAIN_WITHOUT_BIAS = ("falcon", "mpt")
QKV_BIAS = (
    *("qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "chatglm", "mimo"),
    *("glm4_moe",),
)
GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GEMMA = ("gemma3", "gemma3_text", "gemma4", "gemma4_text")
QK_NORM = (
    *("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", *GATED_ATTENTION, *GEMMA),
)
WIDE_QK_NORM = ("minimax_m2", "olmoe", "olmo2")
"""Norms over all heads of queries and of keys together."""
FOUR_NORMS = ("gemma2", "glm4", *GEMMA)
TIED_BY_DEFAULT = ("gemma", "gemma2", *GEMMA, "gpt2", "opt", "bloom", "falcon", "gpt_bigcode")
GATED = (
    *("llama", "mistral", "mixtral", "gemma", "deepseek_v2", "deepseek_v3", "deepseek_v32", "phi3", "olmo", "gpt_oss"),
    *("internlm2", "baichuan", "yi", "cohere", "granite", "minicpm", "kimi_k2", "llama4_text", "glm_moe_dsa"),
    *(*QKV_BIAS, *QK_NORM, *WIDE_QK_NORM, *FOUR_NORMS),
)
ROUTER_BIAS = (
    *("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa", "minimax_m2", "gpt_oss", "nemotron_h"),
)
PATTERNS: Mapping[str, int] = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "gemma4_text": 6}
"""Every so many layers one attends to all tokens, the others to a window."""
LARGEST = 10**9
"""Larger values are mistakes: no field of an existing model is larger."""


class Architecture(Frozen):
    """A model's shape and its parameter counts by the formulas of its family.

    Layers mix tokens by full attention, by attention over a window, or by a recurrent state (`linear_layers`: gated
    delta rule, Mamba); `attention_layers` counts the first two.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    embedding: int
    head: int
    attention_layers: int
    attention_per_layer: int
    linear_layers: int
    linear_mixer: int
    linear_state: int
    window_layers: int
    window: int
    dense_mlp: int
    expert_mlp: int
    dense_layers: int
    moe_layers: int
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
    score_size: int
    mlp_width: int
    widest_head: int = 0
    vision: int = 0
    extra: int = 0
    notes: tuple[str, ...] = ()

    @property
    def expert_parameters(self) -> int:
        """Parameters that expert parallelism divides."""
        return self.moe_layers * self.experts * self.expert_mlp

    @property
    def layer_parameters(self) -> int:
        """All layers, experts included."""
        mixers = self.attention_layers * self.attention_per_layer + self.linear_layers * self.linear_mixer
        dense = self.dense_layers * self.dense_mlp + self.layers * self.norms_per_layer
        return mixers + dense + self.moe_layers * (self.shared_mlp + self.router) + self.expert_parameters

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.layer_parameters + self.final_norm + self.vision + self.extra

    @property
    def active_parameters(self) -> int:
        """Parameters used per token."""
        idle = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_mlp
        return self.parameters - idle

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply every token: the active ones without the embedding's lookup and the vision tower."""
        looked_up = self.embedding + self.extra if self.head else self.extra
        return self.active_parameters - looked_up - self.vision

    def cached_values(self, tokens: float) -> float:
        """Values that the cache holds for a sequence of so many tokens."""
        full = self.attention_layers - self.window_layers
        kept = full * tokens + self.window_layers * min(tokens, self.window)
        return kept * self.kv_per_token_and_layer + self.linear_layers * self.linear_state

    def attention_flops(self, tokens: float) -> float:
        """FLOPs of a token's attention over so many earlier ones, forward."""
        full = self.attention_layers - self.window_layers
        seen = full * tokens + self.window_layers * min(tokens, self.window)
        return 2 * self.heads * self.score_size * seen + 4 * self.linear_layers * self.linear_state

    def forward_flops(self, tokens: float) -> float:
        """FLOPs of a token's forward pass in a sequence of so many tokens, on average."""
        return 2 * self.matmul_parameters + self.attention_flops(tokens / 2)


def from_config(data: Mapping[str, Any], name: str) -> Architecture:
    """The architecture that a configuration states; `name` is used in errors."""
    notes: list[str] = []
    outer = data
    inner = next((data[key] for key in ("text_config", "llm_config", "language_config") if key in data), None)
    if isinstance(inner, Mapping):
        data = {**{key: value for key, value in data.items() if key == "tie_word_embeddings"}, **inner}
    fields = _Fields(data, name)
    kind = data.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    plain = kind in PLAIN_MLP
    if not plain and kind not in (*GATED, "nemotron_h"):
        notes.append(f"model type {kind or 'not stated'} is not known here: a gated MLP without biases is assumed")

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
    stated = data.get("moe_intermediate_size") if experts else 4 * hidden if plain else None
    width = fields.count("intermediate_size", default=stated if isinstance(stated, int) else None)
    moe_width = fields.count("moe_intermediate_size", default=width)
    per_token = fields.count("experts_per_token", default=min(experts, 2), minimum=0) if experts else 0
    if per_token > experts:
        raise InputError("more experts per token than there are experts", where=f"{name}: num_experts_per_tok")
    shared, router = _shared_experts(fields, kind, hidden, experts, moe_width)
    dense_width = fields.count("intermediate_size_mlp", default=width)
    mixing = _Mixing.of(fields, kind, layers)
    dense = mixing.mlps - mixing.moes if mixing.moes is not None else _dense_layers(fields, layers, experts)
    moes = mixing.mlps - dense
    if kind == "gemma4_text" and experts:  # a dense MLP beside the experts of each layer
        dense = layers
    norm = hidden * (2 if plain else 1)
    norm_count = 4 if kind in FOUR_NORMS else 1 if kind == "nemotron_h" else 2
    vision, told = _vision(outer, hidden, name)
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
        attention_layers=mixing.attention,
        attention_per_layer=attention,
        linear_layers=mixing.linear,
        linear_mixer=_linear_mixer(fields, hidden)[0] if mixing.linear else 0,
        linear_state=_linear_mixer(fields, hidden)[1] if mixing.linear else 0,
        window_layers=mixing.windowed,
        window=mixing.window,
        dense_mlp=_mlp(kind, hidden, dense_width, data.get("mlp_bias") is True),
        expert_mlp=_expert(fields, kind, hidden, moe_width) if experts else 0,
        dense_layers=dense,
        moe_layers=moes,
        experts=experts,
        experts_per_token=per_token,
        shared_mlp=shared,
        router=router,
        norms_per_layer=norm * norm_count,
        norm_count=norm_count,
        qk_norm=kind in (*QK_NORM, *WIDE_QK_NORM),
        final_norm=norm,
        kv_per_token_and_layer=kv_values,
        kv_shards=1 if latent else kv_heads,  # a compressed cache has no heads to divide between GPUs
        score_size=head_size + (fields.count("v_head_dim") if latent else head_size),
        mlp_width=per_token * moe_width + shared // (3 * hidden) if experts else width,
        widest_head=fields.count("global_head_dim", default=head_size),
        vision=vision,
        extra=_per_layer_inputs(fields, layers, hidden),
        notes=(*notes, *told),
    )


class _Mixing(Frozen):
    """How many layers mix tokens in which way, and how many have an MLP; `moes` only where a pattern states it."""

    attention: int
    linear: int
    windowed: int
    window: int
    mlps: int
    moes: int | None = None

    @classmethod
    def of(cls, fields: _Fields, kind: str, layers: int) -> _Mixing:
        pattern = fields.data.get("hybrid_override_pattern")
        if isinstance(pattern, str):  # M: Mamba, *: attention, E: experts, -: MLP
            experts = pattern.count("E")
            return cls(pattern.count("*"), pattern.count("M"), 0, 0, experts + pattern.count("-"), experts)
        kinds = fields.data.get("layer_types")
        every = fields.count("full_attention_interval", default=1)
        linear = layers - layers // every
        if isinstance(kinds, list):
            linear = min(layers, sum("linear" in str(kind) for kind in kinds))
        window = fields.count("sliding_window", default=0, minimum=0)
        if fields.data.get("use_sliding_window") is False:
            window = 0
        windowed = layers - linear if window else 0
        if window and isinstance(kinds, list):
            windowed = min(layers, sum("sliding" in str(kind) for kind in kinds))
        elif window and (every := fields.count("sliding_window_pattern", default=PATTERNS.get(kind, 0), minimum=0)):
            windowed = layers - layers // every
        return cls(layers - linear, linear, windowed, window, layers)


def _linear_mixer(fields: _Fields, hidden: int) -> tuple[int, int]:
    """(parameters, values of the recurrent state) of one layer: Mamba-2, or the gated delta rule."""
    if fields.data.get("mamba_num_heads") is not None:
        heads, size = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
        inner, groups = heads * size, 2 * fields.count("n_groups") * fields.count("ssm_state_size")
        convolution = (inner + groups) * (fields.count("conv_kernel") + 1)
        parameters = hidden * (2 * inner + groups + heads) + convolution + 3 * heads + inner + inner * hidden
        return parameters, inner * fields.count("ssm_state_size")
    keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
    heads, size = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
    values = heads * size
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    convolution = (2 * keys + values) * fields.count("linear_conv_kernel_dim")
    return projections + convolution + 2 * heads + size, heads * size * fields.count("linear_key_head_dim")


def _vision(data: Mapping[str, Any], hidden: int, name: str) -> tuple[int, tuple[str, ...]]:
    """(parameters of the vision tower and its merger, notes)."""
    tower = data.get("vision_config")
    if not isinstance(tower, Mapping):
        return 0, ()
    fields = _Fields(tower, f"{name}: vision_config")
    if tower.get("parameters") is not None:
        return fields.count("parameters"), ()
    depth = fields.count("depth", default=fields.count("num_hidden_layers", default=0, minimum=0), minimum=0)
    if not depth or tower.get("hidden_size") is None or tower.get("intermediate_size") is None:
        return 0, ("only the language model is counted, not the vision or audio parts",)
    size, width = fields.count("hidden_size"), fields.count("intermediate_size")
    gated = "qwen2_5" in str(data.get("model_type"))
    layer = 4 * size * size + 4 * size + (3 if gated else 2) * size * width + width + 5 * size
    patch = size * 3 * fields.count("temporal_patch_size", default=1) * fields.count("patch_size", default=14) ** 2
    merged = size * fields.count("spatial_merge_size", default=1) ** 2
    mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
    positions = fields.count("num_position_embeddings", default=0, minimum=0) * size
    out = fields.count("out_hidden_size", default=hidden)
    return depth * layer + patch + positions + mergers * (merged * merged + merged * out), (
        "the vision tower is counted by its width and depth",
    )


def _per_layer_inputs(fields: _Fields, layers: int, hidden: int) -> int:
    """Gemma's embeddings for each layer: looked up, never multiplied."""
    size = fields.count("hidden_size_per_layer_input", default=0, minimum=0)
    words = fields.count("vocab_size_per_layer_input", default=0, minimum=0)
    return size * layers * (words + 3 * hidden) if size else 0


def _expert(fields: _Fields, kind: str, hidden: int, width: int) -> int:
    """One expert; in a latent space of its own if there is one, with biases in gpt-oss."""
    inner = fields.count("moe_latent_size", default=hidden)
    biases = 2 * width + hidden if kind == "gpt_oss" else 0
    return _mlp(kind, inner, width, False) + biases


def _attention(fields: _Fields, kind: str, hidden: int, heads: int, kv_heads: int, head_size: int) -> tuple[int, int]:
    """(parameters of one layer's attention, values cached per token and layer)."""
    if fields.data.get("kv_lora_rank") is not None:
        return _latent_attention(fields, hidden, heads)
    query, key_value = heads * head_size, kv_heads * head_size
    gate = query if kind in GATED_ATTENTION else 0
    parameters = hidden * (query + gate) + 2 * hidden * key_value + query * hidden
    every_bias = fields.data.get("attention_bias") is True or (kind in PLAIN_MLP and kind not in PLAIN_WITHOUT_BIAS)
    if every_bias or kind in QKV_BIAS or fields.data.get("qkv_bias") is True:
        parameters += query + 2 * key_value
    if every_bias and kind not in QKV_BIAS:
        parameters += hidden
    if kind == "gpt_oss":
        parameters += heads  # attention sinks
    if kind in QK_NORM or fields.data.get("use_qk_norm") is True:
        parameters += query + key_value if kind in WIDE_QK_NORM else 2 * head_size
    elif kind in WIDE_QK_NORM:
        parameters += query + key_value
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
    if fields.data.get("index_n_heads") is not None:  # the indexer of sparse attention
        heads, size = fields.count("index_n_heads"), fields.count("index_head_dim")
        parameters += fields.count("q_lora_rank") * heads * size + hidden * (size + heads) + 2 * size
    return parameters, rank + rope


def _mlp(kind: str, hidden: int, width: int, bias: bool) -> int:
    if kind == "nemotron_h":
        return 2 * hidden * width
    if kind in PLAIN_MLP:
        return 2 * hidden * width + (0 if kind in PLAIN_WITHOUT_BIAS else width + hidden)
    return 3 * hidden * width + (2 * width + hidden if bias else 0)


def _shared_experts(fields: _Fields, kind: str, hidden: int, experts: int, moe_width: int) -> tuple[int, int]:
    """(parameters of the experts that every token uses, parameters of the router), per MoE layer."""
    if not experts:
        return 0, 0
    router = hidden * experts + (experts if kind in ROUTER_BIAS else 0)
    matrices = 2 if kind == "nemotron_h" else 3
    latent = fields.count("moe_latent_size", default=0, minimum=0)
    router += 2 * hidden * latent
    if kind.startswith("gemma4"):
        router += 2 * hidden + experts
    shared = fields.count("shared_width", default=0, minimum=0)
    if shared:
        gate = hidden if kind.startswith("qwen") else 0
        return matrices * hidden * shared, router + gate
    count = fields.count("n_shared_experts", default=1 if kind == "llama4_text" else 0, minimum=0)
    return matrices * hidden * moe_width * count, router


def _dense_layers(fields: _Fields, layers: int, experts: int) -> int:
    if not experts:
        return layers
    first = min(layers, fields.count("first_k_dense_replace", default=0, minimum=0))
    every = fields.count("decoder_sparse_step", default=fields.count("interleave_moe_layer_step", default=1))
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
