"""A whole job in one process: the order and times of the plan, faults, Ctrl-C, and going on from a folder."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

import run_parts
from jobs import cluster, component
from random_jobs import random_job
from run_plans import any_separate
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.replan.estimates import profiled_seconds
from trimtab.model.run import ComponentTiming, Iteration
from trimtab.model.workflow import Component, PlacementJob, Variant, WeightSync, Workflow
from trimtab.plan.placement.order import BatchStep, PlanAction
from trimtab.runtime.run.emulated import Disturbance, VirtualClock
from trimtab.runtime.run.executor import BegunCall, CallResult, Executor
from trimtab.runtime.run.folder import RunFolder, read_run
from trimtab.runtime.run.iteration import Checkpointer, IterationRunner
from trimtab.runtime.run.job import ComponentCode, RunJob, shared_plan, with_costs
from trimtab.runtime.run.job_file import load_run
from trimtab.runtime.run.local_executor import LocalExecutor
from trimtab.runtime.run.ray_executor import RayExecutor
from trimtab.runtime.run.run import Run, RunEnd


def chain(batches: int = 2, staleness: int = 0, gpus: int = 2, **trainer) -> PlacementJob:
    parts = (
        component("rollout", {1: 3.0}),
        component("reward", 0.5, ("rollout",)),
        component("trainer", {1: 2.0}, ("rollout", "reward"), **trainer),
    )
    return PlacementJob(cluster(gpus), Workflow(parts, batches, staleness, WeightSync("trainer", "rollout", 0.25, 0.5)))


def noting(job: PlacementJob, **more) -> RunJob:
    fail = more.pop("fail", {})
    pause_s = more.pop("pause_s", 0.0)
    parts = {
        name: ComponentCode("run_parts:Noting", {"fail": fail.get(name), "pause_s": pause_s})
        for name in job.workflow.names
    }
    return RunJob(job, parts, **{"iterations": 3, "save_every": 1, "step_limit_s": 20.0, **more})


def emulated(job: PlacementJob, **more) -> RunJob:
    return RunJob(job, {name: ComponentCode() for name in job.workflow.names}, **{"iterations": 4, **more})


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def numbers(end: RunEnd) -> list[int]:
    return [one.number for one in end.iterations]


@pytest.fixture(autouse=True)
def _clean_log() -> None:
    run_parts.LOG.clear()


# ---- the order and the times of the plan -----------------------------------------------------------------------------


def test_emulated_iterations_take_exactly_what_the_plan_predicts() -> None:
    compared = 0
    for seed in range(25):
        rng = random.Random(seed)
        job = random_job(rng, rng.choice([2, 3, 4]), rng.randint(2, 6), rng.randint(1, 8))
        try:
            end = Run(emulated(job), executor=LocalExecutor(VirtualClock())).run()
        except InfeasibleError:
            continue
        plan = end.plan
        assert end.state == "done"
        for one in end.iterations:
            assert one.wall_s == pytest.approx(plan.iteration_seconds, rel=1e-9, abs=1e-9)
            for measured in one.components:
                assert measured.busy_s == pytest.approx(plan.placed(measured.component).seconds, rel=1e-9, abs=1e-9)
        compared += 1
    assert compared > 12


@pytest.mark.parametrize("staleness", [1, 2])
def test_with_staleness_iterations_overlap_and_the_period_is_the_plans(staleness: int) -> None:
    job = chain(batches=4, staleness=staleness)
    end = Run(emulated(job, iterations=20), plan=any_separate(job), executor=LocalExecutor(VirtualClock())).run()
    plan = end.plan
    assert sum(one.wall_s for one in end.iterations[8:]) / 12 == pytest.approx(plan.iteration_seconds)
    assert plan.iteration_seconds < sum(placed.seconds for placed in plan.components)


def test_waiting_is_told_from_working() -> None:
    job = chain(batches=2)
    end = Run(emulated(job), plan=any_separate(job), executor=LocalExecutor(VirtualClock())).run()
    by_name = {one.component: one for one in end.iterations[-1].components}
    assert by_name["rollout"].wait_s == pytest.approx(0.0)
    assert by_name["reward"].wait_s == pytest.approx(1.5 + 1.25)  # the first batch, then the gap to the second
    assert by_name["trainer"].busy_s == pytest.approx(2.0)
    assert by_name["trainer"].gpus == 1
    assert by_name["reward"].gpus == 0


def test_every_batch_comes_with_the_outputs_of_what_feeds_it() -> None:
    seen = []
    job = chain()
    run = noting(job, iterations=1)
    taken = Run(
        run, inputs=lambda iteration, index: f"prompt {iteration}.{index}", on_iteration=lambda *a: seen.append(a)
    )
    assert taken.run().state == "done"
    steps = [entry for entry in run_parts.LOG if entry[0] == "step"]
    assert steps.index(("step", "trainer", 1, 0)) > steps.index(("step", "reward", 1, 0))
    assert len(steps) == 6
    assert seen[0][1]["trainer"]["total"] == 1.5  # the mean of the two batches


def test_components_of_a_group_leave_the_gpus_before_the_next_one_comes() -> None:
    job = chain(gpus=1)
    end = Run(noting(job, iterations=2)).run()
    assert end.plan.mode == "collocated"
    moves = [entry[:2] for entry in run_parts.LOG if entry[0] in ("offload", "onload")]
    first = [("offload", "rollout"), ("offload", "trainer")]  # made on the GPUs, and off them before the run begins
    once = [("onload", "rollout"), ("offload", "rollout"), ("onload", "trainer"), ("offload", "trainer")]
    assert moves == first + once + once[:3]


def test_leaving_and_coming_back_are_measured_for_everybody_who_shares() -> None:
    job = chain(gpus=1)
    parts = tuple(replace(c, switch_seconds=0.0 if c.on_cpu else 1.5) for c in job.workflow.components)
    job = replace(job, workflow=replace(job.workflow, components=parts))
    end = Run(emulated(job), executor=LocalExecutor(VirtualClock())).run()
    by_name = {one.component: one for one in end.iterations[-1].components}
    assert by_name["rollout"].onload_s == by_name["trainer"].onload_s == pytest.approx(1.5)
    assert by_name["reward"].onload_s == 0.0
    real = Run(noting(chain(gpus=1), pause_s=0.001)).run()
    by_name = {one.component: one for one in real.iterations[-1].components}
    assert by_name["rollout"].offload_s >= 0.001
    assert by_name["trainer"].offload_s >= 0.001  # for the rollout of this iteration


def test_weights_reach_the_rollout_after_every_iteration() -> None:
    Run(noting(chain())).run()
    assert [entry for entry in run_parts.LOG if entry[0] == "sync"] == [
        ("sync", "rollout", 2 * n, n) for n in (1, 2, 3)
    ]


def test_weights_that_arrive_in_the_midst_of_an_iteration_wait_for_its_end() -> None:
    job = chain(batches=4, staleness=1)
    Run(noting(job, iterations=6, pause_s=0.002), plan=any_separate(job)).run()
    mine = [entry for entry in run_parts.LOG if entry[0] in ("step", "sync") and entry[1] == "rollout"]
    for before, entry in itertools.pairwise(mine):
        if entry[0] == "sync" and before[0] == "step":
            assert before[3] == 3
    versions = [entry[3] for entry in mine if entry[0] == "sync"]
    assert versions == sorted(set(versions))
    assert versions[-1] >= 4


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "what"),
    [
        ("raise", ReasonCode.raised, "the step of reward raised RuntimeError: out of memory"),
        ("exit", ReasonCode.raised, "tried to exit the process"),
        ("none", ReasonCode.faulty, "reward returned nothing, and trainer needs its output"),
        ("generator", ReasonCode.faulty, "reward returned a generator"),
        ("hang", ReasonCode.hung, "the step of reward was not over after 0.3 s"),
    ],
)
def test_a_component_that_misbehaves_ends_the_run_with_a_reason(tmp_path: Path, how, code, what) -> None:
    folder = tmp_path / "run"
    fail = {"reward": {"how": how, "iteration": 2, "batch": 1, "seconds": 1.0}}
    end = Run(noting(chain(), fail=fail, step_limit_s=0.3 if how == "hang" else 20.0), folder).run()
    assert end.state == "failed"
    assert end.reason.code is code
    assert what in end.reason.sentence
    assert numbers(end) == [1]
    assert summary(folder)["state"] == "failed"
    assert what in summary(folder)["reason"]
    assert events(folder, "ended")[-1]["iteration"] == 1
    closed = {entry[1] for entry in run_parts.LOG if entry[0] == "close"}
    assert closed == (set() if how == "hang" else {"rollout", "reward", "trainer"})


def test_a_run_that_failed_goes_on_when_the_fault_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(noting(chain(), fail={"trainer": {"how": "raise", "iteration": 3}}), folder).run()
    end = Run(noting(chain()), folder, resume=True).run()
    assert end.state == "done"
    assert numbers(end) == [1, 2, 3]
    assert ("load", "trainer", 4) in run_parts.LOG


def test_a_component_that_is_not_well_ends_the_run() -> None:
    job = chain()
    run = replace(noting(job), parts={**noting(job).parts, "reward": ComponentCode("run_parts:Unwell")})
    end = Run(run).run()
    assert end.reason == replace(
        end.reason, code=ReasonCode.unhealthy, sentence="reward is unhealthy: the disk is full"
    )


def test_a_component_that_does_not_end_is_left_after_its_limit() -> None:
    slow = noting(chain(), close_limit_s=0.2)
    end = Run(replace(slow, parts={**slow.parts, "rollout": ComponentCode("run_parts:Lingering")})).run()
    assert end.state == "done"
    assert not [entry for entry in run_parts.LOG if entry[0] == "close"]  # it may hang: nothing else is called


@pytest.mark.parametrize("key", ["step_limit_s", "place_limit_s", "close_limit_s"])
def test_limits_are_more_than_nothing(key: str) -> None:
    with pytest.raises(InputError, match=f"{key} is more than 0"):
        noting(chain(), **{key: 0.0})


def test_a_component_that_cannot_be_made_ends_the_run_before_its_first_iteration(tmp_path: Path) -> None:
    job = chain()
    run = replace(noting(job), parts={**noting(job).parts, "trainer": ComponentCode("run_parts:Noting", {"sise": 3})})
    end = Run(run, tmp_path / "run").run()
    assert (end.state, numbers(end)) == ("failed", [])
    assert "cannot be made with these settings" in end.error.what


def test_components_need_nothing_but_step() -> None:
    job = chain(gpus=1)
    run = RunJob(job, {name: ComponentCode("run_parts:Bare") for name in job.workflow.names}, iterations=2)
    assert numbers(Run(run).run()) == [1, 2]


def test_a_disk_that_takes_no_more_events_does_not_stop_the_run(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "run"
    real, refused = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        if b'"iteration"' in data and len(refused) < 4:
            refused.append(1)
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    end = Run(noting(chain()), folder).run()
    assert end.state == "done"
    assert refused
    assert [one.number for one in read_run(folder).iterations] == [1, 2, 3]


def test_a_state_that_cannot_be_saved_ends_the_run_and_keeps_the_one_before(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "run"
    real = RunFolder.new_state_folder

    def full(self: RunFolder, iteration: int, name: str) -> Path:
        if iteration == 3:
            raise OSError(28, "No space left on device")
        return real(self, iteration, name)

    monkeypatch.setattr(RunFolder, "new_state_folder", full)
    end = Run(noting(chain(), iterations=5), folder).run()
    assert end.state == "failed"
    assert "cannot be saved: No space left" in end.reason.sentence
    assert read_run(folder).saved == 2


# ---- Ctrl-C and going on ---------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_run_after_the_iteration_under_way_with_its_state_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fail = {"trainer": {"how": "interrupt", "iteration": 2}}
    end = Run(noting(chain(), fail=fail, iterations=5, save_every=100), folder).run()
    assert (end.state, end.reason.code, numbers(end)) == ("stopped", ReasonCode.by_hand, [1, 2])
    assert read_run(folder).saved == 2
    on = Run(noting(chain(), iterations=5), folder, resume=True).run()
    assert (on.state, numbers(on)) == ("done", [1, 2, 3, 4, 5])
    assert [one.number for one in read_run(folder).iterations] == [1, 2, 3, 4, 5]


def test_a_stop_asked_for_from_another_place_is_the_same_as_ctrl_c() -> None:
    run = Run(
        noting(chain(), iterations=50), on_iteration=lambda iteration, _: iteration.number == 4 and run.stop("enough")
    )
    end = run.run()
    assert (end.state, end.reason.sentence) == ("stopped", "enough")
    assert numbers(end) == [1, 2, 3, 4]


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_run_local import chain, noting
from trimtab.runtime.run.run import Run
job = noting(chain(), iterations={iterations}, save_every=2, pause_s=0.01)
show = lambda iteration, _: print(iteration.number, flush=True)
end = Run(job, Path(sys.argv[1]), resume=len(sys.argv) > 2, on_iteration=show).run()
print(end.state, flush=True)
"""


