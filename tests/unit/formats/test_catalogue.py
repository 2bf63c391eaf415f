from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.model.architecture import from_config

ROWS = {row["name"]: row for row in catalogue.table("models")}


def test_the_table_has_sixty_models_with_sources_and_unique_names() -> None:
    assert len(ROWS) == len(catalogue.table("models")) >= 60
    assert all(row["source"] for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_parameters_are_counted_as_published(name: str) -> None:
    row = ROWS[name]
    known, model = catalogue.model(name)
    assert known == name
    assert model.parameters == pytest.approx(float(row["parameters_b"]) * 1e9, rel=0.015)
    if row["active_b"]:
        assert model.active_parameters == pytest.approx(float(row["active_b"]) * 1e9, rel=0.07)
    assert model.cached_values(1000) > 0
    assert 2e8 < model.forward_flops(4096) < 1e12


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "r1-distill-qwen-7b"),
        ("LLaMA2 7B", "llama-2-7b"),
        ("/path/to/model/DeepSeek-R1-Distill-Qwen-1.5B/", "r1-distill-qwen-1.5b"),
        ("google/gemma-4-E2B-it", "gemma-4-e2b"),
    ],
)
def test_a_model_is_found_as_people_write_it(written: str, known: str) -> None:
    assert catalogue.model(written)[0] == known


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="unknown model qwen3-33b") as error:
        catalogue.model("qwen3-33b")
    assert error.value.hint == "did you mean qwen3-32b?"


@pytest.mark.parametrize(
    ("written", "known"),
    [("H100", "h100"), ("A100", "a100-80"), ("NVIDIA-A100-SXM4-40GB", "a100-40"), ("NVIDIA L4", "l4"),
     ("H20-96GB", "h20"), ("RTX 4090", "rtx-4090"), ("H100 HBM3", "h100")],
)  # fmt: skip
def test_a_gpu_is_found_as_people_write_it(written: str, known: str) -> None:
    assert catalogue.gpu(written).name == known


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="unknown GPU kind h101") as error:
        catalogue.gpu("h101")
    assert "did you mean h1" in str(error.value.hint) or "did you mean h2" in str(error.value.hint)


def test_a_gpu_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("bf16_tflops: 280\nmemory_gb: 64\nbandwidth_gbs: 1800\nintra_node_gbs: 64\ninter_node_gbs: 25\n")
    kind = catalogue.gpu(str(file))
    assert (kind.name, kind.flops("fp8"), kind.link(16)) == ("mine", 280e12, 25e9)
    file.write_text("bf16_tflops: 280\n")
    with pytest.raises(InputError, match="memory_gb"):
        catalogue.gpu(str(file))
    file.write_text("bf16_tflops: -1\nmemory_gb: 64\nbandwidth_gbs: 1\nintra_node_gbs: 64\ninter_node_gbs: 25\n")
    with pytest.raises(InputError, match="bf16_tflops is -1"):
        catalogue.gpu(str(file))
    file.write_text("bf16_tflop: 1\n")
    with pytest.raises(InputError, match="bf16_tflop"):
        catalogue.gpu(str(file))


def test_lengths_come_from_plain_numbers_counts_or_a_log(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("tokens,count\n100,3\n200,1\n")
    assert catalogue.lengths(file) == ((100, 0.75), (200, 0.25))
    file.write_text("100\n100\n300\n300\n")
    assert catalogue.lengths(file) == ((100, 0.5), (300, 0.5))
    file.write_text("\n".join(json.dumps({"tokens": n}) for n in (5, 5)))
    assert catalogue.lengths(file) == ((5, 1.0),)
    file.write_text('{"response_tokens": 60}\n{"response_length": [1, 2, 3], "prompt_tokens": 7}\n')
    assert catalogue.lengths(file, 40.0) == ((10, 0.5), (100, 0.5))  # a dump of answers
    for text in ("100\nlong\n", '100\n{"words": 3}\n', "100\n-5\n", "100\nnan\n"):
        file.write_text(text)
        with pytest.raises(InputError, match="line 2"):
            catalogue.lengths(file)


def test_windows_and_recurrent_layers_keep_the_cache_small() -> None:
    oss = catalogue.model("gpt-oss-20b")[1]
    assert oss.window_layers == 12
    assert oss.cached_values(10_000) == pytest.approx((12 * 10_000 + 12 * 128) * 2 * 8 * 64)
    hybrid = catalogue.model("qwen3.5-27b")[1]
    assert (hybrid.attention_layers, hybrid.linear_layers) == (16, 48)
    assert hybrid.vision > 4e8
    latent = catalogue.model("deepseek-v3")[1]
    assert latent.cached_values(1) == 61 * 576


def test_layer_types_of_a_config_are_counted() -> None:
    base = {**catalogue.config_of(ROWS["qwen3-8b"]), "sliding_window": 64}
    mixed = from_config({**base, "layer_types": ["sliding_attention", "full_attention"] * 18}, "x")
    assert mixed.window_layers == 18
    assert from_config({**base, "use_sliding_window": False}, "x").window_layers == 0
