"""What a past run tells the planner: points at the counts it ran on, all at the level of its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from run_report_samples import Writing, plan_of
from trimtab.cli import app as cli
from trimtab.core.errors import InputError
from trimtab.model.run import ComponentTiming, Iteration
from trimtab.model.workflow import Component, Variant, WeightSync, Workflow
from trimtab.runtime.run.folder import RunHistory
from trimtab.runtime.run.past_costs import measured_workflow

APART = [{"components": ["rollout"], "gpus": "0-3"}, {"components": ["trainer"], "gpus": "4-7"}]
TOGETHER = [{"components": ["rollout", "trainer"], "gpus": "0-7"}]
SYNC = WeightSync("trainer", "rollout")


def workflow(sync: WeightSync | None = SYNC, **variant: Any) -> Workflow:
    stated = Variant(**{"seconds": {"": ((4, 10.0), (8, 6.0))}, **variant})
    return Workflow((Component("rollout", (stated,)), Component("trainer", (stated,), after=("rollout",))), 4, 0, sync)


def ran(*stretches: tuple[int, Sequence[float], list[dict[str, Any]]], **more: Any) -> RunHistory:
    """A run: for each stretch the rollout's GPUs, its seconds in each iteration, and the groups of the plan."""
    iterations, plans, syncs = [], {}, {}
    for gpus, times, groups in stretches:
        for seconds in times:
            number = len(iterations) + 1
            measured = (
                ComponentTiming("rollout", seconds, gpus, batches=4, offload_s=0.1, onload_s=0.4),
                ComponentTiming("trainer", 5.0, 8 - gpus or 8, batches=4),
            )
            iterations.append(Iteration(number, seconds + 5.0, measured, more.get("extra", {}).get(number, ())))
            plans[number] = {"groups": groups, "variants": more.get("variants", {})}
            syncs[number] = 0.5 if groups is TOGETHER else 2.0
    return RunHistory(iterations, plans=plans, sync_s=syncs)


def points(workflow: Workflow, name: str = "rollout", variant: int = 0) -> dict[int, float]:
    return dict(workflow.component(name).variants[variant].points(""))


def test_several_counts_give_several_points() -> None:
    past = ran((4, [9.0] * 6, APART), (2, [18.0] * 6, APART))
    planned, notes = measured_workflow(workflow(), frozenset({"rollout", "trainer"}), past, "runs/a")
    assert points(planned) == {2: 18.0, 4: 9.0}
    assert points(planned, "trainer") == {4: 5.0, 6: 5.0}
    assert notes[0].startswith("costs are those of 12 iterations of the run in runs/a: rollout on 2 and 4 GPUs,")


def test_a_count_that_was_left_before_costs_drifted_is_brought_to_the_level_of_the_end() -> None:
    # It took 8 s on 4 GPUs; then, on 2, first 16 s as before, and at the end three times as much.
    grows = [16.0] * 9 + [20.0, 26.0, 32.0, 38.0, 44.0] + [48.0] * 8
    past = ran((4, [8.0] * 6, APART), (2, grows, APART))
    planned, notes = measured_workflow(workflow(), frozenset({"rollout", "trainer"}), past, "runs/a")
    assert points(planned) == pytest.approx({2: 48.0, 4: 24.0})
    assert "rollout drifted to 3x its initial cost: planned with the latest" in notes


def test_a_drift_that_goes_on_over_a_change_of_plan_is_followed() -> None:
    levels = [1.0 + 0.05 * at for at in range(40)]
    on_4, on_8 = [10.0 * level for level in levels[:20]], [6.0 * level for level in levels[20:]]
    past = ran((4, on_4, APART), (8, on_8, TOGETHER))
    planned, _ = measured_workflow(workflow(), frozenset({"rollout", "trainer"}), past, "runs/a")
    assert points(planned) == pytest.approx({4: 10.0 * levels[-1], 8: 6.0 * levels[-1]}, rel=0.06)


def test_noise_is_no_drift() -> None:
    noisy = [8.0, 8.6, 7.5, 8.2, 7.7, 8.8, 7.6, 8.1, 8.5, 7.4] * 2
    planned, notes = measured_workflow(workflow(), frozenset({"rollout", "trainer"}), ran((4, noisy, APART)), "runs/a")
    assert points(planned)[4] == pytest.approx(8.1, abs=0.2)
    assert not any("grew" in note or "fell" in note for note in notes)


