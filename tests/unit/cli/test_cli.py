"""The command line as a person and as a program use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trimtab import __version__
from trimtab.cli.app import app, run
from trimtab.formats import yaml_text
from trimtab.formats.load import load

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "src" / "trimtab" / "examples" / "grpo.yaml"
SEED = ROOT / "examples" / "math" / "config" / "qwen2.5-1.5b-grpo-megatron.yaml"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def shell(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **more},
    )


def test_the_version_is_told_without_importing_anything_large() -> None:
    code = "import sys; sys.argv = ['trimtab', '--version']; import trimtab.__main__ as m; m.main(); "
    code += "print([n for n in ('typer', 'rich', 'numpy', 'pydantic', 'ray', 'hydra') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"trimtab {__version__}", "[]"]


def test_planning_an_own_job_file_imports_no_ray_no_torch_and_no_hydra() -> None:
    code = f"import sys; from trimtab.cli.app import run; run(['plan', {str(EXAMPLE)!r}, '--no-sensitivity']); "
    code += "print([n for n in ('ray', 'torch', 'hydra', 'omegaconf') if n in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_the_text_answers_with_times_reasons_and_the_block_last(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "plan", EXAMPLE)
    assert (status, err) == (0, "")
    for words in ("per iteration", "proven optimal", "all shared", "compared with", "How far a cost may be off"):
        assert words in out
    block = out[out.index("Best placement for this task is:") :].split("\n\n", 1)[1]
    assert set(yaml_text.parse(block, "block")) == {"placement"}


def test_json_has_the_documented_keys_and_agrees_with_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "plan", EXAMPLE, "--format", "json")
    data = json.loads(out)
    for key in ("iteration_seconds", "lower_bound_seconds", "optimal", "mode", "groups", "components", "search"):
        assert key in data
    for key in ("alternatives", "sensitivity", "assumptions"):
        assert key in data
    assert data["optimal"] is True
    assert data["lower_bound_seconds"] == pytest.approx(data["iteration_seconds"])
    assert data["mode"] in ("collocated", "disaggregated", "hybrid")
    for group in data["groups"]:
        assert set(group) >= {"components", "gpus"}
    for component in data["components"].values():
        assert set(component) >= {"gpus", "variant", "seconds", "start", "end", "idle_share", "extrapolated"}
    assert set(data["search"]) == {"seconds", "plans_considered"}
    _, out, _ = call(capsys, "plan", EXAMPLE, "--format", "yaml")
    assert yaml_text.parse(out, "yaml")["groups"] == data["groups"]


def test_the_seeds_form_prints_the_seeds_block(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "plan", SEED)
    assert status == 0
    assert out.endswith(
        "Best placement for this task is:\n\n"
        "cluster:\n  num_nodes: 1\n  num_gpus_per_node: 8\n  component_placement:\n    rollout,trainer: all\n"
    )
    assert "186.4 s" in out


def test_the_example_script_plans_the_bundled_config() -> None:
    script = ROOT / "examples" / "math" / "run_placement_autotune.sh"
    done = subprocess.run([str(script)], capture_output=True, text=True, cwd="/", timeout=60, check=True)
    assert "rollout,trainer: all" in done.stdout
    named = subprocess.run(
        [str(script), "qwen2.5-1.5b-grpo-megatron", "cluster.num_nodes=2"], capture_output=True, text=True, timeout=60
    )
    assert named.returncode == 0
    assert "num_nodes: 2" in named.stdout
    missing = subprocess.run([str(script), "nothing"], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2
    assert "there is no file" in missing.stderr


def test_apply_edits_the_file_keeps_the_rest_and_a_backup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    before = EXAMPLE.read_text()
    job.write_text(before)
    status, out, err = call(capsys, "plan", job, "--apply", "--no-sensitivity")
    assert status == 0
    assert "backup" in err
    after = job.read_text()
    assert after.startswith(before.rstrip("\n"))
    assert (tmp_path / "job.yaml.bak").read_text() == before
    ranks = load(job).current.ranks
    assert set(ranks) == {"rollout", "inference", "trainer"}
    status, out, err = call(capsys, "plan", job, "--apply", "--no-sensitivity")
    assert "has this placement already" in err
    assert "keep it" in out
    assert not (tmp_path / "job.yaml.bak1").exists()


def test_output_writes_another_file_and_leaves_the_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = tmp_path / "config.yaml", tmp_path / "new.yaml"
    source.write_text(SEED.read_text())
    status, _, _ = call(capsys, "plan", source, "--output", target, "--no-sensitivity")
    assert status == 0
    assert source.read_text() == SEED.read_text()
    assert "all" in str(yaml_text.parse(target.read_text(), "new")["cluster"]["component_placement"])


def test_overrides_are_printed_one_to_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "plan", SEED, "--overrides")
    assert status == 0
    assert out.splitlines()[0] == "'~cluster.component_placement'" or out.startswith("~cluster.component_placement")


def test_report_and_svg_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = call(capsys, "plan", EXAMPLE, "--report", tmp_path / "r.html", "--svg", tmp_path / "t.svg")
    assert status == 0
    assert "report written" in err
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "t.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["plan", "nothing.yaml"], 2, "there is no file nothing.yaml"),
        (["plan"], 2, "FILE is missing"),
        (["frobnicate"], 2, "No such command"),
        (["plan", EXAMPLE, "--noise", "much"], 2, "a share such as 5%"),
        (["plan", EXAMPLE, "--report", "/no/such/folder/r.html"], 2, "cannot write"),
        (["plan", EXAMPLE, "--output", "/no/such/folder/r.yaml"], 2, "cannot write"),
        (["plan", EXAMPLE, "--profile", "nothing.yaml"], 2, "there is no file nothing.yaml"),
        (["plan", EXAMPLE, "cluster.nodes=0"], 2, "the cluster has no GPUs"),
        (["plan", EXAMPLE, "cluster.gpu_memory_gb=50"], 3, "rollout fits nowhere"),
        (["plan", EXAMPLE, "cluster.cpus=1"], 3, "CPUs together"),
        (["plan", EXAMPLE, "workflow.components.rollout.gpus=[64]"], 3, "no GPU count is allowed for rollout"),
        (["plan", EXAMPLE, "placement={rollout: 0-40}"], 2, "GPUs that do not exist: 32"),
        (["plan", EXAMPLE, "placement={rollout: 0-3, trainer: 3-7, inference: '8'}"], 2, "overlap on GPUs 3"),
    ],
)
def test_errors_have_a_status_and_say_what_where_and_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: list[object], status: int, words: str
) -> None:
    got, out, err = call(capsys, *arguments)
    assert got == status
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_planner_errors_name_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "plan", EXAMPLE, "cluster.gpu_memory_gb=50")
    assert f"{EXAMPLE}: workflow.components.rollout.memory_gb.active" in err


def test_debug_shows_the_traceback() -> None:
    done = shell("--debug", "plan", "nothing.yaml")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "Traceback" not in shell("plan", "nothing.yaml").stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m trimtab plan {EXAMPLE} --format json | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == "{\n"
    assert "Error" not in done.stderr


def test_a_profile_gives_costs_to_an_own_job_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "cluster: {gpus_per_node: 8}\nworkflow:\n  components:\n    rollout: {}\n    trainer: {after: [rollout]}\n"
    )
    (tmp_path / "p.yaml").write_text(
        "profile:\n  source: timer\n  components:\n"
        "    rollout: {seconds: {8: 59.9}}\n    trainer: {seconds: {8: 95.7}}\n"
    )
    status, out, _ = call(capsys, "plan", tmp_path / "job.yaml", "--profile", tmp_path / "p.yaml", "--format", "json")
    assert status == 0
    assert json.loads(out)["iteration_seconds"] == pytest.approx(155.6)


def test_completion_for_the_shell_can_be_shown() -> None:
    done = shell("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "trimtab" in done.stdout


def test_help_names_every_verb_and_option() -> None:
    assert "plan" in shell("--help").stdout
    text = shell("plan", "--help", COLUMNS="200").stdout
    for option in ("--profile", "--format", "--apply", "--output", "--report", "--svg", "--noise", "--no-sensitivity"):
        assert option in text


def test_the_demo_plans_the_bundled_example_and_says_what_to_look_at(tmp_path: Path) -> None:
    done = shell("demo", "plan", "--folder", tmp_path / "out")
    assert done.returncode == 0
    assert "Results" in done.stdout
    assert (tmp_path / "out" / "plan.html").exists()


ONE_POINT = """
cluster: {nodes: 2, gpus_per_node: 8}
workflow:
  batches: 512
  components:
    rollout: {seconds: {16: 60}}
    trainer: {seconds: {16: 60}, after: [rollout]}
