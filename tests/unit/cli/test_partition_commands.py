"""`trimtab pipeline` and `sched-pipeline` as they are called."""

from __future__ import annotations

import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner, Result

from trimtab.cli.pipeline import pipeline, ray_hosts, sched_pipeline
from trimtab.core.errors import TrimtabError
from trimtab.formats.pipeline.pipeedge import SplitTarget, layout, split_lines
from trimtab.model.pipeline import PipelineStage, Schedule
from trimtab.runtime.rayapi.nodes import live_nodes

EXAMPLE = Path(__file__).parents[3] / "examples" / "pipeline"
LARGE = "google/vit-large-patch16-224"


@pytest.fixture(autouse=True)
def in_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(pipeline)
    return CliRunner().invoke(app, list(arguments))


def data(*arguments: str) -> dict:
    result = call("--format", "json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> TrimtabError:
    error = call(*arguments).exception
    assert isinstance(error, TrimtabError)
    return error


def test_json_has_the_whole_answer() -> None:
    answer = data("--frontier")
    assert answer["bottleneck_seconds"] == pytest.approx(1.5399, abs=5e-5)
    assert answer["optimal"]
    assert answer["lower_bound_seconds"] == pytest.approx(answer["bottleneck_seconds"])
    assert answer["items_per_second"] == pytest.approx(8 / answer["bottleneck_seconds"])
    assert [next(iter(entry)) for entry in answer["schedule"]] == [stage["host"] for stage in answer["stages"]]
    assert max(stage["utilisation"] for stage in answer["stages"]) == pytest.approx(1)
    assert answer["improve_first"]["what"] == "compute"
    assert [point["devices"] for point in answer["frontier"]] == list(range(1, 9))
    assert any("forward pass" in sentence for sentence in answer["assumptions"])


def test_text_ends_with_the_schedule_and_says_what_to_improve() -> None:
    result = call("--model-name", LARGE, "--frontier")
    assert "5.0919 s per microbatch of 8" in result.stdout
    assert "Improve first" in result.stdout
    assert "proven least bottleneck" in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("- ")
    assert "DummyDeviceType" not in result.stdout


def test_yaml_is_the_same_data() -> None:
    assert "bottleneck_seconds: 1.539" in call("--format", "yaml").stdout


def test_latency_headroom_ends_and_limits_are_passed_on() -> None:
    assert data("--objective", "latency")["devices_used"] == 1
    assert data("--max-devices", "3")["devices_used"] == 3
    tight = data("--headroom", "95%")
    assert all(stage["memory_mb"] < stage["memory_available_mb"] for stage in tight["stages"])
    assert tight["stages"][0]["memory_available_mb"] in (pytest.approx(2048 * 0.05), pytest.approx(8192 * 0.05))
    ends = data("--source", "rcc-0", "--sink", "rcc-0")
    assert ends["input_seconds"] > 0 or ends["stages"][0]["host"] == "rcc-0"


def test_links_are_read(tmp_path: Path) -> None:
    links = tmp_path / "links.yml"
    links.write_text("- {hosts: [mb-0, mb-1, mb-2, mb-3], bw_Mbps: 0}\n")
    stages = data("--links", str(links))["stages"]
    assert all(not (a["host"][0] == b["host"][0] == "m") for a, b in pairwise(stages))


def test_errors_carry_their_status() -> None:
    assert refused("--model-name", "nothing-like-it").exit_status == 2
    assert refused("--headroom", "ten").exit_status == 2
    assert refused("--headroom", "99.5%").exit_status == 3
    assert refused("--models-file", "nowhere.yml").exit_status == 2
    assert refused("--batch-size", "4").exit_status == 2


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    report = tmp_path / "pipeline.html"
    assert call("--report", str(report), "--frontier").exit_code == 0
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert "mb-0" in page
    assert "How many devices are worth it" in page


def test_emit_prints_only_the_split() -> None:
    assert call("--emit", "vllm").stdout.splitlines()[0] == 'export VLLM_PP_LAYER_PARTITION="5,7,5,7,5,7,5,7"'
    assert call("--emit", "sglang").stdout.startswith("export SGLANG_PP_LAYER_PARTITION=")
    assert '--pipeline-model-parallel-layout "Et*5|t*7|' in call("--emit", "megatron").stdout
    blocks = call("--emit", "vllm", "--cut-every", "4").stdout.split('"')[1]
    assert sum(map(int, blocks.split(","))) == 12


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ([3], "Et*3L"),
        ([1, 2], "Et|ttL"),
        ([2, 4, 4, 4, 3], "Ett|(t*4|)*3t*3L"),
        ([2, 4, 5, 5, 1], "Ett|t*4|(t*5|)*2tL"),
    ],
)
def test_a_layout_holds_every_stage_once(sizes: list[int], want: str) -> None:
    assert layout(sizes) == want