def test_cold_iterations_and_those_with_a_checkpoint_tell_no_cost() -> None:
    times = [99.0, 8.0, 8.0, 30.0, 8.0, 8.0]
    past = ran((4, times, APART), extra={4: ("checkpoint",)})
    planned, _ = measured_workflow(workflow(), frozenset({"rollout", "trainer"}), past, "runs/a")
    assert points(planned) == {4: 8.0}


def test_stated_points_keep_their_shape_and_move_by_the_measured_level() -> None:
    planned, notes = measured_workflow(workflow(floor_seconds=2.0), frozenset(), ran((4, [20.0] * 6, APART)), "runs/a")
    assert points(planned) == pytest.approx({4: 20.0, 8: 12.0})
    assert planned.component("rollout").variants[0].floor_seconds == pytest.approx(4.0)
    assert "rollout where it was not measured: the stated cost times 2.00" in notes


def test_only_the_variant_that_ran_has_measured_points() -> None:
    stated = {"": ((4, 10.0),)}
    variants = (Variant("tp2", stated), Variant("tp4", {"": ((4, 16.0),)}))
    both = Workflow((Component("rollout", variants), Component("trainer", variants, after=("rollout",))), 4)
    past = ran((4, [5.0] * 6, APART), variants={"rollout": "tp2", "trainer": "tp4"})
    planned, _ = measured_workflow(both, frozenset(), past, "runs/a")
    assert (points(planned, variant=0), points(planned, variant=1)) == ({4: 5.0}, {4: 8.0})
    assert points(planned, "trainer", 1) == {4: 5.0}


def test_switches_and_weight_syncs_are_those_measured_on_shared_and_on_separate_gpus() -> None:
    alone, notes = measured_workflow(workflow(), frozenset(), ran((4, [9.0] * 6, APART)), "runs/a")
    assert alone.component("rollout").switch_seconds == 0.0  # it never had to leave
    assert (alone.weight_sync.shared_seconds, alone.weight_sync.separate_seconds) == (2.0, 2.0)
    assert any("measured on separate GPUs alone; on shared ones it is taken to be the same" in note for note in notes)
    past = ran((8, [6.0] * 6, TOGETHER), (4, [9.0] * 6, APART))
    both, notes = measured_workflow(workflow(), frozenset(), past, "runs/a")
    assert both.component("rollout").switch_seconds == pytest.approx(0.5)
    assert (both.weight_sync.shared_seconds, both.weight_sync.separate_seconds) == (0.5, 2.0)
    assert not any("weight sync" in note for note in notes)


def test_a_run_that_measured_nothing_or_another_job_is_refused() -> None:
    with pytest.raises(InputError, match="no iteration of it ended"):
        measured_workflow(workflow(), frozenset(), RunHistory(), "runs/a")
    past = ran((4, [9.0] * 3, APART))
    other = Workflow((Component("rollout", (Variant(),)), Component("critic", cpu_seconds=1.0)))
    with pytest.raises(InputError, match="the run had components that the job has not: trainer"):
        measured_workflow(other, frozenset(), past, "runs/a")
    more = Workflow((*workflow().components, Component("critic", cpu_seconds=1.0)))
    with pytest.raises(InputError, match="what critic cost is neither stated nor measured"):
        measured_workflow(more, frozenset({"critic"}), past, "runs/a")
    assert "critic was not measured: its cost is the stated one" in measured_workflow(more, frozenset(), past, "a")[1]


def test_a_run_of_milliseconds_is_planned_in_milliseconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Writing(tmp_path / "run")
    run.begin([["alpha", 2, ""]], iterations=6)
    run.plan(
        "first", 1, plan_of((("rollout", "trainer"), "0-1"), costs={"rollout": 0.004, "trainer": 0.006}, predicted=1)
    )
    for number in range(1, 7):
        run.iteration(number)
    folder = run.write()
    (folder / "job.yaml").write_text(
        "cluster: {nodes: 1, gpus_per_node: 2}\n"
        "workflow: {components: {rollout: {seconds: {2: 0.004}}, trainer: {seconds: {2: 0.006}, after: rollout}}}\n"
    )
    assert cli.run(["plan", "--from-run", str(folder)]) == 0
    said = capsys.readouterr().out
    assert " ms per iteration" in said
    assert "0.0 s" not in said
    assert "ranks     ms" in said or " ms  start" in said
