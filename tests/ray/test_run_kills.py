"""Runs on a real Ray with two nodes whose processes, nodes, controller and driver are killed, also amid a move.

Whatever dies, every iteration counts once, and what the trainer has learned is what it would have learned undisturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from run_moves import AUTO, cluster, events, moves_of, on_ray, trained
from trimtab.model.nodes import NodeState
from trimtab.model.run import STAGES, MigrationStage, ReplanMode
from trimtab.model.workflow import Node
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.rayapi.embedded import EmbeddedRay
from trimtab.runtime.run.ray_executor import RayExecutor, first_nodes
from trimtab.runtime.run.replanner import MigrationExecutor
from trimtab.runtime.run.run import Run, RunEnd

pytestmark = pytest.mark.long

ITERATIONS = 16
Disturb = Callable[[str, dict[str, Any]], None]


class House:
    """A Ray of two nodes, where a node that was killed is made good before the next test."""

    def __init__(self, ray: EmbeddedRay, session: Session) -> None:
        self.ray, self.session = ray, session
        self.second, self.made = "node1", 1

    def pids(self, component: str) -> list[int]:
        seen = self.session.tasks()
        return [member.pid for task in seen if f".{component}." in task.id for member in task.members]

    def kill_node(self) -> None:
        self.ray.kill(self.second)
        self.second = ""

    def whole(self) -> None:
        if not self.second:
            self.made += 1
            self.second = f"node{self.made}"
            self.ray.add(Node(self.second, 4))
        end = time.monotonic() + 60
        while sum(one.state is NodeState.ready for one in first_nodes(self.session)) < 2:
            assert time.monotonic() < end, "there are no two nodes"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with EmbeddedRay(cluster(4, 4)) as ray, connect(name="kills") as session:
        yield House(ray, session)
        session.shutdown()


@pytest.fixture(autouse=True)
def _whole(house: House) -> None:
    house.whole()


def run(house: House, folder: Path, disturb: Disturb | None = None, **more: Any) -> RunEnd:
    job = on_ray(iterations=ITERATIONS, **more)
    return Run(job, folder, RayExecutor(house.session), on_event=disturb).run()


def counts_once(end: RunEnd, folder: Path, iterations: int = ITERATIONS) -> None:
    assert (end.state, [one.number for one in end.iterations]) == ("done", list(range(1, iterations + 1))), end.reason
    assert trained(end) == iterations * 4
    assert events(folder, "ended")[-1]["iteration"] == iterations


def once(when: Callable[[str, dict[str, Any]], bool], then: Callable[[], None]) -> Disturb:
    """Do something when an event is told for the first time that fits."""
    done: list[bool] = []

    def disturb(event: str, facts: dict[str, Any]) -> None:
        if not done and when(event, facts):
            done.append(True)
            then()

    disturb.done = done  # type: ignore[attr-defined]
    return disturb


def disturbed(
    house: House, folder: Path, when: Callable[[str, dict[str, Any]], bool], then: Callable[[], None]
) -> None:
    """A run to which something happens at a moment that comes only if it moves. On a crowded machine noise may hide
    the drift of a short run, and rightly nothing moves: then it is run again."""
    for attempt in range(3):
        disturb = once(when, then)
        counts_once(run(house, folder / f"run-{attempt}", disturb), folder / f"run-{attempt}")
        if disturb.done:  # type: ignore[attr-defined]
            return
    raise AssertionError("none of three runs came so far")


def at_iteration(number: int) -> Callable[[str, dict[str, Any]], bool]:
    return lambda event, facts: event == "iteration" and facts["iteration"]["number"] == number


def at_stage(stage: str) -> Callable[[str, dict[str, Any]], bool]:
    return lambda event, facts: event == "move" and facts["state"] == "stage" and facts["stage"] == stage


def kill_one(house: House, component: str) -> None:
    os.kill(house.pids(component)[0], signal.SIGKILL)


def kill_controller(session: Session) -> None:
    os.kill(session.status()["pid"], signal.SIGKILL)


def test_a_component_that_is_killed_is_made_anew_and_no_iteration_counts_twice(house: House, tmp_path: Path) -> None:
    kill = once(at_iteration(6), lambda: kill_one(house, "trainer"))
    end = run(house, tmp_path / "run", kill)
    counts_once(end, tmp_path / "run")
    assert events(tmp_path / "run", "lost")


@pytest.mark.parametrize("stage", ["save", "place"])
def test_a_component_that_is_killed_amid_a_move(house: House, tmp_path: Path, stage: str) -> None:
    disturbed(house, tmp_path, at_stage(stage), lambda: kill_one(house, "trainer"))


def test_a_node_that_is_lost_leaves_the_run_a_smaller_plan_and_one_that_joins_a_larger_one(
    house: House, tmp_path: Path
) -> None:
    kill = once(at_iteration(6), house.kill_node)
    join = once(at_iteration(8), house.whole)

    def both(event: str, facts: dict[str, Any]) -> None:
        kill(event, facts)
        if kill.done and events(tmp_path / "run", "lost"):  # type: ignore[attr-defined]
            join(event, facts)

    end = run(house, tmp_path / "run", both, rules=replace(AUTO, assumed_move_s=0.05, dwell_iterations=0))
    counts_once(end, tmp_path / "run")
    told = [one["why"] for one in events(tmp_path / "run", "cluster")]
    assert told[:2] == ["first", "lost"]
    assert "joined" in told
    forced = [one for one in moves_of(tmp_path / "run", "begun") if one["forced"]]
    assert forced
    assert "gone with node" in forced[-1]["reason"]


def test_a_node_that_is_lost_while_components_are_first_placed_leaves_the_run_a_smaller_plan(
    house: House, tmp_path: Path
) -> None:
    kill = once(lambda event, facts: event == "plan" and facts["why"] == "first", house.kill_node)
    end = run(house, tmp_path / "run", kill)
    counts_once(end, tmp_path / "run")
    first, *later = events(tmp_path / "run", "plan")
    assert first["why"] == "first"
    assert later[0]["why"] == "lost"
    assert end.plan.total_gpus == 4  # of one node


def test_a_run_that_is_only_advised_follows_the_advice_when_its_plan_is_gone(house: House, tmp_path: Path) -> None:
    rules = replace(AUTO, mode=ReplanMode.advise)
    end = run(house, tmp_path / "run", once(at_iteration(6), house.kill_node), rules=rules)
    counts_once(end, tmp_path / "run")
    assert not moves_of(tmp_path / "run", "begun")
    plans = events(tmp_path / "run", "plan")
    assert plans[0]["why"] == "first"
    assert {one["why"] for one in plans[1:]} == {"lost"}  # it may try the old one before it hears of the node
    assert plans[-1]["plan"] != plans[0]["plan"]


def test_a_node_that_is_lost_amid_a_move(house: House, tmp_path: Path) -> None:
    disturbed(house, tmp_path, at_stage("release"), house.kill_node)


@pytest.mark.parametrize("when", [at_iteration(5), at_stage("release")], ids=["at work", "amid a move"])
def test_a_controller_that_is_killed_is_started_again_and_the_run_goes_on(
    house: House, tmp_path: Path, when: Callable[[str, dict[str, Any]], bool]
) -> None:
    disturbed(house, tmp_path, when, lambda: kill_controller(house.session))


DRIVER = """
import sys
from pathlib import Path
from run_moves import on_ray
from trimtab.runtime.client.session import connect
from trimtab.runtime.run.ray_executor import RayExecutor
from trimtab.runtime.run.run import Run
with connect(sys.argv[1], name="kills") as session:
    Run(on_ray(iterations=int(sys.argv[3])), Path(sys.argv[2]), RayExecutor(session)).run()