def script(iterations: int) -> list[str]:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "helpers")]
    return [sys.executable, "-c", SCRIPT.format(paths=paths, iterations=iterations)]


def test_killed_at_any_moment_a_run_goes_on_and_counts_every_iteration_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number, kill in enumerate((signal.SIGKILL, signal.SIGINT)):
        more = ["again"] if number else []
        with subprocess.Popen([*script(400), str(folder), *more], stdout=subprocess.PIPE, text=True) as process:
            for _ in range(5):
                assert process.stdout.readline().strip().isdigit()
            time.sleep(0.01 * number)
            process.send_signal(kill)
            if kill == signal.SIGINT:
                time.sleep(0.02)
                process.send_signal(kill)  # twice: at once
            out = process.stdout.read()
        if kill == signal.SIGINT:
            assert out.strip().endswith("stopped")
    saved = read_run(folder).saved
    assert saved >= 4
    end = Run(noting(chain(), iterations=saved + 3, save_every=2), folder, resume=True).run()
    assert numbers(end) == list(range(1, saved + 4))
    assert [one.number for one in read_run(folder).iterations] == numbers(end)
    # What was trained is what was counted: two batches for each iteration, none of them twice.
    assert [entry for entry in run_parts.LOG if entry[0] == "save" and entry[1] == "trainer"][-1][2] == 2 * len(
        numbers(end)
    )
    assert summary(folder)["iterations"] == saved + 3


