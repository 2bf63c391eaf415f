"""Layer profiles go into the planner's files: beside what stands there, in both files or in neither."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner

from trimtab.cli.profile import layers
from trimtab.core.errors import InputError
from trimtab.formats import yaml_text
from trimtab.formats.pipeline import layer_files

MODELS = """\
# measured in spring
DummyModel:
  layers: 0
  mem_MB: []
  parameters_in: 0
  parameters_out: []
google/vit:   # the small one
  layers: 2
  mem_MB: [26.509311999999994, 19.140608]
  parameters_in: 150528
  parameters_out: [302592, 1000]
"""
TYPES = """\
DummyDeviceType:
  bw_Mbps: 0
  mem_MB: 0
  model_profiles:
Minnow:
  bw_Mbps: 1000   # wired
  mem_MB: 2048
  model_profiles:
    google/vit:
    - batch_size: 8
      dtype: torch.float32
      time_s: [0.4647976398468018, 0.081429123878479]
    # nothing else yet
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    models, types = tmp_path / "models.yml", tmp_path / "device_types.yml"
    models.write_text(MODELS)
    types.write_text(TYPES)
    return models, types


def profile(**changes: Any) -> dict[str, Any]:
    return {
        "kind": layer_files.KIND,
        "model": "mlp",
        "dtype": "torch.float32",
        "batch_size": 8,
        "time_s": [0.001, 2e-05, 0.003],
        "mem_MB": [1.5, 0.0, 2.5],
        "parameters_in": 8,
        "parameters_out": [32, 32, 2],
        "device_mem_MB": 1000,
        **changes,
    }


VIT = {"model": "google/vit", "time_s": [0.1, 0.2], "parameters_in": 150528, "parameters_out": [302592, 1000]}
VIT_MEMORY = {"mem_MB": [26.509311999999994, 19.140608]}


def merge(files: tuple[Path, Path], data: dict[str, Any], **settings: Any) -> layer_files.MergedFiles:
    settings = {"device_type": "H200", "bw_mbps": 200000, **settings}
    return layer_files.merge(data, models_file=files[0], types_file=files[1], **settings)


def test_a_new_model_on_a_new_type_is_added_and_all_else_stays(files: tuple[Path, Path]) -> None:
    done = merge(files, profile())
    models, types = files[0].read_text(), files[1].read_text()
    assert models.startswith(MODELS)
    assert types.startswith(TYPES)
    assert yaml_text.parse(models, "")["mlp"] == {
        "layers": 3, "mem_MB": [1.5, 0.0, 2.5], "parameters_in": 8, "parameters_out": [32, 32, 2]
    }  # fmt: skip
    assert yaml_text.parse(types, "")["H200"] == {
        "bw_Mbps": 200000,
        "mem_MB": 900,
        "model_profiles": {
            "mlp": [{"batch_size": 8, "dtype": "torch.float32", "time_s": [0.001, 2e-05, 0.003]}],
        },
    }
    assert done.changed
    assert any("90%" in note for note in done.notes)


def test_other_entries_stay_byte_for_byte_when_one_in_their_midst_changes(files: tuple[Path, Path]) -> None:
    long_list = "  time_s: [" + ",\n     ".join(f"{number}.5e-1 " for number in range(40)) + "]   # odd layout\n"
    types = "# the lab\nfirst: {bw_Mbps: 1}   # odd\n" + TYPES + "'last' :\n" + long_list
    files[1].write_text(types)
    merge(files, profile(), device_type="Minnow", bw_mbps=None)
    before, after = types.partition("Minnow:")[0], types[types.index("'last'") :]
    text = files[1].read_text()
    assert text.startswith(before + "Minnow:\n  bw_Mbps: 1000   # wired\n")
    assert text.endswith(after)
    assert "# nothing else yet" in text
    assert list(yaml_text.parse(text, "")["Minnow"]["model_profiles"]) == ["google/vit", "mlp"]


@pytest.mark.parametrize(
    "layout",
    [
        MODELS.replace("\n", "\r\n"),
        "{google/vit: {layers: 1, mem_MB: [1], parameters_in: 1, parameters_out: [1]}}\n",
        "---\n" + MODELS + "...\n",
        "base: &all [1, 2]\nother: {parameters_out: *all}\n",
        MODELS.rstrip("\n"),
    ],
)
def test_every_layout_of_a_file_can_be_added_to(files: tuple[Path, Path], layout: str) -> None:
    files[0].write_bytes(layout.encode())
    old = yaml_text.parse(layout, "")
    merge(files, profile())
    new = yaml_text.read_mapping(files[0])
    assert new.pop("mlp")["layers"] == 3
    assert new == old
    text = files[0].read_bytes()
    assert text.count(b"\r\n") in (0, text.count(b"\n"))


def test_files_that_are_not_there_are_made(tmp_path: Path) -> None:
    files = (tmp_path / "m.yml", tmp_path / "t.yml")
    merge(files, profile())
    assert list(yaml_text.read_mapping(files[0])) == ["mlp"]
    assert list(yaml_text.read_mapping(files[1])) == ["H200"]


