"""Engines over several nodes, on slots of a pool that is not there: real processes, and a controller that only says so.

Each member of a task is an object of this process, called as Ray would call it: one call after another.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_answers import answer, greedy, run
from rollout_commands import llama_over_nodes
from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.model.nodes import NodeFacts, NodeState, NodeView
from trimtab.model.pool import TaskState
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot, TaskWorker
from trimtab.runtime.procs.processes import descendants
from trimtab.runtime.rollout.launch import process_engine as slot_task
from trimtab.runtime.rollout.launch.launcher import EngineCommand
from trimtab.runtime.rollout.launch.slots import SlotLauncher
from waiting import until_async

GPU = {"gpu": 1.0}


class Handle:
    """A member of a task, as Ray's handle of it."""

    def __init__(self, object_: Any) -> None:
        self.object = object_
        self.call = self
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, method: str, *args: Any) -> Any:
        future = self._thread.submit(getattr(self.object, method), *args)
        return SimpleNamespace(future=lambda: future)


@dataclass
class Controller:
    """Gives every task its slots at once, and says what a test wants it to say. Session, pool and task in one."""

    name: str = "gpus"
    handles: list[Handle] = field(default_factory=list)
    submitted: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[NodeView, ...] = ()
    seen: TaskSnapshot | None = None
    heard: list[tuple[str, str]] = field(default_factory=list)  # by the rollout pool: what, and why
    _changed: threading.Event = field(default_factory=threading.Event)

    def submit(self, kind: Any, args: Any, *, id: str, **settings: Any) -> Any:
        self.submitted = settings
        self.handles = [Handle(kind(*args)) for _ in settings["resources"]]
        self.change(TaskState.running, ReasonCode.placed, id)
        return SimpleNamespace(id=id, complete=lambda keep_slot: self.change(TaskState.done, ReasonCode.completed))

    def change(self, state: TaskState, code: ReasonCode, id: str = "") -> None:
        members = tuple(
            TaskWorker(id, 1, rank, len(self.handles), "host", f"h{rank}", "", f"n{rank}", 1, 0.0)
            for rank in range(len(self.handles))
        )
        id = id or (self.seen.id if self.seen else "")
        reason = Reason(code, "the test")
        self.seen = TaskSnapshot(id, "gpus", state, reason, 3.0, (), 1, 0, "", members, tuple(self.handles))
        self._changed.set()

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "status":
            return {"time": 0.0}
        if method == "wait":
            return self.seen
        assert method == "news"
        self._changed.wait(0.05)
        self._changed.clear()
        known, version, _ = args
        new = self.seen is not None and known.get(self.seen.id, (self.seen.state,))[0] is not self.seen.state
        return ClientUpdate(version + bool(self.nodes), self.nodes, 0, (self.seen,) if self.seen and new else ())

    # ---- the rollout pool

    def died(self, worker: str, why: str) -> None:
        self.heard.append(("died", why))

    def take(self, worker: str, deadline_s: float, why: str, *, forced: bool = False) -> None:
        self.heard.append(("take", why))

    def resume(self, worker: str) -> None:
        self.heard.append(("resume", ""))

    def workers(self) -> list[Any]:
        return [SimpleNamespace(worker="w0")]


before: set[int] = set()  # what other tests keep: helpers of multiprocessing


def processes() -> set[int]:
    """Guards and engines."""
    return {each.pid for each in descendants(os.getpid())} - before


def pid_of(launcher: SlotLauncher, controller: Controller, rank: int) -> int:
    """The engine's process of a rank."""
    [engine] = descendants(controller.handles[rank].object._process.pid)
    return engine.pid


@asynccontextmanager
async def launching(command: EngineCommand, **settings: Any) -> AsyncIterator[tuple[SlotLauncher, Controller]]:
    """Nothing is left behind, whatever a test did."""
    controller = Controller()
    launcher = SlotLauncher(controller, controller, controller, command, resources=GPU, **settings)  # type: ignore[arg-type]
    try:
        yield launcher, controller
    finally:
        await launcher.close()
    assert not processes()


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before.clear()
    before.update(processes())
    monkeypatch.setattr(slot_task, "logs_dir", lambda ray: tmp_path)
    monkeypatch.setattr(slot_task, "_node_address", lambda: "127.0.0.1")


