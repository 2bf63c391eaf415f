"""Carries out what the pool machine instructs, and tells it how that went.

Every instruction ends in the event that `trimtab.machines.pool.events` names beside it, also when it fails, takes too
long, or something here is wrong. Decides nothing about who runs where. The controller calls it, on its loop; processes
and placement groups are made and ended by `members`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trimtab.core.codec import encode
from trimtab.core.errors import UnreachableError
from trimtab.machines.pool.events import (
    CreatePlacementGroup,
    ParkTask,
    PlacementGroupFailed,
    PlacementGroupReady,
    PlacementGroupRemoved,
    PoolEvent,
    PoolInstruction,
    RemovePlacementGroup,
    StartTask,
    StopTask,
    TaskDied,
    TaskEnded,
    TaskParked,
    TaskStarted,
    TaskStartFailed,
    TaskStopped,
    TaskUnparked,
    UnparkTask,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.reconcile import AwaitedEnd, AwaitedKey, key_of
from trimtab.machines.pool.records import PoolTask
from trimtab.model.pool import ENDED, PoolSpec
from trimtab.runtime.store.blobs import BlobStore, file_name, pack, read_state_name, unpack
from trimtab.runtime.workers.task_workers import (
    EntryOutcome,
    ParkError,
    PlacementGroupError,
    TaskPayload,
    TaskStartError,
    TaskWorker,
    TaskWorkerManager,
    WorkerDiedError,
    WorkerStopResult,
    saved_state_name,
)

log = logging.getLogger("trimtab.controller")

SLACK_S = 10.0  # beyond its own deadline, until a deed that should have ended by itself is given up
STOP_SLACK_S = 60.0
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_WORST = ("timed out", "raised", "returned", "not called")
_LARGE = 2**20  # bytes that are read and written beside the loop


@dataclass(frozen=True)
class SavedMemberState:
    """The state that a member saved, and where it is kept until it is on the disk."""

    node: str
    saved_as: str
    state: bytes


class ExecutorContext(Protocol):
    """What deeds need of the controller."""

    machine: PoolMachine

    def feed(self, event: PoolEvent) -> None:
        """Tell the machine; never raises."""

    def now(self) -> float:
        """The machine's time."""

    def alive(self, node: str) -> bool:
        """Whether Ray has the node."""

    async def refresh_nodes(self, nodes: Collection[str], without: str) -> None:
        """A group could not be made there: have a fresh look at what others hold."""