def test_files_with_nothing_but_comments_keep_them(tmp_path: Path) -> None:
    files = (tmp_path / "m.yml", tmp_path / "t.yml")
    files[0].write_text("# models of the lab")
    files[1].write_text("")
    merge(files, profile())
    assert files[0].read_text().startswith("# models of the lab\nmlp:\n")


def test_a_type_without_profiles_gets_its_first(files: tuple[Path, Path]) -> None:
    merge(files, profile(), device_type="DummyDeviceType", bw_mbps=None)
    entry = yaml_text.read_mapping(files[1])["DummyDeviceType"]
    assert entry["bw_Mbps"] == 0
    assert entry["model_profiles"]["mlp"][0]["time_s"] == [0.001, 2e-05, 0.003]


def test_another_dtype_or_batch_size_stands_beside_the_first(files: tuple[Path, Path]) -> None:
    for dtype, batch in (("torch.bfloat16", 8), ("torch.float32", 4)):
        merge(files, profile(**VIT, **VIT_MEMORY, dtype=dtype, batch_size=batch), device_type="Minnow", bw_mbps=None)
    rows = yaml_text.read_mapping(files[1])["Minnow"]["model_profiles"]["google/vit"]
    assert [(row["dtype"], row["batch_size"]) for row in rows] == [
        ("torch.float32", 8), ("torch.bfloat16", 8), ("torch.float32", 4)
    ]  # fmt: skip
    assert rows[0]["time_s"] == [0.4647976398468018, 0.081429123878479]
    assert files[0].read_text() == MODELS


@pytest.mark.parametrize(
    ("data", "settings", "told"),
    [
        (profile(**{**VIT, "time_s": [1, 2, 3], "parameters_out": [1, 2, 3]}, mem_MB=[1, 2, 3]), {}, "another layers"),
        (profile(**{**VIT, "parameters_in": 7}, **VIT_MEMORY), {}, "another parameters_in: 150528, not 7"),
        (profile(**{**VIT, "parameters_out": [302592, 9]}, **VIT_MEMORY), {}, "1000, not 9, after layer 2"),
        (
            profile(**VIT, **VIT_MEMORY),
            {"device_type": "Minnow", "bw_mbps": None},
            "already has a profile of google/vit with torch.float32 and batch size 8",
        ),
        (profile(), {"device_type": "Minnow", "bw_mbps": 10}, "another bw_Mbps: 1000, not 10"),
        (profile(), {"device_type": "Minnow", "bw_mbps": None, "mem_mb": 10}, "another mem_MB: 2048, not 10"),
        (profile(), {"bw_mbps": None}, "bandwidth of H200 is not known"),
        (profile(device_mem_MB=0), {}, "memory of H200 is not known"),
        (profile(), {"bw_mbps": float("nan")}, "0 or more"),
        (profile(), {"device_type": " "}, "needs a name"),
    ],
)
def test_a_contradiction_is_refused_and_nothing_is_written(
    files: tuple[Path, Path], data: dict[str, Any], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        merge(files, data, **settings)
    assert (files[0].read_text(), files[1].read_text()) == (MODELS, TYPES)


def test_force_replaces_what_contradicts_and_tells_what_no_longer_fits(files: tuple[Path, Path]) -> None:
    data = profile(**{**VIT, "time_s": [1.0, 2.0, 3.0], "parameters_out": [1, 2, 3]}, mem_MB=[1.0, 2.0, 3.0])
    done = merge(files, data, force=True)
    assert yaml_text.read_mapping(files[0])["google/vit"]["layers"] == 3
    assert "# the small one" in files[0].read_text()
    assert any("Minnow has a profile of google/vit with 2 layers" in note for note in done.notes)
    merge(files, data, device_type="Minnow", bw_mbps=500, force=True)
    entry = yaml_text.read_mapping(files[1])["Minnow"]
    assert entry["bw_Mbps"] == 500
    assert [row["time_s"] for row in entry["model_profiles"]["google/vit"]] == [[1.0, 2.0, 3.0]]


def test_the_same_profile_twice_changes_nothing(files: tuple[Path, Path]) -> None:
    merge(files, profile())
    before = (files[0].read_text(), files[1].read_text())
    again = merge(files, profile())
    assert (files[0].read_text(), files[1].read_text()) == before
    assert not again.changed


def test_of_two_memories_the_larger_stays(files: tuple[Path, Path]) -> None:
    done = merge(files, profile(**VIT, mem_MB=[30.0, 9.0]))
    assert yaml_text.read_mapping(files[0])["google/vit"]["mem_MB"] == [30.0, 19.140608]
    assert any("raised for 1 of 2 layers" in note for note in done.notes)
    assert any("its own --model-name" in note for note in done.notes)


def test_a_shorter_list_of_counts_is_a_block_that_repeats(files: tuple[Path, Path]) -> None:
    files[0].write_text("long: {layers: 4, mem_MB: [1, 1, 1, 1], parameters_in: 2, parameters_out: [5, 6]}  # short\n")
    data = profile(model="long", time_s=[1] * 4, mem_MB=[1] * 4, parameters_in=2, parameters_out=[5, 6, 5, 6])
    merge(files, data)
    assert files[0].read_text().endswith("# short\n")


def test_names_that_look_like_something_else_come_back_as_names(files: tuple[Path, Path]) -> None:
    merge(files, profile(model="on"), device_type="123")
    assert '"on"' in files[0].read_text()
    assert yaml_text.read_mapping(files[1])["123"]["model_profiles"]["on"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("- a\n", "mapping of names"), ("a: [1\n", "not valid YAML"), ("H200: 3\nmlp: 3\n", "keys with values")],
)
def test_a_malformed_file_is_told_and_left_alone(files: tuple[Path, Path], text: str, told: str) -> None:
    files[1].write_text(text)
    with pytest.raises(InputError, match=told):
        merge(files, profile())
    assert files[0].read_text() == MODELS
    assert files[1].read_text() == text


