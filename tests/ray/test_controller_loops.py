"""An elastic group and a controller go on after an unexpected error."""

from __future__ import annotations

import asyncio
import threading
import types
from pathlib import Path
from typing import Any, cast

import pytest

from trimtab.core.errors import UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import PoolTick
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.nodes import ElasticSpec, NodeFacts, NodeState, NodeView
from trimtab.runtime.controller import actor as controller_module
from trimtab.runtime.controller import controller_loop as driver_module
from trimtab.runtime.controller.actor import Controller
from trimtab.runtime.controller.controller_loop import ControllerLoop, MonotonicWallClock
from trimtab.runtime.controller.metrics import PoolMetrics
from trimtab.runtime.controller.rpc import ClientUpdate
from trimtab.runtime.elastic.group_controller import GroupController
from trimtab.runtime.elastic.member_tasks import MemberTasks
from trimtab.runtime.store.journal import Journal


def test_a_group_hears_of_nodes_after_news_that_made_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = threading.Event()
    node = NodeView(
        node="n0",
        state=NodeState.ready,
        since=0.0,
        facts=NodeFacts(Resources.of(cpu=1)),
        reason=Reason(ReasonCode.began, ""),
    )

    class Members:
        spec = types.SimpleNamespace(member_methods=frozenset(), notice_s=0.0)
        session = types.SimpleNamespace(client="c", status=lambda: {"time": 0.0})
        pool = types.SimpleNamespace(name="p")

        def __init__(self) -> None:
            self.tasks: dict[str, Any] = {}
            self.clients: dict[str, Any] = {}

        async def submit(self, member: str) -> None:
            submitted.set()

        async def ask_controller(self, *_: Any) -> None:
            pass

        async def end_all(self, within_s: float) -> None:
            pass

        def close(self) -> None:
            pass

    told: list[Any] = ["nonsense", ClientUpdate(1, (node,), 1)]

    async def news(self: GroupController, known: Any, version: int) -> Any:
        if not told:
            await asyncio.Event().wait()
        return told.pop(0)

    monkeypatch.setattr(GroupController, "_poll_controller", news)
    group = GroupController(ElasticSpec("g", Resources.of(cpu=1)), cast(MemberTasks, Members()), lambda happening: None)
    group.start()
    try:
        assert submitted.wait(60)
        [row] = group.view()["background"]
        assert (row["name"], row["failures"], row["state"]) == ("news", 1, "running")
    finally:
        group.close()


async def test_the_machine_is_woken_at_its_deadlines_after_a_tick_on_which_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, again = [], asyncio.Event()

    def handle(event: Any, now: float) -> list[Any]:
        ticks.append(event)
        if len(ticks) < 3:
            raise KeyError("a task that is not there")
        again.set()
        return []

    monkeypatch.setattr(driver_module, "TICK_RETRY_S", 0.01)
    driver = ControllerLoop("c", tmp_path, None, None)
    driver._clock = MonotonicWallClock(0.0)
    due = driver.now()
    deadline = lambda: None if again.is_set() else due  # noqa: E731
    machine = types.SimpleNamespace(handle=handle, next_deadline=deadline, tasks={}, warm_targets=dict)
    driver.machine = cast(PoolMachine, machine)
    driver.journal = cast(Journal, types.SimpleNamespace(append=lambda *_: None, since_snapshot=0))
    driver.pool_metrics = cast(PoolMetrics, types.SimpleNamespace(observe=lambda _: None))
    driver._wake_soon()
    await asyncio.wait_for(again.wait(), 60)
    assert ticks == [PoolTick()] * 3
    assert len(driver.faults) == 2


async def test_a_controller_that_could_not_come_up_tries_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, up = [], asyncio.Event()

    class Slow(Controller):
        async def _start(self) -> None:
            tried.append(1)
            if len(tried) < 3:
                raise UnreachableError("Ray does not answer yet")
            self._loop = cast(ControllerLoop, None)
            self._started = True
            up.set()

    monkeypatch.setattr(controller_module, "START_RETRY_S", 0.01)
    Slow("c", None, None)
    await asyncio.wait_for(up.wait(), 60)
    assert len(tried) == 3