class InstructionExecutor:
    """What is being carried out, and the processes of tasks that run."""

    def __init__(
        self, world: ExecutorContext, members: TaskWorkerManager, blobs: BlobStore, *, workers_save: bool
    ) -> None:
        self._context = world
        self._workers = members
        self._blobs = blobs
        self._workers_save = workers_save  # into a directory that every node has
        self.running: dict[str, list[TaskWorker]] = {}  # by task: members that were started and not stopped
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._outcomes: dict[str, asyncio.Task[None]] = {}
        self._died_starting: dict[tuple[str, int], str] = {}  # died while its start was under way
        self._creating: dict[str, asyncio.Task[None]] = {}
        self._removing: set[str] = set()
        self._pools: dict[str, str] = {}  # of groups
        self._unwritten_states: dict[
            str, tuple[int, dict[int, SavedMemberState]]
        ] = {}  # by task: attempt and states without room on disk
        self._new_payloads: dict[str, TaskPayload] = {}  # submitted a moment ago; saves reading the file
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_progress: dict[AwaitedKey, asyncio.Task[None]] = {}
        self._with_outcome: set[tuple[str, int]] = set()  # task and attempt: those that run and have an outcome
        self._closed = False

    # ---- the door -------------------------------------------------------------------------------------------

    def begin(self, instruction: PoolInstruction) -> None:
        """Carry out one instruction, beside everything else."""
        key = key_of(instruction)
        if isinstance(instruction, CreatePlacementGroup):
            self._pools[instruction.group] = instruction.pool
            self._creating[instruction.group] = self._spawn(key, self._create_group(instruction))
        elif isinstance(instruction, RemovePlacementGroup):
            if instruction.group not in self._removing:  # what is tried until it succeeds needs no second asking
                self._removing.add(instruction.group)
                self._spawn(key, self._remove_group(instruction))
        elif isinstance(instruction, StartTask):
            self._starting[instruction.task] = self._spawn(key, self._start(instruction))
        elif isinstance(instruction, StopTask):
            if instruction.task not in self._stopping:
                self._stopping.add(instruction.task)
                self._spawn(key, self._stop(instruction))
        elif isinstance(instruction, ParkTask):
            parked = TaskParked(instruction.task, instruction.attempt)
            self._spawn(key, self._park_or_unpark(instruction, self._workers.park, parked))
        else:
            unparked = TaskUnparked(instruction.task, instruction.attempt)
            self._spawn(key, self._park_or_unpark(instruction, self._workers.unpark, unparked))

    def in_progress(self) -> set[AwaitedKey]:
        """What is being carried out, and which tasks are being watched."""
        watched = {
            ("AwaitedEnd", task, members[0].attempt)
            for task, members in self.running.items()
            if members and self._is_watched(task, members)
        }
        return watched.union(self._in_progress)

    def retry(self, one: PoolInstruction | AwaitedEnd) -> None:
        """Do again what was lost; a start of which too little is left has failed, and a task that runs has died."""
        if isinstance(one, (AwaitedEnd, StartTask)):
            members = [member for member in self.running.get(one.task, ()) if member.attempt == one.attempt]
            if self._is_complete(one.task, members):
                if isinstance(one, StartTask):
                    self.resume(one, members)
                else:
                    self.watch_outcome(one.task, one.attempt)
            elif isinstance(one, StartTask):
                self._report_start_failed(one, TaskStartError("its start was lost", fatal=False))
            else:
                self._context.feed(TaskDied(one.task, one.attempt, "its process is not known any more"))
            return
        if isinstance(one, StopTask):
            self._stopping.discard(one.task)
        elif isinstance(one, RemovePlacementGroup):
            self._removing.discard(one.group)
        self.begin(one)

    def _is_watched(self, task: str, members: Sequence[TaskWorker]) -> bool:
        outcome = self._outcomes.get(task)
        has_none = (task, members[0].attempt) not in self._with_outcome
        return self._is_complete(task, members) and (has_none or (outcome is not None and not outcome.done()))

    def _is_complete(self, task: str, members: Sequence[TaskWorker]) -> bool:
        record = self._context.machine.tasks.get(task)
        return record is not None and len(members) == record.spec.processes

    def submitted(self, task: str, payload: TaskPayload) -> None:
        """Keep a payload at hand for the first start."""
        self._new_payloads[task] = payload

    def attach(self, task: str, members: Sequence[TaskWorker]) -> None:
        """These run already: from before the controller came back."""
        self.running[task] = sorted(members, key=lambda member: member.rank)

    def watch_outcome(self, task: str, attempt: int) -> None:
        """Wait for the outcome of a task that runs, where it has one."""
        header = self._blobs.header("payloads", task)
        if header is not None and header["entry"] is not None and task not in self._stopping:
            self._with_outcome.add((task, attempt))
            self._outcomes[task] = self._spawn(
                ("Outcome", task, attempt), self._await_outcomes(task, attempt, list(self.running[task]))
            )

    def resume(self, instruction: StartTask, members: Sequence[TaskWorker]) -> None:
        """A start that was under way when the controller went: every member is there, constructed or nearly."""
        self._starting[instruction.task] = self._spawn(key_of(instruction), self._resume(instruction, members))

    def on_death(self, member: TaskWorker, why: str) -> None:
        """A process is gone, unasked."""
        key = (member.task, member.attempt)
        if member.task in self._stopping:
            return
        if member.task in self._starting:
            self._died_starting[key] = why
        elif any(one.attempt == member.attempt for one in self.running.get(member.task, ())):
            self._context.feed(TaskDied(*key, why))

    def node_lost(self, node: str) -> None:
        """Forget the members of a lost node; the machine knows about the node."""
        for task, members in self.running.items():
            self.running[task] = [member for member in members if member.node != node]

    def forget(self, tasks: Collection[str]) -> None:
        """Keep nothing of tasks that the machine has forgotten."""
        for by_task in (self._new_payloads, self._unwritten_states):
            for task in [one for one in by_task if one not in tasks]:
                del by_task[task]
        self._with_outcome = {one for one in self._with_outcome if one[0] in self.running}

    async def close(self) -> None:
        """Stop carrying things out. What runs goes on."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, key: AwaitedKey, action: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._workers.background.once(f"{key[0]} {key[1]}", action)
        self._tasks.add(task)
        self._in_progress[key] = task

        def done(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._in_progress.get(key) is task:
                del self._in_progress[key]

        task.add_done_callback(done)
        return task

    # ---- groups ---------------------------------------------------------------------------------------------

    async def _create_group(self, one: CreatePlacementGroup) -> None:
        why = None
        try:
            limit_s = max(0.0, one.deadline - self._context.now()) + SLACK_S
            await asyncio.wait_for(self._workers.create_group(one, self._context.now), limit_s)
        except PlacementGroupError as fault:
            why = str(fault)
        except asyncio.TimeoutError:
            why = "Ray did not answer in time"
        except Exception as fault:
            log.exception("group %s could not be made", one.group)
            why = describe(fault)
        self._creating.pop(one.group, None)
        if why is None:
            self._context.feed(PlacementGroupReady(one.group))
            return
        try:
            await asyncio.wait_for(self._context.refresh_nodes(set(one.nodes), one.group), SLACK_S)
        except Exception:
            log.exception("no fresh look at nodes")
        self._context.feed(PlacementGroupFailed(one.group, why))

    async def _remove_group(self, one: RemovePlacementGroup) -> None:
        creating = self._creating.pop(one.group, None)
        if creating is not None:  # it took too long
            creating.cancel()
            await asyncio.wait([creating], timeout=STOP_SLACK_S)
        group = self._context.machine.groups.get(one.group)
        pool = self._pools.get(one.group) or (group.pool if group else "")
        await self._until_done(
            lambda: self._workers.remove_group(one.group, pool), f"group {one.group} could not be removed"
        )
        self._pools.pop(one.group, None)
        self._removing.discard(one.group)
        self._context.feed(PlacementGroupRemoved(one.group))

    async def _until_done(self, action: Callable[[], Awaitable[Any]], failure: str) -> Any:
        """Try until it succeeds: what Ray still holds must not be called free."""
        tries = 0
        while True:
            try:
                return await asyncio.wait_for(action(), STOP_SLACK_S)
            except Exception as fault:
                log.warning("%s: %s; trying again", failure, describe(fault))
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    # ---- starting -------------------------------------------------------------------------------------------

    async def _start(self, one: StartTask) -> None:
        key = (one.task, one.attempt)
        try:
            members, how = await self._start_workers(one)
        except asyncio.CancelledError:  # somebody stops it, or everything
            self._died_starting.pop(key, None)
            raise
        except TaskStartError as fault:
            if fault.trace:
                await self._store_result(one.task, {0: EntryOutcome(error=fault.why, trace=fault.trace)})
            self._report_start_failed(one, fault)
        except asyncio.TimeoutError:
            self._report_start_failed(
                one, TaskStartError("it was not constructed in time", fatal=False, timed_out=True)
            )
        except Exception as fault:
            log.exception("task %s could not be started", one.task)
            self._report_start_failed(one, TaskStartError(describe(fault), fatal=False))
        else:
            self._report_started(one, members, how)

    async def _resume(self, one: StartTask, members: Sequence[TaskWorker]) -> None:
        limit_s = max(1.0, one.deadline - self._context.now())
        self.attach(one.task, members)  # for whoever stops it meanwhile
        try:
            ready = await asyncio.gather(*(self._workers.ready(member, limit_s) for member in members))
        except Exception:
            log.exception("a half-made start of %s", one.task)
            ready = [False]
        if all(ready):
            self._report_started(one, members, "found running after the controller came back")
            return
        stop = StopTask(one.task, one.attempt, self._context.machine.tasks[one.task].reason, tell_s=0.0)
        await asyncio.gather(*(self._stop_member(member, stop) for member in members))
        self.running.pop(one.task, None)
        self._died_starting.pop((one.task, one.attempt), None)
        await self._start(one)

    def _report_started(self, one: StartTask, members: Sequence[TaskWorker], how: str) -> None:
        key = (one.task, one.attempt)
        self._starting.pop(one.task, None)
        self.attach(one.task, members)
        self._context.feed(TaskStarted(*key, how))
        self.watch_outcome(*key)
        self._new_payloads.pop(one.task, None)
        if key in self._died_starting:
            self._context.feed(TaskDied(*key, self._died_starting.pop(key)))

    def _report_start_failed(self, one: StartTask, fault: TaskStartError) -> None:
        self._starting.pop(one.task, None)
        self._died_starting.pop((one.task, one.attempt), None)
        why, record = fault.why, self._context.machine.tasks.get(one.task)
        if fault.timed_out and record is not None:  # as it was set, not what was left of it here
            why = f"it was not constructed within {record.spec.start_timeout_s:g} s"
        self._context.feed(TaskStartFailed(one.task, one.attempt, why, fault.fatal, fault.timed_out))

    async def _start_workers(self, one: StartTask) -> tuple[list[TaskWorker], str]:
        record = self._context.machine.tasks[one.task]
        pool = self._context.machine.pools[record.spec.pool].spec
        payload = self._new_payloads.get(one.task) or await asyncio.to_thread(self._payload, one.task)
        if payload is None:
            raise TaskStartError("the file with its class is gone from the journal's directory", fatal=True)
        processes = record.spec.processes
        state = await self._state(one, processes) if one.restore else None
        limit_s = max(0.0, one.deadline - self._context.now())
        start = self._workers.start(
            one.task,
            one.attempt,
            pool.name,
            one.places[:processes],
            record.spec.bundles[:processes],
            payload,
            state,
            limit_s,
            preload=pool.preload,
            wide=len(one.places) > 1,
            facts=self._facts(record, pool),
        )
        return await asyncio.wait_for(start, limit_s + SLACK_S)

    def _facts(self, record: PoolTask, pool: PoolSpec) -> str:
        """What the processes of a task carry with them, for the day on which the journal is lost."""
        group = self._context.machine.groups[record.places[0].group]
        facts = {"spec": encode(record.spec), "pool": encode(pool), "reserved": group.spec_index}
        return json.dumps(facts)

    def _payload(self, task: str) -> TaskPayload | None:
        data = self._blobs.get("payloads", task)
        if data is None:
            return None
        record = self._context.machine.tasks.get(task)
        handlers = self._blobs.get("handlers", record.spec.pool) if record else None
        return read_payload(data, handlers)

    async def _state(self, one: StartTask, processes: int) -> dict[int, bytes | str]:
        await self.retry_state_writes()
        if one.task in self._unwritten_states:
            attempt, states = self._unwritten_states[one.task]
            ranks = {rank: self._blobs.state_path(one.task, attempt, rank) for rank in range(processes)}
            return {rank: states[rank].state if rank in states else path.read_bytes() for rank, path in ranks.items()}
        paths = await asyncio.to_thread(self._blobs.latest_state, one.task, processes)
        if paths is None:
            raise TaskStartError("the state it saved is gone", fatal=True)
        if self._workers_save:
            return {rank: str(path) for rank, path in enumerate(paths)}
        return dict(enumerate(await asyncio.gather(*(asyncio.to_thread(path.read_bytes) for path in paths))))

    # ---- outcomes -------------------------------------------------------------------------------------------

    async def _await_outcomes(self, task: str, attempt: int, members: Sequence[TaskWorker]) -> None:
        """Wait for the entry of every member; the first that raises ends the waiting, for others may wait for it."""
        waits = {asyncio.ensure_future(self._outcome(member)): member for member in members}
        outcomes: dict[int, EntryOutcome] = {}
        try:
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    outcome = one.result()
                    if outcome is None:
                        return  # the machine was told that it died
                    outcomes[waits[one].rank] = outcome
                    if outcome.error is not None:
                        pending = set()
        finally:
            for one in waits:
                one.cancel()
        if self._closed or task in self._stopping:
            return
        not_stored = await self._store_result(task, outcomes)
        error = next((one.error for _, one in sorted(outcomes.items()) if one.error is not None), not_stored)
        self._context.feed(TaskEnded(task, attempt, error))

    async def _store_result(self, task: str, outcomes: dict[int, EntryOutcome]) -> str | None:
        """Store what came out; why not, where that cannot be done."""
        ranks = sorted(outcomes)
        header = {
            "errors": [outcomes[rank].error for rank in ranks],
            "traces": [outcomes[rank].trace for rank in ranks],
        }
        data = pack(header, [outcomes[rank].value for rank in ranks])
        try:
            if len(data) < _LARGE:
                self._blobs.put("results", task, data)
            else:
                await asyncio.to_thread(self._blobs.put, "results", task, data)
        except UnreachableError as fault:
            log.error("task %s: its result is lost: %s", task, fault.what)
            return f"it returned, but its result is lost: {fault.what}; {fault.hint}"
        return None

    async def _outcome(self, member: TaskWorker) -> EntryOutcome | None:
        """What the entry came to; None where the process is gone, of which the machine is told."""
        try:
            return await self._workers.outcome(member)
        except WorkerDiedError as fault:
            why = str(fault)
        except Exception as fault:
            log.exception("the outcome of %s could not be had", member.task)
            why = describe(fault)
        if member in self.running.get(member.task, ()):
            self.on_death(member, why)
        return None

    # ---- stopping -------------------------------------------------------------------------------------------

    async def _stop(self, one: StopTask) -> None:
        starting = self._starting.pop(one.task, None)
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting], timeout=STOP_SLACK_S)
        members = [member for member in self.running.get(one.task, ()) if member.attempt == one.attempt]
        outcomes = await asyncio.gather(*(self._stop_member(member, one) for member in members))
        waiting = self._outcomes.pop(one.task, None)
        if waiting is not None:
            waiting.cancel()
        saved, notes = await self._save_states(one, members, outcomes)
        cancel = next((word for word in _WORST if any(one.cancel == word for one in outcomes)), "not called")
        self.running.pop(one.task, None)
        self._stopping.discard(one.task)
        notes += [outcome.note for outcome in outcomes if outcome.note]
        self._context.feed(TaskStopped(one.task, one.attempt, cancel, saved, "; ".join(dict.fromkeys(notes))))

    async def _stop_member(self, member: TaskWorker, one: StopTask) -> WorkerStopResult:
        path = str(self._state_path(member)) if self._workers_save and one.save_s else None
        limit_s = one.tell_s + one.save_s + STOP_SLACK_S
        tell_s, save_s, tries = one.tell_s, one.save_s, 0
        while True:
            try:
                return await asyncio.wait_for(self._workers.stop(member, tell_s, one.notice, save_s, path), limit_s)
            except Exception as fault:
                if not self._context.alive(member.node):
                    return WorkerStopResult("not called", note="its node is gone")
                log.warning("a process of %s could not be stopped: %s; trying again", member.task, describe(fault))
            # Its slot is not given on before it is gone for certain.
            tell_s = save_s = 0.0
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    def _state_path(self, member: TaskWorker) -> Path:
        return self._blobs.state_path(member.task, member.attempt, member.rank)

    async def _save_states(
        self, one: StopTask, members: Sequence[TaskWorker], outcomes: Sequence[WorkerStopResult]
    ) -> tuple[bool, list[str]]:
        record = self._context.machine.tasks.get(one.task)
        if not one.save_s or record is None:
            return False, []
        states = {
            member.rank: SavedMemberState(member.node, saved_state_name(member), outcome.state)
            for member, outcome in zip(members, outcomes, strict=True)
            if outcome.saved and outcome.state is not None
        }
        why = await self._write_states(one.task, one.attempt, states)
        # Files decide, not answers: those of a stop that a crash of the controller cut short count as well.
        unstored = self._unwritten_states.get(one.task, (0, {}))[1]
        paths = [self._blobs.state_path(one.task, one.attempt, rank) for rank in range(record.spec.processes)]
        saved = all(rank in unstored or path.exists() for rank, path in enumerate(paths))
        if saved and why is None:
            await asyncio.to_thread(self._blobs.drop_old_states, one.task, one.attempt)
        return saved, [why] if why else []

    async def _write_states(self, task: str, attempt: int, states: dict[int, SavedMemberState]) -> str | None:
        """Write states to the disk, and then have their nodes drop them; where there is no room, why, and keep them."""
        try:
            for rank, sent in states.items():
                await asyncio.to_thread(self._blobs.put_state, task, attempt, rank, sent.state)
        except OSError as fault:
            self._unwritten_states[task] = (attempt, states)
            folder = self._blobs.state_path(task, attempt, 0).parent
            why = f"its state is kept in memory and not in {folder} ({fault.strerror}): make room there"
            log.error("task %s: %s", task, why)
            return why
        if task in self._unwritten_states and self._unwritten_states[task][0] <= attempt:
            del self._unwritten_states[task]
        for sent in states.values():
            self._spawn(
                ("drop state", sent.saved_as, attempt), self._workers.drop_saved_state(sent.node, sent.saved_as)
            )
        return None

    async def retry_state_writes(self) -> None:
        """Try to write what the disk had no room for."""
        for task, (attempt, states) in list(self._unwritten_states.items()):
            record = self._context.machine.tasks.get(task)
            if record is None or record.state in ENDED:
                del self._unwritten_states[task]
                for sent in states.values():
                    await self._workers.drop_saved_state(sent.node, sent.saved_as)
            elif await self._write_states(task, attempt, states) is None:
                log.info("the state of task %s is on the disk now", task)

    async def collect_states(self) -> None:
        """After a restart: take the states that were saved for the controller that died."""
        tasks = {file_name(one.id): one for one in self._context.machine.tasks.values() if one.state not in ENDED}
        for name, node in (await self._workers.saved_states()).items():
            found = read_state_name(name.partition("~")[2])
            record = tasks.get(found[0]) if found else None
            if found is None or record is None:
                await self._workers.drop_saved_state(node, name)
                continue
            state = None
            with contextlib.suppress(UnreachableError):  # lost with its node
                state = await self._workers.saved_state(node, name, STOP_SLACK_S)
            if state is not None:
                _, attempt, rank = found
                others = self._unwritten_states.get(record.id, (0, {}))[1]
                await self._write_states(record.id, attempt, {**others, rank: SavedMemberState(node, name, state)})

    # ---- taking turns ---------------------------------------------------------------------------------------

    async def _park_or_unpark(
        self,
        one: ParkTask | UnparkTask,
        action: Callable[[TaskWorker, float], Awaitable[None]],
        done: TaskParked | TaskUnparked,
    ) -> None:
        limit_s = max(0.0, one.deadline - self._context.now())
        members = list(self.running.get(one.task, ()))
        try:
            await asyncio.wait_for(asyncio.gather(*(action(member, limit_s) for member in members)), limit_s + SLACK_S)
        except ParkError as fault:
            self._context.feed(TaskDied(one.task, one.attempt, str(fault)))
        except Exception as fault:
            self._context.feed(TaskDied(one.task, one.attempt, describe(fault)))
        else:
            self._context.feed(done)


def write_payload(payload: TaskPayload, token: str) -> bytes:
    """A payload as a file: what is plain as JSON, what is pickled as bytes that nobody here unpacks."""
    header = {
        "token": token,
        "entry": payload.entry,
        "ray_options": payload.ray_options,
        "plain": payload.plain,
        "namespace": payload.namespace,
        "sys_path": list(payload.sys_path),
        "runtime_env": payload.runtime_env,
    }
    return pack(header, [payload.actor, payload.entry_args, payload.handlers])


def read_payload(data: bytes, handlers: bytes | None = None) -> TaskPayload:
    """The payload of a file; `handlers` of its pool where it has none of its own."""
    header, (actor, entry_args, own) = unpack(data)
    return TaskPayload(
        actor=actor or b"",
        entry=header["entry"],
        entry_args=entry_args,
        ray_options=header["ray_options"],
        plain=header["plain"],
        namespace=header["namespace"],
        handlers=own or handlers,
        sys_path=tuple(header["sys_path"]),
        runtime_env=header.get("runtime_env", ""),
    )


def describe(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0]}" if lines else type(fault).__name__
