"""States that workers saved: stores them beside the journal, loads them for a start, collects them after a crash.

A state is kept by its node until it is on the controller's disk. If the disk refuses it, it is also kept in memory, and
the write is retried: a saved state must never be dropped while its task may start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.core.errors import UnreachableError
from trimtab.machines.pool.events import StartTask, StopTask
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.reconcile import AwaitedKey
from trimtab.model.pool import ENDED
from trimtab.runtime.controller.rpc import TaskStartError, TaskWorker, WorkerStopResult, saved_state_name
from trimtab.runtime.store.blobs import BlobStore, file_name, read_state_name
from trimtab.runtime.workers.task_workers import TaskWorkerManager

log = logging.getLogger("trimtab.controller")

READ_S = 60.0  # to read a state from its node


@dataclass(frozen=True)
class SavedMemberState:
    """The state that a worker saved, and the node that keeps it until it is on the controller's disk."""

    node: str
    saved_as: str
    state: bytes


class StatesContext(Protocol):
    """What saved states need of the controller."""

    machine: PoolMachine


class SavedStates:
    """The saved states of tasks. `workers_save`: workers write into a directory that every node mounts."""

    def __init__(
        self,
        context: StatesContext,
        workers: TaskWorkerManager,
        blobs: BlobStore,
        spawn: Callable[[AwaitedKey, Coroutine[Any, Any, None]], object],
        *,
        workers_save: bool,
    ) -> None:
        self._context = context
        self._workers = workers
        self._blobs = blobs
        self._spawn = spawn
        self._workers_save = workers_save
        self.unwritten: dict[str, tuple[int, dict[int, SavedMemberState]]] = {}  # by task: attempt, states

    async def load(self, start: StartTask, processes: int) -> dict[int, bytes | str]:
        """The newest saved state by rank: bytes, or a file path; TaskStartError if it is gone."""
        await self.retry_writes()
        if start.task in self.unwritten:
            attempt, states = self.unwritten[start.task]
            ranks = {rank: self._blobs.state_path(start.task, attempt, rank) for rank in range(processes)}
            return {rank: states[rank].state if rank in states else path.read_bytes() for rank, path in ranks.items()}
        paths = await asyncio.to_thread(self._blobs.latest_state, start.task, processes)
        if paths is None:
            raise TaskStartError("the state it saved is gone", fatal=True)
        if self._workers_save:
            return {rank: str(path) for rank, path in enumerate(paths)}
        return dict(enumerate(await asyncio.gather(*(asyncio.to_thread(path.read_bytes) for path in paths))))

    def shared_path(self, member: TaskWorker) -> str | None:
        """Where a worker writes its state itself; None if it must be sent to the controller."""
        path = self._blobs.state_path(member.task, member.attempt, member.rank)
        return str(path) if self._workers_save else None

    async def store(
        self, stop: StopTask, members: Sequence[TaskWorker], outcomes: Sequence[WorkerStopResult]
    ) -> tuple[bool, list[str]]:
        """Store what the workers of a stopped task saved; whether all of it is saved, and notes."""
        record = self._context.machine.tasks.get(stop.task)
        if not stop.checkpoint_timeout_s or record is None:
            return False, []
        states = {
            member.rank: SavedMemberState(member.node, saved_state_name(member), outcome.state)
            for member, outcome in zip(members, outcomes, strict=True)
            if outcome.saved and outcome.state is not None
        }
        why = await self._write(stop.task, stop.attempt, states)
        # Files decide, not answers: a stop that a controller crash interrupted may have written them.
        unwritten = self.unwritten.get(stop.task, (0, {}))[1]
        paths = [self._blobs.state_path(stop.task, stop.attempt, rank) for rank in range(record.spec.processes)]
        saved = all(rank in unwritten or path.exists() for rank, path in enumerate(paths))
        if saved and why is None:
            await asyncio.to_thread(self._blobs.drop_old_states, stop.task, stop.attempt)
        return saved, [why] if why else []

    async def _write(self, task: str, attempt: int, states: dict[int, SavedMemberState]) -> str | None:
        """Write states to disk, then delete them on their nodes. If the disk refuses, keep them and return why."""
        try:
            for rank, sent in states.items():
                await asyncio.to_thread(self._blobs.put_state, task, attempt, rank, sent.state)
        except OSError as fault:
            self.unwritten[task] = (attempt, states)
            folder = self._blobs.state_path(task, attempt, 0).parent
            why = f"its state is kept in memory and not in {folder} ({fault.strerror}): make room there"
            log.error("task %s: %s", task, why)
            return why
        if task in self.unwritten and self.unwritten[task][0] <= attempt:
            del self.unwritten[task]
        for sent in states.values():
            self._spawn(
                ("drop state", sent.saved_as, attempt), self._workers.drop_saved_state(sent.node, sent.saved_as)
            )
        return None

    async def retry_writes(self) -> None:
        """Retry the writes that the disk refused."""
        for task, (attempt, states) in list(self.unwritten.items()):
            record = self._context.machine.tasks.get(task)
            if record is None or record.state in ENDED:
                del self.unwritten[task]
                for sent in states.values():
                    await self._workers.drop_saved_state(sent.node, sent.saved_as)
            elif await self._write(task, attempt, states) is None:
                log.info("the state of task %s is on the disk now", task)

    async def collect(self) -> None:
        """After a restart: collect the states that were saved for the previous controller."""
        tasks = {file_name(task.id): task for task in self._context.machine.tasks.values() if task.state not in ENDED}
        for name, node in (await self._workers.saved_states()).items():
            found = read_state_name(name.partition("~")[2])
            record = tasks.get(found[0]) if found else None
            if found is None or record is None:
                await self._workers.drop_saved_state(node, name)
                continue
            state = None
            with contextlib.suppress(UnreachableError):  # the node is lost
                state = await self._workers.saved_state(node, name, READ_S)
            if state is not None:
                _, attempt, rank = found
                others = self.unwritten.get(record.id, (0, {}))[1]
                await self._write(record.id, attempt, {**others, rank: SavedMemberState(node, name, state)})
