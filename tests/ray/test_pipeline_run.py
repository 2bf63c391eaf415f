"""A schedule that is run: on a real Ray, with real models, with faults put in by hand."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.cli.pipeline import run_answer, run_data, run_text
from trimtab.core.errors import InputError, UnreachableError
from trimtab.formats.pipeline import layer_files
from trimtab.model.pipeline import ModelChain, PartitionAnswer, PipelineJob, PipelineStage, Schedule
from trimtab.profile import block_chain, layers
from trimtab.runtime.pipeline.runner import PipelineRun, run_pipeline
from trimtab.runtime.pipeline.stage import StageActor, StageError, StageSettings, _pass_time
from trimtab.runtime.rayapi.connect import answers, connected

MODELS = "models_for_layers"
HERE = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with connected(cpus=8) as ray:
        yield ray


def schedule(*stages: tuple[int, int, float, float]) -> Schedule:
    return Schedule(
        tuple(
            PipelineStage(f"host-{index}", "kind", first, last, compute, transfer, 0, 0)
            for index, (first, last, compute, transfer) in enumerate(stages)
        )
    )


def chain(factory: str, model_input: str, **where: str) -> tuple[block_chain.BlockChain, Any]:
    settings = {"dtype": "torch.float32", "device": "cpu"}
    return (
        block_chain.load_chain(f"{MODELS}:{factory}", **where, **settings),
        block_chain.input_maker(model_input, batch_size=2, **settings),
    )


def run(planned: Schedule, *model: Any, **settings: Any) -> PipelineRun:
    return run_pipeline(planned, *model, **{"batch_size": 2, "microbatches": 6, "timeout_s": 20.0, **settings})


def as_planned(planned: Schedule, *model: Any, **settings: Any) -> PipelineRun:
    """An emulated run within 10 % of the plan. What a busy machine spoils may be tried again."""
    for _ in range(3):
        done = run(planned, *model, emulate=True, **settings)
        if done.ratio == pytest.approx(1, rel=0.1):
            return done
    pytest.fail(f"{done.ratio:.0%} of the planned throughput, three times")


@pytest.mark.parametrize(
    ("factory", "model_input", "where"),
    [
        pytest.param("pairs", f"{MODELS}:pair", {}, marks=pytest.mark.long),
        ("decoder_of_tuples", f"{MODELS}:tokens", {"blocks": "body.layers"}),
    ],
)
def test_the_output_is_the_models_bit_for_bit(factory: str, model_input: str, where: dict[str, str]) -> None:
    model = chain(factory, model_input, **where)
    done = run(schedule((1, 2, 0.001, 0.001), (3, len(model[0].blocks), 0.001, 0)), *model)
    assert done.output == "equal"
    assert done.largest_difference == 0
    assert all(stage.compute_s > 0 for stage in done.stages)


@pytest.mark.long
@pytest.mark.parametrize(
    ("planned", "buffers"),
    [
        # The first computes longest, a transfer takes longest, the last computes longest.
        pytest.param(schedule((1, 1, 0.2, 0.05), (2, 2, 0.1, 0.02), (3, 4, 0.05, 0)), 1, marks=pytest.mark.long),
        (schedule((1, 1, 0.05, 0.05), (2, 2, 0.1, 0.2), (3, 4, 0.1, 0)), 1),
        pytest.param(schedule((1, 1, 0.05, 0.05), (2, 2, 0.1, 0.1), (3, 4, 0.2, 0)), 2, marks=pytest.mark.long),
        (Schedule(schedule((1, 1, 0.05, 0.02), (2, 4, 0.05, 0.2)).stages, input_seconds=0.1), 2),  # source and sink
    ],
)
def test_emulated_throughput_is_the_plans(planned: Schedule, buffers: int) -> None:
    done = as_planned(planned, microbatches=10, stretch=0.6, buffers_in=buffers, buffers_out=buffers)
    assert done.output == "not compared"


def test_a_slow_stage_holds_back_those_before_it() -> None:
    done = run(schedule((1, 1, 0.01, 0.01), (2, 4, 0.1, 0)), emulate=True, microbatches=10, stretch=1.0)
    assert done.stages[1].blocked_s == 0
    # The first stage waits for the slow one, hardly ever the other way round.
    assert done.stages[0].blocked_s > 2 * done.stages[1].starved_s
    assert done.stages[0].blocked_s > 0.3


@pytest.mark.long
def test_a_profiled_model_runs_as_planned_and_short_times_are_stretched() -> None:
    measured = layers.profile_layers(f"{MODELS}:mlp", model_input="8", batch_size=2, repeats=3).as_data()
    compute = layer_files.measured(measured).time_s
    done = as_planned(
        schedule((1, 1, compute[0], 1e-5), (2, 4, sum(compute[1:]), 0)), *chain("mlp", "8"), microbatches=10
    )
    assert done.output == "equal"
    assert done.stretch > 1
    assert done.measured_period_s < 0.05  # in planned seconds, whatever the stretch


def test_a_block_that_fails_is_told_with_its_stage() -> None:
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match=r"stage 1 \(host-0\) failed: ValueError: this block is broken"):
        run(schedule((1, 2, 0, 0)), *chain("breaks_in_a_stage", "8"))
    assert time.monotonic() - begun < 20


@pytest.mark.long
def test_a_stage_whose_process_dies_is_told(cluster: Any) -> None:
    with pytest.raises(UnreachableError, match=r"stage 2 \(host-1\) failed: its process died"):
        run(schedule((1, 1, 0, 0), (2, 2, 0, 0)), *chain("dies_in_a_stage", "8"))


def test_a_pipeline_that_stands_still_is_given_up() -> None:
    with pytest.raises(UnreachableError, match=r"stood still|in time|no input|no result"):
        run(schedule((1, 2, 30.0, 0), (3, 4, 0.1, 0)), emulate=True, stretch=1.0, timeout_s=1.0)


@pytest.mark.parametrize(
    ("planned", "settings", "told"),
    [
        (Schedule(()), {"emulate": True}, "no stage"),
        (schedule((2, 4, 1, 0)), {"emulate": True}, "where layer 1 comes next"),
        (schedule((1, 2, 1, 0), (4, 5, 1, 0)), {"emulate": True}, "where layer 3 comes next"),
        (schedule((1, 2, 1, 0)), {}, "needs the model and its input"),
        (schedule((1, 2, 1, 0)), {"emulate": True, "buffers_out": 0}, "1 buffers out or more"),
        (schedule((1, 2, 1, 0)), {"emulate": True, "microbatches": 1}, "2 microbatches or more"),
        (schedule((1, 2, 1, 0)), {"emulate": True, "stretch": 0.0}, "stretch is more than 0"),
        (schedule((1, 2, 1, 0)), {"emulate": True, "timeout_s": -1.0}, "timeout is more than 0"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(planned: Schedule, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        run(planned, **settings)


def test_a_schedule_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="has 3 layers, the model has 4 blocks"):
        run(schedule((1, 3, 1, 0)), *chain("mlp", "8"))


def test_a_host_that_is_no_node_is_told_before_anything_starts() -> None:
    with pytest.raises(UnreachableError, match="is called host-0"):
        run(schedule((1, 4, 1, 0)), *chain("mlp", "8"), address="auto")


def answered(planned: Schedule) -> PartitionAnswer:
    job = PipelineJob(ModelChain("mlp", (0.0,) * 4, 8, (32, 32, 4, 2)), (), (), batch_size=2)
    return PartitionAnswer(job, "throughput", planned, 0.0, True, True, (), "")


@pytest.mark.long
def test_the_command_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    planned = answered(schedule((1, 2, 0.1, 0.05), (3, 4, 0.05, 0)))
    done = run_answer(planned, emulate=True, microbatches=4)
    data = run_data(done)
    assert data["output"] == "not compared"
    assert data["measured_throughput"] > 0
    run_text(replace(done, output="equal"))
    printed = capsys.readouterr().out
    assert "items/s measured" in printed
    assert "bit-identical" in printed
    with pytest.raises(InputError, match="the model to run"):
        run_answer(planned, emulate=False)
    with pytest.raises(UnreachableError, match="differs from the model's"):
        run_answer(
            answered(schedule((1, 2, 0, 0))), emulate=False, factory=f"{MODELS}:random", model_input="8",
            microbatches=4,
        )  # fmt: skip


def test_results_that_differ_in_the_last_bits_are_close() -> None:
    from trimtab.runtime.pipeline.runner import _compared

    one = torch.ones(4)
    assert _compared([one + 1e-6], [one])[0] == "close"
    assert _compared([one + 1e-1], [one])[0] == "different"
    assert _compared([one + 1e-1, one + 1e-6], [one])[0] == "different"
    assert _compared([(one, one)], [one])[0] == "different"
    assert _compared([one.double()], [one])[0] == "different"


def test_ctrl_c_leaves_no_process_behind() -> None:
    code = (
        "from trimtab.model.pipeline import PipelineStage, Schedule\n"
        "from trimtab.runtime.pipeline.runner import run_pipeline\n"
        "stages = tuple(PipelineStage(f'h{i}', 't', i, i, 0.2, 0, 0, 0) for i in (1, 2))\n"
        "run_pipeline(Schedule(stages), emulate=True, microbatches=500, progress=lambda s: print(s, flush=True))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("2 of"):
            break
    theirs = descendants(child.pid)
    assert theirs
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=30)
    assert "KeyboardInterrupt" in told
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in theirs) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in theirs if alive(pid)]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found.add(child)
                waiting.append(child)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="needs Ray"):
        run(schedule((1, 2, 1, 0)), emulate=True)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_cannot_be_reached(address: str) -> None:
    with pytest.raises(UnreachableError, match=f"nothing answers at {address}"):
        answers(address)
    with pytest.raises(InputError, match="no address"):
        answers("somewhere")
    answers("auto")


def test_every_wait_of_a_stage_has_a_deadline(cluster: Any) -> None:
    stage = StageActor(StageSettings("stage 1 (here)", buffers_in=1, buffers_out=1, timeout_s=0.2))
    with pytest.raises(StageError, match=r"stage 1 \(here\) got no input after 0 microbatches"):
        stage.run(1, None)
    with pytest.raises(StageError, match="had no result in time"):
        stage.give()
    box = [cluster.put("data")]
    assert stage.take(0, box) == 0
    with pytest.raises(StageError, match="had no room for microbatch 2 in time"):
        stage.take(1, box)
    assert stage.run(1, None).compute_s
    stage.take(1, box)
    with pytest.raises(StageError, match="could not hand on microbatch 2 in time"):
        stage.run(1, None)
    assert stage.give()[:2] == (0, "data")


def test_a_stage_that_cannot_hand_on_says_so(cluster: Any) -> None:
    stage = StageActor(StageSettings("stage 1 (here)", buffers_in=1, buffers_out=1, timeout_s=5))
    stage.take(0, [cluster.put("data")])
    with pytest.raises(StageError, match="could not hand on: ") as told:
        stage.run(1, "no actor")
    assert told.value.passed_on


def test_an_emulated_link_never_carries_more_than_it_can() -> None:
    now = time.monotonic()
    first = _pass_time(0.05, now, 0.0)
    second = _pass_time(0.05, now, first)  # announced while the first was on its way
    assert first == pytest.approx(now + 0.05 - 0.01)
    assert second == pytest.approx(first + 0.05)
    assert time.monotonic() >= second