"""


def test_one_measured_point_each_gives_two_plans_and_no_proof(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(ONE_POINT)
    report = tmp_path / "plan.html"
    status, out, _ = call(capsys, "plan", job, "--report", report)
    assert status == 0
    assert "proven optimal" not in out
    assert "Measure rollout on 8 GPUs: that decides" in out
    assert "rollout 8 | trainer 8" in out
    assumed = out[out.index("Assumed") :].splitlines()
    assert assumed[1].strip().startswith("- perfect scaling: rollout, trainer")
    block = out[out.index("Best placement for this task is:") :].split("\n\n", 1)[1]
    assert yaml_text.parse(block, "block") == {"placement": {"rollout,trainer": "all"}}
    assert "If scaling is less than perfect" in report.read_text()

    data = json.loads(call(capsys, "plan", job, "--format", "json")[1])
    assert data["optimal"] is False
    assert data["assumptions"][0].startswith("perfect scaling")
    assert data["scaling"]["measured_once"] == ["rollout", "trainer"]
    assert data["scaling"]["measure"] == {"component": "rollout", "gpus": 8}
    assert data["scaling"]["plan"]["iteration_seconds"] < data["scaling"]["iteration_seconds"]
    assert data["scaling"]["plan"]["settings"] == {"placement": {"rollout": "0-7", "trainer": "8-15"}}

    _, out, err = call(capsys, "plan", job, "--overrides")
    assert "placement" in out
    assert "perfect scaling" in " ".join(err.split())


def test_a_placement_faster_than_every_plan_of_the_framework_is_kept_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "verl.yaml"
    # 3 GPUs do not divide the batch, so no plan has them; the rollout uses them all the same.
    config.write_text(
        "actor_rollout_ref: {actor: {strategy: fsdp}, rollout: {n: 1}}\n"
        "data: {train_batch_size: 64}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 3}\n"
    )
    profile = tmp_path / "profile.yaml"
    profile.write_text(
        "profile:\n  components:\n    rollout: {seconds: {2: 90, 3: 60}}\n    update_actor: {seconds: {2: 90, 3: 60}}\n"
    )
    before = config.read_bytes()
    status, out, err = call(capsys, "plan", config, "--profile", profile, "--apply")
    assert status == 0
    assert "the placement in the file: keep it" in out
    assert "proven optimal" not in out
    assert config.read_bytes() == before
    assert list(tmp_path.glob("*.bak*")) == []
    _, out, err = call(capsys, "plan", config, "--profile", profile, "--overrides")
    assert out == ""
    assert "keep the placement" in " ".join(err.split())
    data = json.loads(call(capsys, "plan", config, "--profile", profile, "--format", "json")[1])
    assert data["kept"] is True
    assert data["settings"] == {}
    assert data["iteration_seconds"] == pytest.approx(150.0)  # the rollout has all three GPUs


def _verbs(one: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, one
    for name, below in getattr(one, "commands", {}).items():
        yield from _verbs(below, (*names, name))


VERBS = dict(_verbs(get_command(app)))


@pytest.mark.parametrize("names", VERBS, ids=" ".join)
def test_help_shows_what_stands_in_brackets(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    verb = VERBS[names]
    assert run([*names, "--help"]) == 0
    shown = re.sub(r"[^\w\[\]:/-]", "", capsys.readouterr().out)
    texts = [verb.help or "", *(getattr(one, "help", None) or "" for one in verb.params)]
    for bracket in re.findall(r"\[[^\]]+\]", " ".join(texts)):
        assert re.sub(r"[^\w\[\]:/-]", "", bracket) in shown


def test_help_of_plan_and_run_have_brackets_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    assert "after: [rollout], granularity" in capsys.readouterr().out


def test_half_a_character_in_a_name_is_printed_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"no\xff.yaml")
    ended = subprocess.run(
        [sys.executable, "-m", "trimtab", "plan", name],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict", "COLUMNS": "200"},
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 2
    assert rb"there is no file no\udcff.yaml" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "value", ['"\\ud800"', "9" * 400, "[x]", "{x: 1}", "'" + "9" * 5000 + "'"], ids=lambda v: v[:8]
)
def test_a_value_that_nobody_expects_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    job = tmp_path / "job.yaml"
    for key in ("nodes", "gpus_per_node", "gpu"):
        stated = ", ".join(f"{one}: {two}" for one, two in {"nodes": 1, "gpus_per_node": 8, key: value}.items())
        job.write_text(f"cluster: {{{stated}}}\nworkflow: {{components: {{rollout: {{seconds: {{8: 10}}}}}}}}\n")
        assert run(["plan", str(job)]) == 2, key
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert f"cluster.{key}" in said
        assert len(said) < 2_000