def test_megatron_is_told_first_and_last_where_that_says_it_all() -> None:
    stages, first = [], 1
    for index, size in enumerate([2, 4, 4, 3]):
        stages.append(PipelineStage(f"h{index}", "t", first, first + size - 1, 1.0, 0.0, 1.0, 2.0))
        first += size
    said = split_lines(Schedule(tuple(stages)), SplitTarget.megatron)
    assert "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3" in said
    assert "--num-layers 13 --pipeline-model-parallel-size 4" in said
    assert "ranks 0 to 3 on: h0 h1 h2 h3" in said


def test_sched_pipeline_prints_the_list_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert sched_pipeline([]) == 0
    said = capsys.readouterr()
    assert said.out == (
        "- mb-0: [1, 5]\n- rcc-0: [6, 12]\n- mb-1: [13, 17]\n- rcc-1: [18, 24]\n"
        "- mb-2: [25, 29]\n- rcc-2: [30, 36]\n- mb-3: [37, 41]\n- rcc-3: [42, 48]\n"
    )


def test_sched_pipeline_takes_the_public_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "-d",
        "torch.float32",
        "-b",
        "8",
        "-i",
        "2",
        "-o",
        "2",
        "-M",
        "models.yml",
        "-T",
        "device_types.yml",
        "-D",
        "devices.yml",
    ]
    assert sched_pipeline([*flags, "-m", LARGE]) == 0
    assert capsys.readouterr().out.count("\n") == 8
    assert sched_pipeline(["-h"]) == 0
    assert "--buffers-in" in capsys.readouterr().out


def test_sched_pipeline_prints_an_empty_list_for_a_model_without_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert sched_pipeline(["-m", "DummyModel"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_sched_pipeline_says_infeasible_with_a_status_and_a_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (EXAMPLE / "device_types.yml").read_text()
    small = tmp_path / "types.yml"
    small.write_text(text.replace("mem_MB: 2048", "mem_MB: 20").replace("mem_MB: 8192", "mem_MB: 20"))
    assert sched_pipeline(["-T", str(small)]) == 3
    said = capsys.readouterr()
    assert said.out == "[]\n"
    assert "fits on no device" in said.err


@pytest.mark.parametrize(
    "arguments", [["-m", "nope"], ["-M", "nowhere.yml"], ["-b", "3"], ["-d", "torch.flat"], ["-b", "x"], ["--what"]]
)
def test_sched_pipeline_never_ends_well_on_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sched_pipeline(arguments) == 2
    assert capsys.readouterr().out == ""


NODES = [
    {
        "Alive": True,
        "NodeManagerAddress": "10.0.0.2",
        "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0},
        "Labels": {},
    },
    {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 1.0}, "Labels": {}},
    {
        "Alive": True,
        "NodeManagerAddress": "10.0.0.3",
        "Resources": {"CPU": 8.0, "GPU": 1.0},
        "Labels": {"ray.io/accelerator-type": "L4"},
    },
    {"Alive": True, "NodeManagerAddress": "10.0.0.4", "Resources": {"CPU": 4.0}},
    {"Alive": False, "NodeManagerAddress": "10.0.0.5", "Resources": {}},
]


def test_ray_nodes_become_devices_by_kind() -> None:
    assert ray_hosts(live_nodes(SimpleNamespace(nodes=lambda: NODES))) == {
        "CPU": ["10.0.0.4"],
        "GPU": ["10.0.0.1"],
        "H100": ["10.0.0.2/0", "10.0.0.2/1"],
        "L4": ["10.0.0.3"],
    }


def test_devices_are_printed_from_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = types.ModuleType("ray")
    left = []
    ray.init = lambda **_: None
    ray.is_initialized = lambda: False
    ray.nodes = lambda: NODES
    ray.shutdown = lambda: left.append(True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    result = call("--devices-from-ray", "auto")
    assert "H100:\n- 10.0.0.2/0\n- 10.0.0.2/1\n" in result.stdout
    assert left


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    error = refused("--devices-from-ray", "auto")
    assert error.exit_status == 2
    assert "pip install" in str(error)
