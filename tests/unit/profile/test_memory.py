from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats import catalogue
from trimtab.model import architecture
from trimtab.plan.estimate import memory
from trimtab.plan.estimate.memory import GB, MemorySettings

ROOT = Path(__file__).parents[3]


def shape(
    kind: str, hidden: int, width: int, layers: int, heads: int, kv: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": words,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


MODELS = {
    "Qwen2.5-1.5B": (shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True), 1_543_714_304),
    "Qwen2.5-7B": (shape("qwen2", 3584, 18944, 28, 28, 4, 152064), 7_615_616_512),
    "Llama-3-8B": (shape("llama", 4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "Gemma-2-2B": (
        {k: v for k, v in shape("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256).items() if k[:3] != "tie"},
        2_614_341_888,
    ),
    "Mixtral-8x7B": (
        shape("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[]), 30_532_122_624,
    ),
    "DeepSeek-V3": (
        shape("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, n_routed_experts=256, n_shared_experts=1,
              num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536,
              kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128), 671_026_419_200,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        124_439_808,
    ),
}  # fmt: skip
LLAMA = architecture.from_config(MODELS["Llama-3-8B"][0], "config.json")
MIXTRAL = architecture.from_config(MODELS["Mixtral-8x7B"][0], "config.json")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_published(name: str) -> None:
    config, parameters = MODELS[name]
    assert architecture.from_config(config, name).parameters == parameters
    assert architecture.from_config(config, name).notes == ()


def test_a_token_uses_only_its_experts() -> None:
    assert MIXTRAL.active_parameters == 12_879_925_248
    assert LLAMA.active_parameters == LLAMA.parameters


def test_the_bundled_example_is_read_from_its_folder() -> None:
    assert catalogue.read_config(ROOT / "examples/models/qwen2.5-1.5b").parameters == 1_543_714_304


def test_the_language_model_inside_another_is_counted_and_told() -> None:
    nested = {"model_type": "some_vl", "vision_config": {"hidden_size": 9}, "text_config": MODELS["Llama-3-8B"][0]}
    read = architecture.from_config(nested, "x")
    assert read.parameters == 8_030_261_248
    assert "vision" in read.notes[0]


def test_a_family_that_is_not_known_is_told() -> None:
    read = architecture.from_config({**MODELS["Llama-3-8B"][0], "model_type": "brand_new"}, "x")
    assert read.parameters == 8_030_261_248
    assert "brand_new" in read.notes[0]


def test_shared_experts_and_sparse_steps_are_counted() -> None:
    base = shape("qwen2_moe", 64, 128, 4, 4, 4, 100, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
    plain = architecture.from_config(base, "x")
    assert plain.dense_layers == 0
    shared = architecture.from_config({**base, "shared_expert_intermediate_size": 16}, "x")
    assert shared.parameters - plain.parameters == 4 * (3 * 64 * 16 + 64)
    assert architecture.from_config({**base, "decoder_sparse_step": 2}, "x").dense_layers == 2
    assert architecture.from_config({**base, "mlp_only_layers": [0, 3, 99]}, "x").dense_layers == 2


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_missing_field_is_named(key: str) -> None:
    config = {k: v for k, v in MODELS["Llama-3-8B"][0].items() if k != key}
    with pytest.raises(InputError, match=key) as error:
        architecture.from_config(config, "config.json")
    assert f"config.json: {key}" in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_attention_heads": 33}, "no multiple of num_attention_heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim"),
    ],
)
def test_an_odd_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        architecture.from_config({**MODELS["Llama-3-8B"][0], **change}, "config.json")


def test_files_that_are_no_configuration_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        catalogue.read_config(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[]", "mapping"), ("[" * 99999, "not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=words):
            catalogue.read_config(tmp_path)


KEYS = sorted({key for config, _ in MODELS.values() for key in config})


@settings(suppress_health_check=[HealthCheck.too_slow])  # other tests keep the machine busy
@given(
    st.dictionaries(st.sampled_from(KEYS), st.integers() | st.none() | st.text(max_size=3) | st.floats() | st.just([1]))
)
def test_no_configuration_makes_a_traceback(change: dict[str, Any]) -> None:
    try:
        read = architecture.from_config({**MODELS["Mixtral-8x7B"][0], **change}, "x")
        memory.estimate(read, MemorySettings())
    except TrimtabError:
        pass


def needs(model: architecture.Architecture = LLAMA, **options: Any) -> dict[str, memory.MemoryNeed]:
    return {need.component: need for need in memory.estimate(model, MemorySettings(**options))}


def term(need: memory.MemoryNeed, name: str) -> float:
    return next(term.gb for term in need.active if term.name == name)


def test_states_are_divided_as_the_stage_says() -> None:
    bytes_each = {"weights": 2, "gradients": 4, "optimiser": 12}
    for zero, divided in ((0, ()), (1, ("optimiser",)), (2, ("optimiser", "gradients")), (3, tuple(bytes_each))):
        trainer = needs(zero=zero, gpus=8)["trainer"]
        for name, size in bytes_each.items():
            whole = LLAMA.parameters * size / GB
            assert term(trainer, name) == pytest.approx(whole / 8 if name in divided else whole)


def test_tensor_and_pipeline_parallel_sizes_divide_what_is_not_sharded() -> None:
    one = term(needs(zero=0)["trainer"], "weights")
    assert term(needs(zero=0, tp=4)["trainer"], "weights") == pytest.approx(one / 4)
    assert one / 2 < term(needs(zero=0, pp=2)["trainer"], "weights") < one * 0.6


def test_expert_parallelism_divides_the_experts_only() -> None:
    one, four = (term(needs(MIXTRAL, zero=0, ep=ep)["trainer"], "weights") for ep in (1, 4))
    experts = MIXTRAL.expert_parameters * 2 / GB
    assert one - four == pytest.approx(experts * 3 / 4)


def test_optimisers_differ_by_their_state() -> None:
    states = [term(needs(optimizer=name)["trainer"], "optimiser") for name in ("sgd", "adam8bit", "muon", "adam")]
    assert states == sorted(states)
    bare = term(needs(optimizer="adam", master_weights=False)["trainer"], "optimiser")
    assert bare == pytest.approx(LLAMA.parameters * 8 / 8 / GB)


def test_without_checkpointing_every_layer_keeps_its_activations() -> None:
    without = term(needs(checkpointing=False)["trainer"], "activations")
    assert without > 5 * term(needs()["trainer"], "checkpoints")
    assert needs(micro_batch=4)["trainer"].active_gb > needs()["trainer"].active_gb


# Peaks of plain PyTorch on one H200: a 1.5B decoder in bf16, bf16 gradients, Adam with an fp32 copy of the weights.
@pytest.mark.parametrize(
    ("checkpointing", "micro_batch", "length", "measured_gb"),
    [(True, 4, 4096, 49.52), (True, 1, 16384, 49.52), (False, 1, 4096, 38.25), (False, 4, 4096, 92.42)],
)
def test_the_estimate_is_a_little_above_what_was_measured(
    checkpointing: bool, micro_batch: int, length: int, measured_gb: float
) -> None:
    model = catalogue.read_config(ROOT / "examples/models/qwen2.5-1.5b")
    trainer = needs(
        model,
        gpus=1,
        zero=0,
        gradients="bf16",
        checkpointing=checkpointing,
        micro_batch=micro_batch,
        sequence_length=length,
    )["trainer"]
    assert measured_gb <= trainer.active_gb - memory.PROCESS_GB <= 1.12 * measured_gb


# The same without an optimiser. The Llama played no part in finding the factors; the Qwen3 gave the one for the norms
# of queries and keys.
OTHERS = {
    "llama": shape("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "qwen3": shape("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
}


@pytest.mark.parametrize(
    ("name", "checkpointing", "micro_batch", "measured_gb", "at_most"),
    [
        ("llama", True, 1, 8.52, 1.35), ("llama", True, 4, 27.1, 1.15),
        ("llama", False, 1, 14.93, 1.2), ("llama", False, 4, 52.63, 1.1),
        ("qwen3", True, 1, 16.55, 1.45), ("qwen3", True, 4, 38.56, 1.3),
        ("qwen3", False, 1, 38.03, 1.25), ("qwen3", False, 4, 129.28, 1.1),
    ],
)  # fmt: skip
def test_the_estimate_holds_for_other_models(
    name: str, checkpointing: bool, micro_batch: int, measured_gb: float, at_most: float
) -> None:
    model = architecture.from_config(OTHERS[name], name)
    trainer = needs(model, gpus=1, zero=0, gradients="bf16", checkpointing=checkpointing, micro_batch=micro_batch)[
        "trainer"
    ]
    reckoned = sum(entry.gb for entry in trainer.active if entry.name not in ("optimiser", "process"))
    assert measured_gb <= reckoned <= at_most * measured_gb


def test_the_estimate_of_a_forward_pass_is_a_little_above_what_was_measured() -> None:
    model = catalogue.read_config(ROOT / "examples/models/qwen2.5-1.5b")
    assert 6.42 <= needs(model, gpus=1)["inference"].active_gb - memory.PROCESS_GB <= 1.12 * 6.42


def test_what_is_offloaded_is_in_host_memory_and_not_on_the_gpu() -> None:
    everything, some, nothing = (needs(offload=word)["trainer"] for word in ("all", "optimizer", "none"))
    assert everything.resident_gb == memory.PROCESS_GB
    assert everything.host_gb == pytest.approx(LLAMA.parameters * 14 / 8 / GB)
    assert some.host_gb == pytest.approx(LLAMA.parameters * 12 / 8 / GB)
    assert nothing.host_gb == 0
    assert nothing.resident_gb == pytest.approx(LLAMA.parameters * 18 / 8 / GB + memory.PROCESS_GB)


def test_the_engine_takes_its_share_of_the_gpu() -> None:
    rollout = needs(gpu_memory_gb=80.0, kv_share=0.6)["rollout"]
    assert rollout.active_gb == pytest.approx(48.0)
    per_token = 32 * 2 * 8 * 128 * 2
    answers = int(term(rollout, "KV cache") * GB / (per_token * 4096))
    assert f"holds {answers} answers" in rollout.notes[0]
    assert "raise --kv-share" in " ".join(needs(gpu_memory_gb=8.0)["rollout"].notes)


def test_without_the_gpu_s_memory_the_cache_is_that_of_the_answers() -> None:
    cache = term(needs(concurrent=32, sequence_length=2048)["rollout"], "KV cache")
    assert cache == pytest.approx(32 * 2048 * 32 * 2 * 8 * 128 * 2 / GB)
    halved = term(needs(concurrent=32, sequence_length=2048, kv_precision="fp8")["rollout"], "KV cache")
    assert halved == pytest.approx(cache / 2)


def test_a_compressed_cache_is_small_and_on_every_gpu() -> None:
    deepseek = architecture.from_config(MODELS["DeepSeek-V3"][0], "x")
    assert deepseek.kv_per_token_and_layer == 576
    one, eight = (term(needs(deepseek, rollout_tp=tp)["rollout"], "KV cache") for tp in (1, 8))
    assert one == eight


def test_the_block_holds_at_least_what_the_terms_add_up_to() -> None:
    for options in ({}, {"zero": 0}, {"zero": 1, "tp": 2}, {"offload": "none"}, {"gpu_memory_gb": 80.0}):
        for need in needs(**options).values():
            block = need.block()["memory_gb"]
            active = block.get("active", block.get("sharded", 0) / need.gpus + block.get("per_gpu", 0))
            assert need.active_gb <= active + 1e-6 <= need.active_gb + 0.3
            assert need.resident_gb <= block["resident"] + 1e-6


def test_a_sharded_block_holds_on_other_counts_too() -> None:
    block = needs(gpus=8)["trainer"].block()["memory_gb"]
    assert block["sharded"] / 32 + block["per_gpu"] == pytest.approx(needs(gpus=32)["trainer"].active_gb, abs=0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 0}, "--gpus"), ({"tp": -1}, "--tp"), ({"zero": 4}, "--zero"), ({"kv_share": 0.0}, "--kv-share"),
        ({"gpu_memory_gb": float("nan")}, "--gpu-memory-gb"), ({"optimizer": "adm"}, "did you mean adam"),
        ({"precision": "b16"}, "did you mean bf16"), ({"offload": "some"}, "--offload"), ({"tp": 3}, "tp x pp = 3"),
        ({"ep": 3}, "--ep 3"), ({"rollout_tp": 3}, "--rollout-tp"), ({"micro_batch": 10**400}, "--micro-batch"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        memory.estimate(LLAMA, replace(MemorySettings(), **options))


def test_every_term_shows_how_it_was_reckoned() -> None:
    for need in needs().values():
        assert all(entry.formula for entry in need.active)
        json.dumps(need.block(), allow_nan=False)
