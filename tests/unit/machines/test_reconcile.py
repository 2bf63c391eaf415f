"""What the pool machine waits for and nothing does is found, and done again or failed with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from trimtab.core.resources import Resources
from trimtab.machines.pool.events import (
    CancelRequested,
    CreatePlacementGroup,
    NodeJoined,
    PoolEnsured,
    PoolEvent,
    PoolTick,
    RemovePlacementGroup,
    StopTask,
    TaskSubmitted,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.reconcile import AwaitedEnd, PoolReconciler, expected, key_of
from trimtab.model.pool import PoolSpec, TaskSpec, TaskState
from trimtab.runtime.controller.executor import InstructionExecutor
from trimtab.runtime.controller.rpc import EntryOutcome, TaskPayload, TaskWorker, WorkerStopResult, write_payload
from trimtab.runtime.procs.background import Background
from trimtab.runtime.store.blobs import BlobStore
from trimtab.runtime.workers.task_workers import TaskWorkerManager

CPU = Resources.of(cpu=1)


class Processes:
    """Members that do what they are asked to at once, or never."""

    def __init__(self) -> None:
        self.background = Background()
        self.asked: list[str] = []
        self.hangs: set[str] = set()
        self.outcomes: dict[str, asyncio.Future[EntryOutcome]] = {}

    async def _do(self, what: str) -> None:
        self.asked.append(what)
        if what in self.hangs:
            await asyncio.Event().wait()

    async def create_group(self, instruction: Any, now: Any) -> None:
        await self._do("make")

    async def remove_group(self, group: str, pool: str) -> None:
        await self._do("remove")

    async def start(self, task: str, attempt: int, pool: str, places: Any, *_: Any, **__: Any) -> Any:
        await self._do("start")
        return [TaskWorker(task, attempt, 0, 1, "host", "a", "n", places[0].node, 1, 1.0)], "a warm host"

    async def ready(self, member: TaskWorker, timeout_s: float) -> bool:
        await self._do("ready")
        return True

    async def outcome(self, member: TaskWorker) -> EntryOutcome:
        await self._do("outcome")
        future = self.outcomes.setdefault(member.task, asyncio.get_running_loop().create_future())
        return await asyncio.shield(future)

    async def stop(self, member: TaskWorker, *_: Any) -> WorkerStopResult:
        await self._do("stop")
        return WorkerStopResult("returned")


class Controller:
    """A machine with deeds, and looks at what was lost, without the rest of a controller."""

    def __init__(self, tmp_path: Path) -> None:
        self.processes = Processes()
        self.machine = PoolMachine()
        self.blobs = BlobStore(tmp_path, None)
        self.executor = InstructionExecutor(
            self, cast(TaskWorkerManager, self.processes), self.blobs, workers_save=False
        )
        self.reconciler = PoolReconciler()
        self.clock = 0.0
        self.refused: set[str] = set()  # events on which the machine fails
        self.feed(NodeJoined("n0", Resources.of(cpu=4), Resources.of(), ()))
        self.feed(PoolEnsured(PoolSpec("p", Resources.of(cpu=4), reuse=False)))

    def feed(self, event: PoolEvent) -> None:
        if type(event).__name__ in self.refused:
            return
        for one in self.machine.handle(event, self.now()):
            self.executor.begin(one)

    def now(self) -> float:
        return self.clock

    def alive(self, node: str) -> bool:
        return True

    async def refresh_nodes(self, nodes: Collection[str], without: str) -> None:
        pass

    def submit(self, entry: str | None = None) -> str:
        self.blobs.put("payloads", "t", write_payload(TaskPayload(b"", entry=entry), "token"))
        self.feed(TaskSubmitted(TaskSpec("t", "p", (CPU,))))
        return "t"

    def look(self) -> list[str]:
        """Reconcile once; what was done again."""
        lost = self.reconciler.lost(expected(self.machine), self.executor.in_progress())
        for one in lost:
            self.executor.retry(one)
        return [type(one).__name__ for one in lost]

    def lose(self, kind: str) -> None:
        """The deed of an instruction vanishes without a word."""
        [task] = [task for key, task in self.executor._in_progress.items() if key[0] == kind]
        task.cancel()

    async def until(self, state: TaskState) -> None:
        for _ in range(10_000):
            if self.machine.tasks["t"].state is state:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"t is {self.machine.tasks['t'].state}")


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


# ---- the decision ---------------------------------------------------------------------------------------------------


def test_only_what_is_missing_in_two_looks_in_a_row_is_lost() -> None:
    reconciler = PoolReconciler()
    remove, watch = RemovePlacementGroup("g1"), AwaitedEnd("t", 2)
    assert reconciler.lost([remove, watch], {key_of(watch)}) == []
    assert reconciler.lost([remove, watch], set()) == [remove]
    assert reconciler.lost([remove, watch], {key_of(remove)}) == [watch]
    assert reconciler.lost([watch], {key_of(watch)}) == []


def test_another_attempt_is_another_instruction() -> None:
    reconciler = PoolReconciler()
    assert reconciler.lost([AwaitedEnd("t", 1)], set()) == []
    assert reconciler.lost([AwaitedEnd("t", 2)], set()) == []
    assert reconciler.lost([AwaitedEnd("t", 2)], {key_of(AwaitedEnd("t", 1))}) == [AwaitedEnd("t", 2)]


# ---- what comes of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", ["make", "start", "outcome"])
async def test_what_is_being_done_is_not_done_again_however_long_it_takes(tmp_path: Path, hangs: str) -> None:
    controller = Controller(tmp_path)
    controller.processes.hangs = {hangs}
    controller.submit(entry="run")
    for _ in range(10_000):
        if hangs in controller.processes.asked:
            break
        await asyncio.sleep(0.001)
    assert controller.processes.asked.count(hangs) == 1
    assert [controller.look() for _ in range(4)] == [[]] * 4
    assert controller.processes.asked.count(hangs) == 1
    await controller.executor.close()


async def test_a_start_that_was_lost_fails_with_a_reason_and_is_tried_again(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.processes.hangs = {"start"}
    controller.submit()
    for _ in range(10_000):
        if "start" in controller.processes.asked:
            break
        await asyncio.sleep(0.001)
    controller.lose("StartTask")
    await settle()
    controller.processes.hangs = set()
    assert (controller.look(), controller.look()) == ([], ["StartTask"])
    assert "its start was lost" in str(controller.machine.explain("t", controller.now()).story)
    controller.clock += 1000.0  # past the back-off
    controller.feed(PoolTick())
    await controller.until(TaskState.running)
    await controller.executor.close()


async def test_a_group_whose_making_was_lost_is_made(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.processes.hangs = {"make"}
    controller.submit()
    await settle()
    controller.lose("CreatePlacementGroup")
    await settle()
    assert [type(one) for one in expected(controller.machine)] == [CreatePlacementGroup]
    controller.processes.hangs = set()
    assert (controller.look(), controller.look()) == ([], ["CreatePlacementGroup"])
    await controller.until(TaskState.running)
    assert (controller.look(), controller.look()) == ([], [])
    await controller.executor.close()


async def test_a_stop_that_was_lost_is_done_again(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.submit()
    await controller.until(TaskState.running)
    controller.processes.hangs = {"stop"}
    controller.feed(CancelRequested("t"))
    await settle()
    controller.lose("StopTask")
    await settle()
    assert [type(one) for one in expected(controller.machine)] == [StopTask]
    controller.processes.hangs = set()
    assert (controller.look(), controller.look()) == ([], ["StopTask"])
    await controller.until(TaskState.cancelled)
    await controller.executor.close()


async def test_a_start_of_which_the_machine_was_not_told_is_told_again(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.refused = {"TaskStarted"}
    controller.submit()
    for _ in range(1000):
        if controller.executor.running:
            break
        await asyncio.sleep(0.001)
    assert controller.machine.tasks["t"].state is TaskState.starting
    controller.refused = set()
    await settle()
    assert (controller.look(), controller.look()) == ([], ["StartTask"])
    await controller.until(TaskState.running)
    assert controller.processes.asked.count("start") == 1
    await controller.executor.close()


async def test_an_outcome_that_nothing_waits_for_any_more_is_waited_for_again(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.submit(entry="run")
    await controller.until(TaskState.running)
    await settle()
    controller.lose("Outcome")
    await settle()
    assert (controller.look(), controller.look()) == ([], ["AwaitedEnd"])
    await settle()
    controller.processes.outcomes["t"].set_result(EntryOutcome(b"value"))
    await controller.until(TaskState.done)
    await controller.executor.close()


async def test_a_task_that_is_said_to_run_and_has_no_process_has_died(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.submit()
    await controller.until(TaskState.running)
    controller.executor.running.clear()
    assert (controller.look(), controller.look()) == ([], ["AwaitedEnd"])
    await controller.until(TaskState.failed)
    assert "its process is not known any more" in str(controller.machine.tasks["t"].reason)
    await controller.executor.close()
