"""The layer profiler: what it finds in a model, what it measures, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimtab.core.errors import InputError
from trimtab.profile import block_chain, layers

HERE = Path(__file__).parents[2] / "helpers"
MODELS = "models_for_layers"


def measured(factory: str, model_input: str, **settings: object) -> layers.LayerProfile:
    return layers.profile_layers(
        f"{MODELS}:{factory}", model_input=model_input, **{"batch_size": 2, "warmup": 1, "repeats": 3, **settings}
    )


def test_a_sequential_is_measured_layer_by_layer() -> None:
    profile = measured("mlp", "8")
    assert profile.names == ("0", "1", "2", "3")
    assert profile.parameters == (8 * 32 + 32, 0, 32 * 4 + 4, 4 * 2 + 2)
    assert profile.weights_MB[0] == pytest.approx((8 * 32 + 32) * 4 / 2**20, abs=1e-6)
    assert profile.parameters_in == 8
    assert profile.parameters_out == (32, 32, 4, 2)
    assert all(0 < one <= slowest for one, slowest in zip(profile.time_s, profile.slowest_s, strict=True))
    assert profile.dtype == "torch.float32"
    assert not [note for note in profile.notes if "busy machine" not in note]


def test_a_list_of_modules_is_the_same_chain() -> None:
    assert measured("as_list", "8").parameters_out == measured("mlp", "8").parameters_out


def test_counts_do_not_depend_on_the_batch_size() -> None:
    one, other = (
        measured("decoder", f"{MODELS}:tokens", blocks="body.layers", batch_size=1),
        measured("decoder", f"{MODELS}:tokens", blocks="body.layers", batch_size=4),
    )
    assert (one.parameters_in, one.parameters_out) == (other.parameters_in, other.parameters_out)


def test_every_tensor_that_crosses_a_cut_is_counted() -> None:
    profile = measured("pairs", f"{MODELS}:pair")
    assert profile.parameters_in == 16 + 16 + 1
    assert profile.parameters_out == (33, 33, 33)


@pytest.mark.parametrize("factory", ["decoder", "decoder_of_tuples"])
def test_a_block_list_inside_a_module_is_found_and_its_side_arguments_travel(factory: str) -> None:
    profile = measured(factory, f"{MODELS}:tokens", blocks="body.layers")
    hidden, mask = 5 * 16, 5 * 5
    assert profile.names == ("body.layers.0", "body.layers.1", "body.layers.2")
    assert profile.parameters_in == hidden + mask
    assert profile.parameters_out == (hidden + mask, hidden + mask, hidden)  # the mask ends with the last block
    assert any("1,650 parameters are outside" in note for note in profile.notes)
    assert any("torch.bool" in note for note in profile.notes)
    assert any("without the batch dimension" in note for note in profile.notes)


def test_blocks_that_take_and_give_several_values_are_a_chain() -> None:
    profile = measured("two_lanes", f"{MODELS}:two_inputs", blocks="lanes")
    assert profile.parameters_in == 8
    assert profile.parameters_out == (8, 8, 8)


def test_the_chain_computes_what_the_model_computes() -> None:
    model = block_chain.load(f"{MODELS}:decoder")().eval()
    chain = block_chain.load_chain(f"{MODELS}:decoder", blocks="body.layers")
    given = block_chain.input_maker(f"{MODELS}:tokens", batch_size=2, dtype="torch.float32", device="cpu")(0)
    with torch.inference_mode():
        assert torch.equal(model.head(chain.run(given)), model(given))


def test_memory_counts_what_a_block_holds_besides_input_and_output() -> None:
    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.repeat(1, 1024)  # 4 KiB a row
            doubled = wide * 2
            del wide
            return doubled[:, :1].clone()

    _, used = layers._measured_memory(Wide(), block_chain.BlockOutput(torch.ones(256, 1)), torch.device("cpu"))
    # Both wide tensors at once, of which a plan counts as much as the output takes by itself.
    assert used == 2 * 256 * 1024 * 4 - 256 * 4


def test_a_view_of_the_input_or_of_a_weight_is_no_new_memory() -> None:
    _, used = layers._measured_memory(
        torch.nn.Flatten(), block_chain.BlockOutput(torch.ones(4, 8, 8)), torch.device("cpu")
    )
    assert used == 0


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("torch.float64", torch.float64)])
def test_the_model_is_measured_in_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    profile = measured("mlp", "8", dtype=name)
    assert profile.dtype == str(dtype)
    assert profile.weights_MB[0] == pytest.approx(288 * dtype.itemsize / 2**20, abs=1e-6)


def test_inputs_differ_from_each_other_and_come_back_the_same() -> None:
    make = block_chain.input_maker("8", batch_size=2, dtype="torch.float32", device="cpu")
    assert torch.equal(make(1), make(1))
    assert not torch.equal(make(1), make(2))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"factory": "mlp", "model_input": ""}, "no model input is given"),
        ({"factory": "mlp", "model_input": "eight"}, "is no shape"),
        ({"factory": "mlp", "model_input": "0"}, "1 or more"),
        ({"factory": "mlp", "model_input": "9"}, r"block 1 \(0\) failed: RuntimeError"),
        ({"factory": "mlp", "model_input": f"{MODELS}:WIDTH"}, "is no function"),
        ({"factory": "mlp", "model_input": f"{MODELS}:mlp"}, "failed .called with 2.: TypeError"),
        ({"factory": "mlp", "model_input": "8", "batch_size": 0}, "batch size is 1 or more"),
        ({"factory": "mlp", "model_input": "8", "repeats": 0}, "repeats is 1 or more"),
        ({"factory": "mlp", "model_input": "8", "dtype": "torch.int8"}, "cannot be run in"),
        ({"factory": "mlp", "model_input": "8", "dtype": "float7"}, "no dtype"),
        ({"factory": "mlp", "model_input": "8", "device": "tpu"}, "is no device"),
        ({"factory": "mlp", "model_input": "8", "threads": 0}, "threads is 1 or more"),
        ({"factory": "mlp", "model_input": "8", "blocks": "body"}, "nothing is called body"),
        ({"factory": "decoder", "model_input": "8"}, r"--blocks: body.layers \(3 blocks\)"),
        ({"factory": "branches", "model_input": "8", "blocks": "layers"}, "does not take what block"),
        ({"factory": "broken", "model_input": "8"}, "failed: RuntimeError: no weights here"),
        ({"factory": "no_model", "model_input": "8"}, "gives int"),
        ({"factory": "missing", "model_input": "8"}, "has no missing"),
    ],
)
def test_a_wrong_call_is_told_in_a_sentence(call: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        measured(**call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("mlp", "names no object"),
        ("no_such_module:mlp", "cannot be imported: ModuleNotFoundError"),
        ("no_such_file.py:mlp", "no file no_such_file.py"),
    ],
)
def test_a_factory_that_is_not_there_is_told(spec: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        block_chain.load(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(InputError, match="no device cuda"):
        measured("mlp", "8", device="cuda")


def test_the_file_alone_measures_where_nothing_is_installed(tmp_path: Path) -> None:
    shutil.copy(layers.__file__, tmp_path / "layers.py")
    shutil.copy(block_chain.__file__, tmp_path / "block_chain.py")
    shutil.copy(HERE / f"{MODELS}.py", tmp_path / "model.py")
    # -P and -S would hide torch as well: that trimtab is not imported is what has to be shown.
    blocked = (
        "import sys; sys.modules['trimtab'] = None; sys.argv = ['layers.py', *sys.argv[1:]]; "
        "import runpy; runpy.run_path('layers.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", blocked]
    done = subprocess.run(
        [*command, "model.py:mlp", "--input", "8", "--batch-size", "2", "--repeats", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["kind"] == layers.KIND
    assert data["layers"] == len(data["time_s"]) == len(data["mem_MB"]) == 4
    assert all(math.isfinite(seconds) for seconds in data["time_s"])
    wrong = subprocess.run(
        [*command, "model.py:mlp", "--input", "9"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "error: block 1 (0) failed" in wrong.stderr


def test_the_file_needs_nothing_but_torch_and_the_standard_library() -> None:
    code = (
        "import sys; sys.modules['trimtab'] = None; before = set(sys.modules); "
        f"sys.path.insert(0, {str(Path(layers.__file__).parent)!r}); "
        f"import runpy; runpy.run_path({layers.__file__!r}); "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "block_chain"


def test_without_torch_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="needs PyTorch") as told:
        layers.profile_layers("anything:factory")
    assert "pip install" in str(told.value)
