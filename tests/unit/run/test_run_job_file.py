"""Job files to run: code beside costs, the section of the run, and the copy that a run's folder keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats import yaml_text
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.runtime.run.emulated import Disturbance
from trimtab.runtime.run.job_file import check_same, load_run

FILE = """\
cluster: {nodes: 1, gpus_per_node: 2}
workflow:
  batches: 4
  components:
    rollout: {use: 'parts:Rollout', settings: {rate: 0.1, sizes: [1, 2]}, emulate: {seconds: {1: 2.0}, noise: 0.07}}
    trainer: {after: rollout, use: 'parts:Trainer', seconds: {1: 1.0}}
  weight_sync: {from: trainer, to: rollout}
run:
  iterations: 5
  priority: 6
  modules_from: code
  loop: {mode: auto, dwell_iterations: 2, margin: 0.25, elastic: rollout}
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_real_code_may_be_paced_by_an_emulated_curve(tmp_path: Path) -> None:
    run = load_run(written(tmp_path))
    rollout, trainer = run.parts["rollout"], run.parts["trainer"]
    assert (rollout.use, rollout.paced, rollout.curve) == ("parts:Rollout", True, {1: 2.0})
    assert rollout.disturbance == Disturbance(noise=0.07)
    assert (trainer.paced, trainer.settings) == (False, {})
    assert run.unmeasured == {"rollout"}
    with pytest.raises(InputError, match="rollout is emulated and has no costs"):
        load_run(written(tmp_path, FILE.replace("{seconds: {1: 2.0}, noise: 0.07}", "true")))


def test_the_run_section_holds_priority_modules_and_the_rules_of_the_loop(tmp_path: Path) -> None:
    run = load_run(written(tmp_path))
    assert run.rules == ReplanRules(mode=ReplanMode.auto, dwell_iterations=2, margin=0.25, elastic=("rollout",))
    assert (run.priority, run.near) == (6.0, tmp_path / "code")
    plain = load_run(written(tmp_path, FILE.partition("run:")[0]))
    assert (plain.rules, plain.iterations, plain.near) == (ReplanRules(), 1, tmp_path)


def test_the_copy_that_a_folder_keeps_is_the_same_job_wherever_it_lies(tmp_path: Path) -> None:
    tmp_path = tmp_path / ("long" * 40)  # the path of the modules is kept in the copy
    tmp_path.mkdir()
    run = load_run(written(tmp_path), iterations=9, seed=3, mode="advise")
    away = tmp_path / "runs" / "job-1"
    away.mkdir(parents=True)
    kept = load_run(written(away, run.text or ""))
    assert replace(kept, name=run.name, text=run.text) == run
    assert (kept.iterations, kept.seed, kept.rules.mode, kept.near) == (9, 3, ReplanMode.advise, tmp_path / "code")


def test_what_may_change_in_a_run_that_goes_on_and_what_may_not(tmp_path: Path) -> None:
    before = load_run(written(tmp_path))
    for old, new in (("iterations: 5", "iterations: 50"), ("priority: 6", "save_every: 2"), ("nodes: 1", "nodes: 2"),
                     ("seconds: {1: 1.0}", "seconds: {1: 3.0}"), ("after: rollout", "after: [rollout]"),
                     ("mode: auto", "mode: advise")):  # fmt: skip
        check_same(before, load_run(written(tmp_path, FILE.replace(old, new))), "runs/a")
    for old, new, what in (
        ("rate: 0.1", "rate: 0.2", "rollout.settings was {'rate': 0.1"),
        ("'parts:Trainer'", "'parts:Other'", "trainer.use was parts:Trainer, and is parts:Other now"),
        ("batches: 4", "batches: 8", "batches was 4, and is 8 now"),
        ("noise: 0.07", "noise: 0.08", "rollout.emulate"),
        ("  weight_sync: {from: trainer, to: rollout}\n", "", "weight_sync was trainer to rollout, and is nothing now"),
        ("    trainer:", "    critic:", "the components were"),
    ):
        text = FILE.replace(old, new).replace("from: trainer", "from: critic" if "critic" in new else "from: trainer")
        with pytest.raises(InputError, match="of another job") as refused:
            check_same(before, load_run(written(tmp_path, text)), "runs/a")
        assert what in refused.value.what


def test_a_file_that_goes_round_in_circles_is_only_an_error(tmp_path: Path) -> None:
    text = FILE.replace("settings: {rate: 0.1, sizes: [1, 2]}", "settings: &s {again: *s}")
    with pytest.raises(InputError, match="nested too deeply"):
        load_run(written(tmp_path, text))


def test_the_example_of_the_docs_is_read_and_asks_to_be_measured() -> None:
    run = load_run(Path(__file__).parents[3] / "examples" / "grpo" / "job.yaml")
    assert run.unmeasured == set(run.job.workflow.names)
    assert yaml_text.parse(run.text or "", "kept")["run"]["iterations"] == run.iterations
