"""Rollout on a pool of engines: in the run's own process, and on slots of a real Ray where engines are killed, evicted,
added and removed while they answer. Every answer is there, and is the one that an undisturbed engine gives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # `examples` is no package that is installed

from examples.grpo.components import make_policy  # noqa: E402
from examples.grpo.engine import noise  # noqa: E402
from examples.grpo.job import grpo  # noqa: E402
from examples.grpo.numpy_policy import NumpyPolicy  # noqa: E402
from examples.grpo.task import END, questions  # noqa: E402

import engines_for_runs  # noqa: E402
from tiny_gguf import tiny_gguf  # noqa: E402
from trimtab.core.errors import InputError, TrimtabError, UnreachableError  # noqa: E402
from trimtab.model.pool import ENDED  # noqa: E402
from trimtab.rollout import EngineRollout  # noqa: E402
from trimtab.runtime.client.session import Pool, Session, connect  # noqa: E402
from trimtab.runtime.procs.processes import table  # noqa: E402
from trimtab.runtime.run.component import Batch, Place, Result  # noqa: E402
from trimtab.runtime.run.folder import event_log_path, read_event_log  # noqa: E402
from trimtab.runtime.run.job import ComponentCode, RunJob  # noqa: E402
from trimtab.runtime.run.job_file import load_run  # noqa: E402
from trimtab.runtime.run.ray_executor import RayExecutor  # noqa: E402
from trimtab.runtime.run.run import Run, RunEnd  # noqa: E402
from waiting import until  # noqa: E402

WAIT_S = 240.0
HERE = Path(__file__).parents[1] / "helpers"
ENGINE = {"ask": "examples.grpo.engine:Asking", "engine": "examples.grpo.engine:PolicyEngine"}
LEARNS: dict[str, Any] = {"digits": 4, "questions": 4, "group": 32, "batches": 2, "rate": 1e-2}
SMALL: dict[str, Any] = {"digits": 5, "questions": 3, "group": 4, "batches": 2}


def job(iterations: int, *, gpus: int = 2, seed: int = 0, engine: dict[str, Any] | None = None, **size: Any) -> RunJob:
    """The GRPO example with engines for its rollout."""
    plain = grpo(iterations=iterations, seed=seed, gpus=gpus, **size)
    asks = {name: size[name] for name in ("digits", "questions", "group")}
    settings = {**ENGINE, "ask_settings": asks, "engine_settings": {"digits": size["digits"], **(engine or {})}}
    return replace(plain, parts={**plain.parts, "rollout": ComponentCode("trimtab.rollout:EngineRollout", settings)})


def engines(gpus: int = 2, near: Path = HERE, folder: Path | None = None, **settings: Any) -> EngineRollout:
    """The component by itself, in this process."""
    chosen = {"ask": "engines_for_runs:Asking", "engine": "engines_for_runs:Plain", **settings}
    place = Place("rollout", gpus=gpus, devices=tuple(range(gpus)), near=near, folder=folder)
    return EngineRollout(place=place, **chosen)


def states(rollout: EngineRollout) -> dict[str, str]:
    return {one["name"]: one["state"] for one in rollout.workers()}


def active(rollout: EngineRollout) -> list[str]:
    return [name for name, state in states(rollout).items() if state == "active"]


def no_threads_of_engines() -> bool:
    """A thread that was told to end may take a moment."""
    ours = ("trimtab-engine", "trimtab-rollout")
    return bool(until(lambda: not [one for one in threading.enumerate() if one.name.startswith(ours)], "their end"))


# ---- in the process of the run ---------------------------------------------------------------------------------------


def rewards_of(end: RunEnd) -> list[float]:
    assert end.state == "done", end.reason
    return [float(one["reward"]["reward"] or 0.0) for one in end.metrics.values()]


def test_with_engines_the_policy_learns_as_it_does_without() -> None:
    rewards = rewards_of(Run(job(30, **LEARNS)).run())
    assert rewards[-1] - rewards[0] > 0.4
    assert no_threads_of_engines()


def test_answers_do_not_depend_on_how_many_engines_there_are() -> None:
    def losses(gpus: int) -> list[Any]:
        run = job(4, **SMALL)
        workflow = run.job.workflow
        parts = tuple(
            replace(one, variants=(replace(one.variants[0], gpus=(gpus,), seconds={"": ((gpus, 1.0),)}),))
            if one.name == "rollout"
            else one
            for one in workflow.components
        )
        run = replace(run, job=replace(run.job, workflow=replace(workflow, components=parts)))
        end = Run(run).run()
        assert end.metrics[1]["rollout"]["workers"] == gpus
        return [end.metrics[number]["trainer"]["loss"] for number in (1, 2, 3, 4)]

    assert losses(1) == losses(2)


def test_a_run_with_engines_that_is_stopped_and_resumed_is_the_run_that_was_not(tmp_path: Path) -> None:
    run = job(6, seed=5, **SMALL)
    whole = Run(run, tmp_path / "whole").run()
    stopped = Run(run, tmp_path / "parts", on_iteration=lambda one, _: one.number == 3 and stopped.stop())
    stopped.run()
    resumed = Run(run, tmp_path / "parts", resume=True).run()
    assert resumed.state == "done"
    assert [resumed.metrics[n]["trainer"] for n in (4, 5, 6)] == [whole.metrics[n]["trainer"] for n in (4, 5, 6)]


def test_the_job_file_with_engines_gives_the_rollout_gpus_of_its_own() -> None:
    run = load_run(ROOT / "examples" / "grpo" / "engines.yaml")
    assert run.parts["rollout"].use == "trimtab.rollout:EngineRollout"
    assert EngineRollout.brings_workers
    assert sum(node.gpus for node in run.job.cluster.nodes) == 8


def test_methods_that_are_not_asynchronous_will_do_and_a_broken_answer_is_made_elsewhere_or_again() -> None:
    rollout = engines(engine="engines_for_runs:Raising")
    try:
        result = rollout.step(Batch(1, 0, 1))
    finally:
        rollout.close()
    assert result.data == [[5, 6, 7, 8], [5, 6, 7, 8], [7, 8, 9, 10], [7, 8, 9, 10]]
    assert (result.metrics["tokens"], result.metrics["length"], result.metrics["workers"]) == (16, 4, 2)
    assert result.metrics["resumed"] > 0


def test_engines_sleep_while_others_have_the_gpus_and_wake_with_the_weights_that_came_meanwhile() -> None:
    engines_for_runs.CALLS.clear()
    rollout = engines(engine="engines_for_runs:Noting")
    try:
        assert sorted(engines_for_runs.CALLS) == ["made rollout-1 (0,)", "made rollout-2 (1,)"]
        rollout.sync(100, 1)
        rollout.offload()
        assert set(states(rollout).values()) == {"inactive"}
        rollout.sync(200, 2)
        rollout.onload()
        assert active(rollout) == ["rollout-1", "rollout-2"]
        assert rollout.step(Batch(1, 0, 1)).data[0] == [205, 206, 207, 208]
        assert rollout.health() is True
    finally:
        rollout.close()
    verbs = [one.partition(" ")[0] for one in engines_for_runs.CALLS]
    assert sorted(verbs) == ["close", "close", "made", "made", "sleep", "sleep", "wake", "wake"]
    assert no_threads_of_engines()


def test_more_and_fewer_engines_while_nothing_is_lost(tmp_path: Path) -> None:
    rollout = engines(gpus=1, engine="engines_for_runs:Noting", folder=tmp_path)
    try:
        rollout.sync(7, 1)
        rollout.resize(3)
        until(lambda: len(active(rollout)) == 3, "three engines")
        assert all(answer[0] in (12, 14) for answer in rollout.step(Batch(1, 0, 1)).data), "newcomers have the weights"
        rollout.resize(1)
        assert len(states(rollout)) == 1
        rollout.span(2, 4)
        until(lambda: len(active(rollout)) == 2, "the least")
    finally:
        rollout.close()
    lines, end = read_event_log(event_log_path(tmp_path, "rollout"))
    assert [one["state"] for one in lines if one["worker"] == "rollout-1"] == ["starting", "active", "left"]
    assert {one["worker"] for one in lines if one["state"] == "left"} == {"rollout-1", "rollout-2", "rollout-3"}
    assert all(one["reason"] and one["code"] for one in lines)
    assert read_event_log(event_log_path(tmp_path, "rollout"), end) == ([], end)


def test_what_was_saved_is_what_engines_work_with_afterwards(tmp_path: Path) -> None:
    first = engines(engine="engines_for_runs:Noting")
    try:
        first.sync(50, 3)
        first.save(tmp_path)
        made = first.step(Batch(4, 0, 1)).data
    finally:
        first.close()
    second = engines(engine="engines_for_runs:Noting")
    try:
        second.load(tmp_path)
        assert second.step(Batch(4, 0, 1)).data == made
    finally:
        second.close()


def test_agents_outside_ask_the_same_engines_through_the_gateway() -> None:
    rollout = engines(gateway={"port": 0})
    try:
        port = int(rollout.step(Batch(1, 0, 1)).metrics["gateway_port"])
        assert rollout.gateway_url == f"http://127.0.0.1:{port}"
        asked = {"input_ids": [8, 9], "sampling_params": {"max_new_tokens": 3}}
        request = urllib.request.Request(
            f"{rollout.gateway_url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.loads(answer.read())["output_ids"] == [10, 11, 12]
    finally:
        rollout.close()


def servers(mark: str) -> list[int]:
    """Processes whose command line has the mark."""
    found = []
    for pid in table():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                found.append(pid)
    return found


def test_engines_may_be_servers_that_are_started_here_and_started_again_with_new_weights(tmp_path: Path) -> None:
    mark = f"run-engines-{uuid.uuid4().hex[:8]}"
    line = [sys.executable, str(HERE / "rollout_commands.py"), "{model}", "{host}", "{port}", mark]
    command = {"kind": "llamacpp", "model": str(tiny_gguf()), "command": line, "stop_s": 2.0}
    rollout = engines(engine=None, command=command, capacity=4, start_s=60.0, ready_s=60.0)
    try:
        assert len(active(rollout)) == 2
        assert [len(one) for one in rollout.step(Batch(1, 0, 1)).data] == [4] * 4
        with pytest.raises(InputError, match="read them from disk"):
            rollout.sync({"w": 1}, 1)
        rollout.sync(str(tiny_gguf(shift=0.5)), 1)
        rollout.save(tmp_path)
        assert [len(one) for one in rollout.step(Batch(2, 0, 1)).data] == [4] * 4
        assert servers(mark)
        rollout.offload()
        assert not servers(mark), "they cannot sleep, so they end"
        rollout.onload()
        assert len(active(rollout)) == 2
    finally:
        rollout.close()
    assert not servers(mark)


def test_with_elastic_settings_engines_that_nobody_needs_are_not_kept() -> None:
    swift = {
        "monitoring_interval": 0.1, "scale_down_cooldown": 0.1, "scale_up_cooldown": 0.1, "min_stable_period": 0.1,
        "drain_timeout": 0.2,
    }  # fmt: skip
    rollout = engines(gpus=3, engine="engines_for_runs:Noting", elastic=swift, rules={"monitor_s": 0.1}, ready_s=1.0)
    try:
        rollout.span(1, 3)
        until(lambda: len(active(rollout)) == 1, "the least that are needed")
        assert len(rollout.step(Batch(1, 0, 1)).data) == 4
    finally:
        rollout.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": None}, "exactly one of engine and command"),
        ({"command": "vllm serve {model}"}, "exactly one of engine and command"),
        ({"engine": None, "command": "vllm serve {model}"}, "no {port}"),
        ({"engine": "engines_for_runs:NoEngine"}, "has no generate"),
        ({"engine_settings": {"size": 3}}, "cannot be made with these settings"),
        ({"ask": "engines_for_runs:Plain"}, "has no requests"),
        ({"ask_settings": {"least": 3}}, "cannot be made with ask_settings"),
        ({"gpus_each": 0}, "gpus_each is not right: 0"),
        ({"gateway": {"prt": 3}}, "unknown key prt"),
        ({"rules": {"drains_s": 3.0}}, "unknown key drains_s"),
        ({"rules": {"max_workers": 3}}, "is set by the run"),
        ({"elastic": {"max_worker": 3}}, "unknown key max_worker"),
        ({"gpu_each": 2}, "unknown key gpu_each"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_made(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        engines(**settings)
    assert said in refused.value.what
    assert no_threads_of_engines()


def test_an_engine_that_cannot_be_made_is_said_and_nothing_is_left() -> None:
    with pytest.raises(UnreachableError, match="no such model"):
        engines(engine="engines_for_runs:Broken", rules={"tries": 1})
    assert no_threads_of_engines()


def test_what_was_asked_wrongly_is_said() -> None:
    rollout = engines(ask="engines_for_runs:Writing")
    try:
        with pytest.raises(InputError, match="1 prompts and 4 SamplingParams"):
            rollout.step(Batch(1, 0, 1))
        with pytest.raises(TrimtabError, match="takes no weights"):
            rollout.sync({}, 1)
    finally:
        rollout.close()


def test_noise_is_by_seed_and_place_alone_and_gives_the_policys_shares() -> None:
    seeds, places = np.arange(40_000, dtype=np.uint64), np.full(40_000, 3)
    drawn = noise(seeds, places)
    assert np.array_equal(drawn[17:19], noise(seeds[17:19], places[:2]))
    assert not np.array_equal(drawn[17:19], noise(seeds[17:19], places[:2] + 1))
    policy, asked = NumpyPolicy(1), np.repeat(questions(1, 1, 0, 1, 5), 40_000, axis=0)
    logs = policy.next_logs(asked, np.full(asked.shape, END), np.zeros(40_000, dtype=np.int64))
    shares = np.bincount((logs + drawn).argmax(axis=1), minlength=logs.shape[1]) / 40_000
    assert shares == pytest.approx(np.exp(logs[0]), abs=0.01)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_an_engine_says_of_each_token_what_the_policy_says_of_whole_answers(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    size = {"width": 16, "layers": 1, "heads": 2, "device": "cpu"} if backend == "torch" else {}
    given = {"backend": backend, "digits": 5, "size": size}
    asks = {"digits": 5, "questions": 3, "group": 4}
    rollout = engines(**ENGINE, ask_settings=asks, engine_settings=given, near=ROOT)
    try:
        made = rollout.step(Batch(1, 0, 1)).data
    finally:
        rollout.close()
    policy = make_policy(backend, Place("reference"), 5, size)
    assert policy.log_probabilities(made["asked"], made["answered"]) == pytest.approx(made["logs"], abs=1e-5)


# ---- on slots of a cluster -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR, namespace="trimtab",
    )  # fmt: skip
    with connect(name="engines") as session:
        session.preemption(cancel_timeout_s=2.0, save_timeout_s=1.0)
        session.pool("run", {"gpu": 4, "cpu": 1}, warm_hosts=3)
        yield session
        session.shutdown()
    ray.shutdown()


@pytest.fixture
def pool(session: Session) -> Pool:
    return session.pool("run")


@pytest.fixture
def rollout(session: Session, pool: Pool) -> Iterator[EngineRollout]:
    """Two engines, so slow that there is time to disturb them."""
    place = Place("rollout", gpus=2, pool="run", session="engines", on_slots=True, near=ROOT)
    made = EngineRollout(
        place=place,
        **ENGINE,
        ask_settings={"questions": 4},
        engine_settings={"token_s": 0.02},
        notice_s=6.0,
        room_s=1.0,
    )
    policy = NumpyPolicy(0)
    policy.weights["bias"][END] = -5.0  # long answers
    made.sync(policy.copied(), 1)
    yield made
    made.close()
    assert all(one.state in ENDED for one in pool.tasks()), "no task is left"
    assert no_threads_of_engines()


class Stepping:
    """A step that goes on beside a test."""

    def __init__(self, rollout: EngineRollout) -> None:
        self._rollout = rollout
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._step)
        self._thread.start()
        until(lambda: sum(one["running"] for one in rollout.workers()) > 20, "requests")

    def _step(self) -> None:
        self._result = self._rollout.step(Batch(1, 0, 1))

    def end(self) -> Result:
        self._thread.join(WAIT_S)
        assert self._result is not None
        return self._result


class Taker:
    """Somebody else who wants GPUs."""


def same(one: Result, two: Result) -> bool:
    return all(np.array_equal(one.data[name], two.data[name]) for name in ("asked", "answered", "logs"))


@pytest.mark.long
def test_no_answer_is_lost_or_changed_when_engines_die_are_evicted_added_and_removed(
    rollout: EngineRollout, pool: Pool
) -> None:
    right = rollout.step(Batch(1, 0, 1))
    assert right.metrics["length"] > 10
    assert right.metrics["workers"] == 2
    # Killed.
    step = Stepping(rollout)
    victim = rollout.pids()["rollout-2"]
    os.kill(victim, signal.SIGKILL)
    killed = step.end()
    assert same(killed, right)
    assert killed.metrics["resumed"] > 0
    until(lambda: len(active(rollout)) == 2, "its return")
    assert rollout.pids()["rollout-2"] != victim
    # Evicted by somebody of a higher priority, and back when that one is through.
    step = Stepping(rollout)
    taker = pool.submit(Taker, resources={"gpu": 3}, id="taker", priority=9.0, preemptible=False)
    taker.wait("running", timeout=WAIT_S)
    assert len(active(rollout)) == 1
    assert same(step.end(), right)
    assert rollout.health() is True
    policy = NumpyPolicy(1)
    rollout.sync(policy.copied(), 2)
    taker.complete()
    until(lambda: len(active(rollout)) == 2, "its return")
    # Evicted by hand: its task is back before anybody has noticed that it was gone.
    seen = next(one for one in pool.tasks() if one.id.startswith("rollout-2.") and one.state.value == "running")
    pool._session.task(seen.id).evict()
    until(lambda: len(active(rollout)) < 2, "its going")
    until(lambda: len(active(rollout)) == 2, "its return")
    # Others, with other weights: also those that were not there when they came.
    other = rollout.step(Batch(1, 0, 1))
    assert not same(other, right)
    # More of them, then fewer, in the midst of a step.
    policy.weights["bias"][END] = -5.0
    rollout.sync(policy.copied(), 3)
    right = rollout.step(Batch(1, 0, 1))
    step = Stepping(rollout)
    rollout.resize(4)
    until(lambda: len(active(rollout)) == 4, "four engines")
    assert same(step.end(), right)
    step = Stepping(rollout)
    rollout.resize(1)
    assert len(states(rollout)) == 1
    assert same(step.end(), right)


@pytest.mark.long
def test_a_run_on_a_cluster_has_its_engines_on_slots_and_leaves_none(session: Session, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "grpo" / "engines.yaml").read_text().replace("nodes: 2", "nodes: 1")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    run = replace(load_run(path, iterations=3), near=ROOT / "examples" / "grpo")
    end = Run(run, tmp_path / "run", RayExecutor(session)).run()
    assert (end.state, len(end.iterations)) == ("done", 3), end.reason
    gpus = len(end.plan.placed("rollout").gpus)
    assert end.metrics[3]["rollout"]["workers"] == gpus
    here = Run(run).run()
    assert [end.metrics[n]["trainer"] for n in (1, 2, 3)] == [here.metrics[n]["trainer"] for n in (1, 2, 3)]
    assert all(one.state in ENDED for one in session.tasks())