def test_an_engine_over_two_nodes_is_one_gang_and_dies_and_starts_again_as_a_whole() -> None:
    async def play() -> None:
        async with launching(llama_over_nodes(stop_s=5.0), nodes=2) as (launcher, controller):
            started = await launcher.start("w0", 0, None)
            asked = controller.submitted
            assert (asked["resources"], asked["strategy"], asked["preemptible"]) == ([GPU, GPU], "STRICT_SPREAD", True)
            assert started.node == "n0, n1"
            assert len((await answer(started.engine, greedy("a", (5, 6, 7), 5))).ids) == 5
            slot, first = launcher.worker_slots["w0"], processes()
            assert len(first) == 4, "a guard and a process of each rank"
            os.kill(pid_of(launcher, controller, 1), signal.SIGKILL)
            await until_async(lambda: not processes() & first, "the end of all that is left")
            [(what, why)] = controller.heard
            assert what == "died"
            assert "rank 1: it was ended by SIGKILL" in why
            assert "rank 1 of 2 has met 1" in why, "the end of its log"
            assert "rank 0:" not in why
            await launcher.stop("w0")
            assert launcher.worker_slots["w0"] is slot, "kept for a restart"
            await launcher.start("w0", 0, None)
            assert len(processes()) == 4
            await launcher.stop("w0")
            assert not processes()
            assert not launcher.worker_slots, "and given back when it is not needed"
            assert [what for what, _ in controller.heard] == ["died"]

    run(play())


def test_a_start_of_which_one_rank_ends_fails_with_its_words_and_leaves_no_other() -> None:
    code = "import sys, time\nif sys.argv[1] == '1': sys.exit('no interface for NCCL')\ntime.sleep(600)"
    places = ("{rank}", "{nodes}", "{head}", "{dist_port}", "{port}")
    command = EngineCommand("none", command=(sys.executable, "-c", code, *places), stop_s=300.0)

    async def play() -> None:
        async with launching(command, nodes=3) as (launcher, controller):
            with pytest.raises(UnreachableError, match=r"rank 1: it ended with status 1[\s\S]*no interface") as fault:
                await launcher.start("w0", 0, None)
            assert "rank 0:" not in fault.value.what
            assert not processes()
            assert not controller.heard, "it never lived as far as the pool is concerned"

    run(play())


def test_a_gang_that_breaks_or_has_a_node_that_drains_takes_its_engine_with_it() -> None:
    async def play() -> None:
        async with launching(llama_over_nodes(stop_s=5.0), nodes=2) as (launcher, controller):
            await launcher.start("w0", 0, None)
            facts = NodeFacts(launcher.unit, name="second")
            reason = Reason(ReasonCode.drain_asked, "the test")
            controller.nodes = (NodeView("n1", NodeState.draining, facts, reason, 0.0),)
            await until_async(lambda: controller.heard, "the drain")
            controller.change(TaskState.cancelling, ReasonCode.gang_broken)
            await until_async(lambda: len(controller.heard) > 1, "the loss")
            assert [what for what, _ in controller.heard] == ["take", "died"]
            assert "node second is draining" in controller.heard[0][1]
            assert "GANG_BROKEN" in controller.heard[1][1]
            for handle in controller.handles:  # as the controller ends its processes
                assert handle.object.end(True)
            controller.change(TaskState.failed, ReasonCode.gang_broken)
            await until_async(lambda: not launcher.worker_slots, "the end of the task")
            assert not processes()

    run(play())


def test_an_engine_over_several_nodes_needs_a_command_for_them() -> None:
    with pytest.raises(InputError, match=r"\{rank\}, \{nodes\}, \{head\}, \{dist_port\}"):
        SlotLauncher(None, None, "gpus", EngineCommand("m", "llamacpp"), resources=GPU, nodes=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1"):
        SlotLauncher(None, None, "gpus", EngineCommand("m", "vllm"), resources=GPU, nodes=0)  # type: ignore[arg-type]