def test_when_the_second_file_cannot_be_written_the_first_is_put_back(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layer_files.files.write_text

    def fails_on_types(path: Path, text: str) -> None:
        if Path(path) == files[1]:
            raise InputError("disk full")
        real(path, text)

    monkeypatch.setattr(layer_files.files, "write_text", fails_on_types)
    with pytest.raises(InputError, match="disk full"):
        merge(files, profile())
    assert files[0].read_text() == MODELS
    files[0].unlink()
    with pytest.raises(InputError, match="disk full"):
        merge(files, profile())
    assert not files[0].exists()


def test_a_file_keeps_its_mode(files: tuple[Path, Path]) -> None:
    files[0].chmod(0o640)
    merge(files, profile())
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "other"}, "holds no layer profile"),
        ({"time_s": []}, "at least 1 item"),
        ({"time_s": [1, -2, 3]}, "0 or more"),
        ({"time_s": "fast"}, "expected: a list"),
        ({"mem_MB": [1]}, "mem_MB has 1 numbers, time_s has 3"),
        ({"parameters_out": [1.5, 2, 3]}, "whole number"),
        ({"parameters_in": None}, "whole number"),
        ({"batch_size": 0}, "1 or more"),
        ({"model": ""}, "model is not right"),
    ],
)
def test_a_wrong_measurement_is_told_by_its_key(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile(**changes)))
    with pytest.raises(InputError, match=told):
        layer_files.read_json(path)


def test_a_number_that_is_none_and_text_that_is_no_json_are_told(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile(time_s=[1, float("nan"), 2])))
    with pytest.raises(InputError, match="NaN is no number"):
        layer_files.read_json(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        layer_files.read_json(path)


# The command.

app = typer.Typer()
app.command("layers")(layers)
app.command("other")(lambda: None)  # with one command alone, typer takes no name


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["layers", *arguments])


def test_the_command_measures_and_keeps(files: tuple[Path, Path]) -> None:
    done = command(
        "models_for_layers:mlp", "--input", "8", "--type", "here", "--bw-mbps", "1000", "--mem-mb", "512",
        "-b", "2", "--repeats", "2", "--warmup", "0", "-M", str(files[0]), "-T", str(files[1]),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "elements out" in done.output
    assert yaml_text.read_mapping(files[0])["mlp"]["parameters_out"] == [32, 32, 4, 2]
    (row,) = yaml_text.read_mapping(files[1])["here"]["model_profiles"]["mlp"]
    assert (row["batch_size"], row["dtype"], len(row["time_s"])) == (2, "torch.float32", 4)


def test_what_was_measured_elsewhere_is_kept_under_a_name_of_choice(files: tuple[Path, Path], tmp_path: Path) -> None:
    there = command("models_for_layers:mlp", "--input", "8", "-b", "2", "--repeats", "1", "--format", "json")
    assert there.exit_code == 0, there.output
    path = tmp_path / "there.json"
    path.write_text(there.stdout)
    where = ("-M", str(files[0]), "-T", str(files[1]))
    done = command(
        "--from-json", str(path), "--type", "H200", "-m", "mine", "--bw-mbps", "9", *where, "--format", "yaml"
    )
    assert done.exit_code == 0, done.output
    assert YAML(typ="safe").load(done.stdout)["written"]["changed"] is True
    assert "mine" in yaml_text.read_mapping(files[0])
    assert "H200" in yaml_text.read_mapping(files[1])


def test_the_command_needs_a_model_or_a_file(tmp_path: Path) -> None:
    assert isinstance(command().exception, InputError)
    assert isinstance(command("m:f", "--from-json", str(tmp_path / "x")).exception, InputError)


def test_importing_the_command_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, trimtab.cli.profile, trimtab.cli.pipeline, trimtab.runtime.pipeline.runner; "
        "assert not {'torch', 'ray', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