def test_with_staleness_every_component_is_saved_at_its_own_end_of_the_iteration(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = chain(batches=2, staleness=1)
    Run(noting(job, iterations=6), folder, plan=any_separate(job)).run()
    saves = [entry[1:] for entry in run_parts.LOG if entry[0] == "save"]
    for name in job.workflow.names:
        assert [total for one, total in saves if one == name] == [2, 4, 6, 8, 10, 12]
    end = Run(noting(job, iterations=8), folder, plan=any_separate(job), resume=True).run()
    assert numbers(end) == list(range(1, 9))
    assert ("load", "rollout", 12) in run_parts.LOG


def test_a_state_never_counts_before_its_iteration_is_written(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "run"
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if b'"number": 3' in data:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    assert Run(noting(chain(), iterations=5), folder).run().state == "done"
    assert "No space left" in summary(folder)["fault"]
    assert (read_run(folder).saved, [one.number for one in read_run(folder).iterations]) == (2, [1, 2])
    monkeypatch.undo()
    assert numbers(Run(noting(chain(), iterations=5), folder, resume=True).run()) == [1, 2, 3, 4, 5]


def test_ctrl_c_a_second_and_a_third_time_leaves_the_folder_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fail = {"trainer": {"how": "interrupt", "iteration": 2, "times": 3}}
    end = Run(noting(chain(), fail=fail, iterations=5), folder).run()
    assert (end.state, numbers(end)) == ("stopped", [1])
    assert "iteration 2 was not over" in end.reason.sentence
    assert summary(folder)["state"] == "stopped"
    assert numbers(Run(noting(chain(), iterations=5), folder, resume=True).run()) == [1, 2, 3, 4, 5]


def test_whoever_is_told_and_raises_leaves_the_folder_in_order(tmp_path: Path) -> None:
    def on_iteration(iteration, metrics) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        Run(noting(chain()), tmp_path / "run", on_iteration=on_iteration).run()
    assert "crashed: RuntimeError: no terminal" in summary(tmp_path / "run")["reason"]
    assert numbers(Run(noting(chain()), tmp_path / "run", resume=True).run()) == [1, 2, 3]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(noting(chain()), folder).run()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "iterat')
    assert len(read_run(folder).iterations) == 3
    end = Run(noting(chain(), iterations=4), folder, resume=True).run()
    assert numbers(end) == [1, 2, 3, 4]
    assert [one.number for one in read_run(folder).iterations] == [1, 2, 3, 4]


def test_a_folder_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(noting(chain(), iterations=1), folder).run()
    old = (folder / "summary.json").read_text().replace('"version": 2', '"version": 1')
    (folder / "summary.json").write_text(old)
    for refused in (lambda: Run(noting(chain()), folder, resume=True).run(), lambda: read_run(folder)):
        with pytest.raises(InputError, match="format 1, and 2 is the only one"):
            refused()
    assert (folder / "summary.json").read_text() == old


def test_a_folder_has_one_run_and_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(InputError, match="no run in this folder"):
        Run(noting(chain()), folder, resume=True).run()
    Run(noting(chain(), iterations=1), folder).run()
    with pytest.raises(InputError, match="a run in this folder already"):
        Run(noting(chain()), folder).run()
    held = RunFolder(folder, resume=True)
    with pytest.raises(InputError, match="another run writes this folder"):
        Run(noting(chain()), folder, resume=True).run()
    held.close()
    with pytest.raises(InputError, match="none is named"):
        Run(noting(chain()), resume=True)


def test_a_folder_that_cannot_be_understood_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(noting(chain(), iterations=1), folder).run()
    (folder / "events.jsonl").write_text("what is this\n")
    with pytest.raises(InputError, match="cannot be understood") as refused:
        read_run(folder)
    assert refused.value.where.endswith("events.jsonl:1")


# ---- other drivers ---------------------------------------------------------------------------------------------------


class SideBySide(LocalExecutor):
    """Drives the same acts in threads, as a cluster does."""

    def drive(
        self, runner: IterationRunner, poll: Callable[[], None], ended: Callable[[IterationRunner, float], None]
    ) -> None:
        began = time.perf_counter()
        running: dict[Future, PlanAction] = {}
        with ThreadPoolExecutor(8) as threads:
            while True:
                with runner.lock:
                    for act in runner.order.ready():
                        runner.order.begin(act)
                        running[threads.submit(runner.perform, act, time.perf_counter() - began)] = act
                if not running:
                    return
                for over in wait(running, timeout=60, return_when=FIRST_COMPLETED).done:
                    over.result()
                    with runner.lock:
                        runner.order.check()
                        runner.order.end(running.pop(over))
                        ended(runner, time.perf_counter() - began)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("gpus", [1, 2])
def test_acts_may_be_performed_side_by_side_in_threads(tmp_path: Path, staleness: int, gpus: int) -> None:
    job = chain(batches=4, staleness=staleness, gpus=gpus)
    plan = any_separate(job) if gpus > 1 else None
    end = Run(noting(job, iterations=6, pause_s=0.001), tmp_path / "run", SideBySide(), plan=plan).run()
    assert (end.state, numbers(end)) == ("done", [1, 2, 3, 4, 5, 6])
    for name in job.workflow.names:
        steps = [entry[2:] for entry in run_parts.LOG if entry[:2] == ("step", name)]
        assert steps == [(t, b) for t in range(1, 7) for b in range(4)]
        saves = [entry[2] for entry in run_parts.LOG if entry[:2] == ("save", name)]
        assert saves == [4, 8, 12, 16, 20, 24]
    assert read_run(tmp_path / "run").saved == 6


# ---- costs that are not known ----------------------------------------------------------------------------------------


def test_costs_that_are_not_stated_are_measured_first_and_then_planned_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    truth = {"rollout": {1: 8.0}, "trainer": {1: 2.0}}
    job = chain(gpus=2)
    parts = {name: ComponentCode(curve=truth.get(name)) for name in job.workflow.names}
    unmeasured = frozenset({"rollout", "trainer"})
    run = RunJob(job, parts, iterations=8, profile_iterations=3, unmeasured=unmeasured, save_every=2)
    end = Run(run, folder, LocalExecutor(VirtualClock())).run()
    assert end.state == "done"
    plans = events(folder, "plan")
    assert [(plan["why"], plan["iteration"]) for plan in plans] == [("first", 1), ("measured", 4)]
    assert end.plan.placed("rollout").seconds > end.plan.placed("trainer").seconds
    assert end.iterations[-1].wall_s == pytest.approx(end.plan.iteration_seconds)
    assert summary(folder)["prediction_error"] == pytest.approx(0.0, abs=1e-9)
    # Going on from the folder, what was measured is not measured again.
    again = Run(replace(run, iterations=12), folder, resume=True, executor=LocalExecutor(VirtualClock())).run()
    assert again.plan.describe() == end.plan.describe()
    assert numbers(again) == list(range(1, 13))


def test_a_change_of_plan_keeps_what_the_components_have_learned(tmp_path: Path) -> None:
    job = chain(gpus=2)
    run = replace(noting(job, iterations=6, pause_s=0.002), unmeasured=frozenset({"rollout", "trainer"}))
    end = Run(run, tmp_path / "run").run()
    assert end.state == "done"
    assert end.metrics[6]["trainer"]["total"] == 11.5  # batches 11 and 12 of the whole run


# ---- job files -------------------------------------------------------------------------------------------------------

FILE = """
cluster: {nodes: 1, gpus_per_node: 2}
workflow:
  batches: 4
  components:
    rollout: {seconds: {1: 2.0}, emulate: {noise: 0.07, drift: {to: 3.0, over: 60}, tail: {share: 0.1, factor: 4}}}
    trainer: {after: rollout, seconds: {1: 1.0}, emulate: true}
run: {iterations: 5, seed: 9}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_a_job_file_says_which_code_and_how_long(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, FILE), iterations=7)
    assert (run.iterations, run.seed, run.unmeasured) == (7, 9, frozenset())
    assert run.parts["rollout"].disturbance == Disturbance(
        noise=0.07, drift_to=3.0, drift_over=60, tail_share=0.1, tail_factor=4
    )
    end = Run(run, executor=LocalExecutor(VirtualClock())).run()
    assert end.iterations[-1].wall_s != end.iterations[0].wall_s


def test_a_job_file_with_classes_needs_no_costs(tmp_path: Path) -> None:
    text = FILE.replace(
        "{seconds: {1: 2.0}, emulate: {noise: 0.07,", "{use: run_parts:Noting, settings: {pause_s: 0}, x: {"
    )
    text = FILE.split("    rollout:")[0] + (
        "    rollout: {use: 'run_parts:Noting', settings: {pause_s: 0.0}}\n"
        "    trainer: {after: rollout, use: 'run_parts:Bare'}\nrun: {iterations: 5}\n"
    )
    run = load_run(written(tmp_path, text))
    assert run.unmeasured == {"rollout", "trainer"}
    assert shared_plan(run.job).mode == "collocated"
    assert numbers(Run(run).run()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("run: {iterations: 5, seed: 9}", "run: {iteration: 5}", "unknown key iteration"),
        ("run: {iterations: 5, seed: 9}", "run: {iterations: many}", "iterations is not right"),
        ("run: {iterations: 5, seed: 9}", "run: {iterations: 0}", "a whole number of 1 or more"),
        ("run: {iterations: 5, seed: 9}", "run: 5", "a section of keys"),
        ("emulate: true", "emulate: 3", "emulate is not right: 3"),
        ("emulate: true", "emulate: {nois: 1}", "unknown key nois"),
        ("emulate: true", "emulate: {noise: -1}", "noise is not right: -1"),
        ("emulate: true", "emulate: {drift: 3}", "drift is a section"),
        ("emulate: true", "emulate: {seconds: 3}", "measured points"),
        ("emulate: true", "emulate: {seconds: {1: fast}}", "1 is not right: 'fast'"),
        ("emulate: true", "emulate: {seconds: {}}", "measured points"),
        ("emulate: true", "emulate: {factors: 3}", "factors is not right: 3"),
        ("emulate: true", "emulate: {noise: much}", "noise is not right"),
        ("emulate: true", "emulate: {noise: .nan}", "noise is not right"),
        ("emulate: true", "emulate: {tail: {shar: 0.1}}", "unknown key shar"),
        ("emulate: true", "emulate: false", "trainer has neither use nor emulate"),
        ("emulate: true", "use: 3", "use is not right: 3"),
        ("emulate: true", "use: 'a:B', settings: 3", "settings is a section"),
        ("seconds: {1: 1.0}, emulate: true", "emulate: true", "emulated and has no costs"),
        ("batches: 4", "batchs: 4", "unknown key batchs"),
    ],
)
def test_a_job_file_that_is_wrong_is_refused_by_its_key(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in FILE
    with pytest.raises(InputError, match=what):
        load_run(written(tmp_path, FILE.replace(old, new)))


# ---- side by side ----------------------------------------------------------------------------------------------------


class InThreads(LocalExecutor):
    """Components in one process whose acts are performed in threads, as on a cluster."""

    drive = RayExecutor.drive

    def now(self) -> float:
        return time.perf_counter() - self._last_action_s


def test_acts_end_while_states_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = chain(staleness=1, gpus=3)
    perform, began, ended = IterationRunner.perform, threading.Event(), threading.Event()

    def act(self: IterationRunner, act: PlanAction, now_s: float) -> float:
        """The rollout of iteration 3 ends only while the state after iteration 2 is under way."""
        if not isinstance(act, BatchStep) or (act.component, act.iteration) != ("rollout", 3):
            return perform(self, act, now_s)
        assert began.wait(60)
        took_s = perform(self, act, now_s)
        ended.set()
        return took_s

    monkeypatch.setattr(IterationRunner, "perform", act)
    waited = []
    complete = Checkpointer.complete

    def delete(self: Checkpointer, components: Executor, iteration: int) -> None:
        if iteration == 2:
            began.set()
            waited.append(ended.wait(30))
        complete(self, components, iteration)

    monkeypatch.setattr(Checkpointer, "complete", delete)
    end = Run(noting(job, iterations=4), tmp_path / "run", InThreads(), plan=any_separate(job)).run()
    assert end.state == "done"
    assert waited == [True]


def test_acts_end_while_a_component_is_asked_how_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = chain(staleness=1, gpus=3)
    perform, ended, give_up_s = IterationRunner.perform, threading.Event(), time.monotonic() + 60

    def act(self: IterationRunner, act: PlanAction, now_s: float) -> float:
        took_s = perform(self, act, now_s)
        if isinstance(act, BatchStep) and (act.component, act.iteration) == ("rollout", 3):
            ended.set()
        return took_s

    class Asked(BegunCall):
        """Over when the rollout of iteration 3 is."""

        def poll(self) -> CallResult | None:
            assert time.monotonic() < give_up_s, "nothing went on meanwhile"
            return super().poll() if ended.is_set() else None

        def wait(self) -> None:
            raise AssertionError("it was waited for")

    class Slow(InThreads):
        def begin(self, name: str, method: str, *arguments: object) -> BegunCall:
            call = super().begin(name, method, *arguments)
            done = call.poll()
            assert done is not None
            return Asked(done) if (name, method) == ("reward", "health") else call

    monkeypatch.setattr(IterationRunner, "perform", act)
    run = noting(job, iterations=4)
    run = replace(run, parts={**run.parts, "reward": ComponentCode("run_parts:Well")})
    end = Run(run, tmp_path / "run", Slow(), plan=any_separate(job)).run()
    assert end.state == "done"
    assert [event["iteration"] for event in events(tmp_path / "run", "saved")] == [1, 2, 3, 4]


def test_what_a_run_measured_on_one_number_of_gpus_promises_no_perfect_speed_up_on_others() -> None:
    workflow = Workflow((Component("actor", (Variant(),)),))
    timing = ComponentTiming("actor", 10.0, gpus=2)
    measured = with_costs(workflow, [Iteration(1, wall_s=10.0, components=(timing,))], frozenset({"actor"}))
    component = measured.component("actor")
    assert profiled_seconds(component, "", "", 2) == 10.0
    assert profiled_seconds(component, "", "", 4) == pytest.approx(10.0 / 1.6)