"""


def killed_amid_a_move(house: House, folder: Path) -> bool:
    """A run whose driver is killed as soon as it moves; whether it did."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    command = [sys.executable, "-c", DRIVER, house.ray.address, str(folder), str(ITERATIONS)]
    with subprocess.Popen(command, env=environment) as driver:
        end = time.monotonic() + 120
        while not ((folder / "events.jsonl").exists() and moves_of(folder, "stage")):
            if driver.poll() is not None:
                return False
            assert time.monotonic() < end, "it does not move"
            time.sleep(0.01)
        driver.kill()
    return True


def test_a_driver_that_is_killed_amid_a_move_is_resumed_and_nothing_counts_twice(house: House, tmp_path: Path) -> None:
    folders = [tmp_path / f"run-{attempt}" for attempt in range(3)]
    folder = next((one for one in folders if killed_amid_a_move(house, one)), None)
    assert folder is not None, "none of three runs moved"
    again = Run(on_ray(iterations=ITERATIONS), folder, RayExecutor(house.session), resume=True).run()
    counts_once(again, folder)
    assert events(folder, "resumed")


class BreaksInTurn(MigrationExecutor):
    """The first move fails at the first stage, the second at the second ..."""

    moves: list[MigrationExecutor] = []  # noqa: RUF012

    def do(self, stage: MigrationStage) -> None:
        if self not in self.moves:
            self.moves.append(self)
        at = self.moves.index(self)
        if at < len(STAGES) and stage is STAGES[at]:
            if stage in (MigrationStage.release, MigrationStage.place):
                super().do(stage)
            raise OSError(5, f"the disk is gone at {stage.value}")
        super().do(stage)


def test_moves_that_fail_at_each_of_their_stages_are_undone_one_after_another(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BreaksInTurn, "moves", [])
    monkeypatch.setattr("trimtab.runtime.run.run.MigrationExecutor", BreaksInTurn)
    rules = replace(AUTO, assumed_move_s=0.05, dwell_iterations=0, margin=0.0)
    job = on_ray(iterations=40, rules=rules)
    end = Run(job, tmp_path / "run", RayExecutor(house.session)).run()
    counts_once(end, tmp_path / "run", 40)
    back = [(one["move"], one["stage"]) for one in moves_of(tmp_path / "run", "rolling back")]
    assert back == [(number, stage.value) for number, stage in enumerate(STAGES, 1)]
    assert [one["move"] for one in moves_of(tmp_path / "run", "rolled back")] == list(range(1, 8))
    assert moves_of(tmp_path / "run", "arrived")


def test_nothing_is_left_behind(house: House, tmp_path: Path) -> None:
    run(house, tmp_path / "run")
    status = house.session.status()
    assert not [one for one in house.session.tasks() if one.state.value not in ("done", "failed", "cancelled")]
    assert not [pool for pool in status["pools"] if pool["name"].startswith("run-run-")], status["pools"]
