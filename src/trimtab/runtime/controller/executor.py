"""Executes the pool machine's instructions and reports each outcome as an event.

Every instruction ends in the event that `trimtab.machines.pool.events` names beside it, also after a failure, a timeout
or a bug in here. Makes no scheduling decision. Runs on the controller's event loop; `TaskWorkerManager` creates and
ends processes and placement groups.

States that workers save are stored beside the journal, loaded for a start, and collected after a crash. A state is kept
by its node until it is on the controller's disk. If the disk refuses it, it is also kept in memory, and the write is
retried: a saved state must never be dropped while its task may start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from trimtab.core.codec import encode
from trimtab.core.errors import UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.machines.pool import events
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.reconcile import AwaitedEnd, AwaitedKey, key_of
from trimtab.model.pool import ENDED
from trimtab.runtime.controller import rpc
from trimtab.runtime.procs.background import describe
from trimtab.runtime.store.blobs import BlobStore, file_name, pack, read_state_name
from trimtab.runtime.workers.environments import RuntimeEnvironments
from trimtab.runtime.workers.placement_groups import PlacementGroupError
from trimtab.runtime.workers.task_workers import TaskWorkerManager

log = logging.getLogger("trimtab.controller")

SLACK_S = 10.0  # beyond the deadline of an operation that should end by itself
STOP_SLACK_S = 60.0
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_WORST = ("timed out", "raised", "returned", "not called")
_LARGE = 2**20  # bytes; larger files are read and written in a thread


class ControllerContext(Protocol):
    """What the controller's parts need of it."""

    machine: PoolMachine
    environments: RuntimeEnvironments

    def feed(self, event: events.PoolEvent) -> None:
        """Handle an event; never raises."""

    def now(self) -> float: ...

    def alive(self, node: str) -> bool: ...

    async def refresh_nodes(self, nodes: Collection[str], without: str) -> None:
        """Read again what others hold on these nodes."""


class InstructionExecutor:
    """Instructions in progress, and the workers of running tasks."""

    def __init__(
        self, context: ControllerContext, workers: TaskWorkerManager, blobs: BlobStore, *, workers_save: bool
    ) -> None:
        self._context = context
        self._workers = workers
        self._blobs = blobs
        self.states = SavedStates(context, workers, blobs, self._spawn, workers_save=workers_save)
        self.running: dict[str, list[rpc.TaskWorker]] = {}  # by task: workers that were started and not stopped
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._outcomes: dict[str, asyncio.Task[None]] = {}
        self._died_starting: dict[tuple[str, int], str] = {}  # by task and attempt: why a worker died during the start
        self._creating: dict[str, asyncio.Task[None]] = {}
        self._removing: set[str] = set()
        self._pools: dict[str, str] = {}  # of groups
        self._new_payloads: dict[str, rpc.TaskPayload] = {}  # of new tasks, so that the file is not read again
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_progress: dict[AwaitedKey, asyncio.Task[None]] = {}
        self._with_outcome: set[tuple[str, int]] = set()  # task and attempt of running tasks that have an entry method
        self._closed = False

    # ---- instructions ---------------------------------------------------------------------------------------

    def begin(self, instruction: events.PoolInstruction) -> None:
        """Execute an instruction concurrently."""
        key = key_of(instruction)
        if isinstance(instruction, events.CreatePlacementGroup):
            self._pools[instruction.group] = instruction.pool
            self._creating[instruction.group] = self._spawn(key, self._create_group(instruction))
        elif isinstance(instruction, events.RemovePlacementGroup):
            if instruction.group not in self._removing:  # it is retried until it succeeds
                self._removing.add(instruction.group)
                self._spawn(key, self._remove_group(instruction))
        elif isinstance(instruction, events.StartTask):
            self._starting[instruction.task] = self._spawn(key, self._start(instruction))
        elif isinstance(instruction, events.StopTask):
            if instruction.task not in self._stopping:
                self._stopping.add(instruction.task)
                self._spawn(key, self._stop(instruction))
        else:
            self._spawn(key, self._park_or_unpark(instruction))

    def in_progress(self) -> set[AwaitedKey]:
        """Keys of instructions in progress, and of tasks whose end is watched."""
        watched = {
            ("AwaitedEnd", task, members[0].attempt)
            for task, members in self.running.items()
            if members and self._is_watched(task, members)
        }
        return watched.union(self._in_progress)

    def retry(self, instruction: events.PoolInstruction | AwaitedEnd) -> None:
        """Execute a lost instruction again. A start without all its workers has failed; a running task has died."""
        if isinstance(instruction, (AwaitedEnd, events.StartTask)):
            members = [
                member for member in self.running.get(instruction.task, ()) if member.attempt == instruction.attempt
            ]
            if self._is_complete(instruction.task, members):
                if isinstance(instruction, events.StartTask):
                    self.resume(instruction, members)
                else:
                    self.watch_outcome(instruction.task, instruction.attempt)
            elif isinstance(instruction, events.StartTask):
                self._report_start_failed(instruction, rpc.TaskStartError("its start was lost", fatal=False))
            else:
                self._context.feed(
                    events.TaskDied(instruction.task, instruction.attempt, "its process is not known any more")
                )
            return
        if isinstance(instruction, events.StopTask):
            self._stopping.discard(instruction.task)
        elif isinstance(instruction, events.RemovePlacementGroup):
            self._removing.discard(instruction.group)
        self.begin(instruction)

    def _is_watched(self, task: str, members: Sequence[rpc.TaskWorker]) -> bool:
        outcome = self._outcomes.get(task)
        has_none = (task, members[0].attempt) not in self._with_outcome
        return self._is_complete(task, members) and (has_none or (outcome is not None and not outcome.done()))

    def _is_complete(self, task: str, members: Sequence[rpc.TaskWorker]) -> bool:
        record = self._context.machine.tasks.get(task)
        return record is not None and len(members) == record.spec.processes

    def submitted(self, task: str, payload: rpc.TaskPayload) -> None:
        self._new_payloads[task] = payload

    def attach(self, task: str, members: Sequence[rpc.TaskWorker]) -> None:
        """Adopt workers that were running before the controller restarted."""
        self.running[task] = sorted(members, key=lambda member: member.rank)

    def watch_outcome(self, task: str, attempt: int) -> None:
        """Wait for the result of a running task's entry method, if it has one."""
        header = self._blobs.header("payloads", task)
        if header is not None and header["entry"] is not None and task not in self._stopping:
            self._with_outcome.add((task, attempt))
            self._outcomes[task] = self._spawn(
                ("Outcome", task, attempt), self._await_outcomes(task, attempt, list(self.running[task]))
            )

    def resume(self, instruction: events.StartTask, members: Sequence[rpc.TaskWorker]) -> None:
        """Continue a start of before a controller restart: all its workers exist."""
        self._starting[instruction.task] = self._spawn(key_of(instruction), self._resume(instruction, members))

    def on_death(self, member: rpc.TaskWorker, why: str) -> None:
        """A worker died without being stopped."""
        key = (member.task, member.attempt)
        if member.task in self._stopping:
            return
        if member.task in self._starting:
            self._died_starting[key] = why
        elif any(other.attempt == member.attempt for other in self.running.get(member.task, ())):
            self._context.feed(events.TaskDied(*key, why))

    def node_lost(self, node: str) -> None:
        """Forget the workers on a lost node; the machine knows of the node."""
        for task, members in self.running.items():
            self.running[task] = [member for member in members if member.node != node]

    def forget(self, tasks: Collection[str]) -> None:
        """Forget tasks that the machine has forgotten."""
        for by_task in (self._new_payloads, self.states.unwritten):
            for task in [id for id in by_task if id not in tasks]:
                del by_task[task]
        self._with_outcome = {key for key in self._with_outcome if key[0] in self.running}

    async def close(self) -> None:
        """Cancel what is in progress. Running tasks continue."""
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

    # ---- placement groups -----------------------------------------------------------------------------------

    async def _create_group(self, create: events.CreatePlacementGroup) -> None:
        why = None
        try:
            limit_s = max(0.0, create.deadline - self._context.now()) + SLACK_S
            await asyncio.wait_for(self._workers.create_group(create, self._context.now), limit_s)
        except PlacementGroupError as fault:
            why = str(fault)
        except asyncio.TimeoutError:
            why = "Ray did not answer in time"
        except Exception as fault:
            log.exception("group %s could not be created", create.group)
            why = describe(fault)
        self._creating.pop(create.group, None)
        if why is None:
            self._context.feed(events.PlacementGroupReady(create.group))
            return
        try:
            await asyncio.wait_for(self._context.refresh_nodes(set(create.nodes), create.group), SLACK_S)
        except Exception:
            log.exception("nodes could not be read again")
        self._context.feed(events.PlacementGroupFailed(create.group, why))

    async def _remove_group(self, remove: events.RemovePlacementGroup) -> None:
        creating = self._creating.pop(remove.group, None)
        if creating is not None:  # its creation timed out
            creating.cancel()
            await asyncio.wait([creating], timeout=STOP_SLACK_S)
        group = self._context.machine.groups.get(remove.group)
        pool = self._pools.get(remove.group) or (group.pool if group else "")
        await self._until_done(
            lambda: self._workers.remove_group(remove.group, pool), f"group {remove.group} could not be removed"
        )
        self._pools.pop(remove.group, None)
        self._removing.discard(remove.group)
        self._context.feed(events.PlacementGroupRemoved(remove.group))

    async def _until_done(self, action: Callable[[], Awaitable[Any]], failure: str) -> Any:
        """Retry until it succeeds: what Ray still holds must not count as free."""
        tries = 0
        while True:
            try:
                return await asyncio.wait_for(action(), STOP_SLACK_S)
            except Exception as fault:
                log.warning("%s: %s; retrying", failure, describe(fault))
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    # ---- starting -------------------------------------------------------------------------------------------

    async def _start(self, start: events.StartTask) -> None:
        key = (start.task, start.attempt)
        try:
            members, how = await self._start_workers(start)
        except asyncio.CancelledError:  # it is being stopped, or the controller is
            self._died_starting.pop(key, None)
            raise
        except rpc.TaskStartError as fault:
            if fault.trace:
                await self._store_result(start.task, {0: rpc.EntryOutcome(error=fault.why, trace=fault.trace)})
            self._report_start_failed(start, fault)
        except asyncio.TimeoutError:
            self._report_start_failed(
                start, rpc.TaskStartError("it was not constructed in time", fatal=False, timed_out=True)
            )
        except Exception as fault:
            log.exception("task %s could not be started", start.task)
            self._report_start_failed(start, rpc.TaskStartError(describe(fault), fatal=False))
        else:
            self._report_started(start, members, how)

    async def _resume(self, start: events.StartTask, members: Sequence[rpc.TaskWorker]) -> None:
        limit_s = max(1.0, start.deadline - self._context.now())
        self.attach(start.task, members)  # so that a stop finds them
        try:
            ready = await asyncio.gather(*(self._workers.ready(member, limit_s) for member in members))
        except Exception:
            log.exception("the start of %s could not be resumed", start.task)
            ready = [False]
        if all(ready):
            self._report_started(start, members, "found running after a controller restart")
            return
        stopping = events.StopTask(
            start.task, start.attempt, self._context.machine.tasks[start.task].reason, cancel_grace_s=0.0
        )
        await asyncio.gather(*(self._stop_member(member, stopping) for member in members))
        self.running.pop(start.task, None)
        self._died_starting.pop((start.task, start.attempt), None)
        await self._start(start)

    def _report_started(self, start: events.StartTask, members: Sequence[rpc.TaskWorker], how: str) -> None:
        key = (start.task, start.attempt)
        self._starting.pop(start.task, None)
        self.attach(start.task, members)
        self._context.feed(events.TaskStarted(*key, how))
        self.watch_outcome(*key)
        self._new_payloads.pop(start.task, None)
        if key in self._died_starting:
            self._context.feed(events.TaskDied(*key, self._died_starting.pop(key)))

    def _report_start_failed(self, start: events.StartTask, fault: rpc.TaskStartError) -> None:
        self._starting.pop(start.task, None)
        self._died_starting.pop((start.task, start.attempt), None)
        why, record = fault.why, self._context.machine.tasks.get(start.task)
        if fault.timed_out and record is not None:  # the configured time, not the remainder here
            why = f"it was not constructed within {record.spec.start_timeout_s:g} s"
        self._context.feed(events.TaskStartFailed(start.task, start.attempt, why, fault.fatal, fault.timed_out))

    async def _start_workers(self, start: events.StartTask) -> tuple[list[rpc.TaskWorker], str]:
        record = self._context.machine.tasks[start.task]
        pool = self._context.machine.pools[record.spec.pool].spec
        payload = self._new_payloads.get(start.task) or await asyncio.to_thread(self._payload, start.task, pool.name)
        if payload is None:
            raise rpc.TaskStartError("the file with its class is gone from the journal's directory", fatal=True)
        processes = record.spec.processes
        state = await self.states.load(start, processes) if start.restore else None
        limit_s = max(0.0, start.deadline - self._context.now())
        group = self._context.machine.groups[record.places[0].group]
        # What a worker stores about its task, for recovery without a journal.
        facts = {"spec": encode(record.spec), "pool": encode(pool), "reserved": group.spec_index}
        starting = self._workers.start(
            start.task,
            start.attempt,
            pool.name,
            start.places[:processes],
            record.spec.bundles[:processes],
            payload,
            state,
            limit_s,
            preload=pool.preload,
            wide=len(start.places) > 1,
            facts=json.dumps(facts),
        )
        return await asyncio.wait_for(starting, limit_s + SLACK_S)

    def _payload(self, task: str, pool: str) -> rpc.TaskPayload | None:
        data = self._blobs.get("payloads", task)
        return None if data is None else rpc.read_payload(data, self._blobs.get("handlers", pool))

    # ---- outcomes -------------------------------------------------------------------------------------------

    async def _await_outcomes(self, task: str, attempt: int, members: Sequence[rpc.TaskWorker]) -> None:
        """Wait for all entry methods. The first error ends the wait: other workers may wait for the one that raised."""
        waits = {asyncio.ensure_future(self._outcome(member)): member for member in members}
        outcomes: dict[int, rpc.EntryOutcome] = {}
        try:
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    if outcome is None:
                        return  # its death was reported
                    outcomes[waits[future].rank] = outcome
                    if outcome.error is not None:
                        pending = set()
        finally:
            for future in waits:
                future.cancel()
        if self._closed or task in self._stopping:
            return
        not_stored = await self._store_result(task, outcomes)
        error = next(
            (outcome.error for _, outcome in sorted(outcomes.items()) if outcome.error is not None), not_stored
        )
        self._context.feed(events.TaskEnded(task, attempt, error))

    async def _store_result(self, task: str, outcomes: dict[int, rpc.EntryOutcome]) -> str | None:
        """Store the result; returns why it could not be stored."""
        ends = [outcomes[rank] for rank in sorted(outcomes)]
        header = {"errors": [end.error for end in ends], "traces": [end.trace for end in ends]}
        data = pack(header, [end.value for end in ends])
        tries = iter(RETRY_S)
        while True:  # a disk may be full for a moment
            try:
                if len(data) < _LARGE:
                    self._blobs.put("results", task, data)
                else:
                    await asyncio.to_thread(self._blobs.put, "results", task, data)
                return None
            except UnreachableError as fault:
                wait_s = next(tries, None)
                if wait_s is None or self._closed:
                    log.error("task %s: its result is lost: %s", task, fault.what)
                    return f"it returned, but its result is lost: {fault.what}; {fault.hint}"
            await asyncio.sleep(wait_s)

    async def _outcome(self, member: rpc.TaskWorker) -> rpc.EntryOutcome | None:
        """Outcome of the entry method; None if the process died, which is reported."""
        try:
            return await self._workers.outcome(member)
        except rpc.WorkerDiedError as fault:
            why = str(fault)
        except Exception as fault:
            log.exception("the outcome of %s could not be read", member.task)
            why = describe(fault)
        if member in self.running.get(member.task, ()):
            self.on_death(member, why)
        return None

    # ---- stopping -------------------------------------------------------------------------------------------

    async def _stop(self, stop: events.StopTask) -> None:
        starting = self._starting.pop(stop.task, None)
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting], timeout=STOP_SLACK_S)
        members = [member for member in self.running.get(stop.task, ()) if member.attempt == stop.attempt]
        outcomes = await asyncio.gather(*(self._stop_member(member, stop) for member in members))
        waiting = self._outcomes.pop(stop.task, None)
        if waiting is not None:
            waiting.cancel()
        saved, notes = await self.states.store(stop, members, outcomes)
        cancel = next((word for word in _WORST if any(outcome.cancel == word for outcome in outcomes)), "not called")
        self.running.pop(stop.task, None)
        self._stopping.discard(stop.task)
        notes += [outcome.note for outcome in outcomes if outcome.note]
        self._context.feed(events.TaskStopped(stop.task, stop.attempt, cancel, saved, "; ".join(dict.fromkeys(notes))))

    async def _stop_member(self, member: rpc.TaskWorker, stop: events.StopTask) -> rpc.WorkerStopResult:
        path = self.states.shared_path(member) if stop.checkpoint_timeout_s else None
        limit_s = stop.cancel_grace_s + stop.checkpoint_timeout_s + STOP_SLACK_S
        cancel_grace_s, checkpoint_timeout_s, tries = stop.cancel_grace_s, stop.checkpoint_timeout_s, 0
        while True:
            try:
                return await asyncio.wait_for(
                    self._workers.stop(member, cancel_grace_s, stop.notice, checkpoint_timeout_s, path), limit_s
                )
            except Exception as fault:
                if not self._context.alive(member.node):
                    return rpc.WorkerStopResult("not called", note="its node is gone")
                log.warning("a process of %s could not be stopped: %s; retrying", member.task, describe(fault))
            # Its slot is not reused before the process is certain to be gone.
            cancel_grace_s = checkpoint_timeout_s = 0.0
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    # ---- parking --------------------------------------------------------------------------------------------

    async def _park_or_unpark(self, instruction: events.ParkTask | events.UnparkTask) -> None:
        parks = isinstance(instruction, events.ParkTask)
        action = self._workers.park if parks else self._workers.unpark
        limit_s = max(0.0, instruction.deadline - self._context.now())
        members = list(self.running.get(instruction.task, ()))
        try:
            await asyncio.wait_for(asyncio.gather(*(action(member, limit_s) for member in members)), limit_s + SLACK_S)
        except rpc.ParkError as fault:
            self._context.feed(events.TaskDied(instruction.task, instruction.attempt, str(fault)))
        except Exception as fault:
            self._context.feed(events.TaskDied(instruction.task, instruction.attempt, describe(fault)))
        else:
            self._context.feed(
                (events.TaskParked if parks else events.TaskUnparked)(instruction.task, instruction.attempt)
            )


READ_S = 60.0  # to read a state from its node


class SavedMemberState(Frozen):
    """The state that a worker saved, and the node that keeps it until it is on the controller's disk."""

    node: str
    saved_as: str
    state: bytes


class SavedStates:
    """The saved states of tasks. `workers_save`: workers write into a directory that every node mounts."""

    def __init__(
        self,
        context: ControllerContext,
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

    async def load(self, start: events.StartTask, processes: int) -> dict[int, bytes | str]:
        """The newest saved state by rank: bytes, or a file path; TaskStartError if it is gone."""
        await self.retry_writes()
        if start.task in self.unwritten:
            attempt, states = self.unwritten[start.task]
            ranks = {rank: self._blobs.state_path(start.task, attempt, rank) for rank in range(processes)}
            return {rank: states[rank].state if rank in states else path.read_bytes() for rank, path in ranks.items()}
        paths = await asyncio.to_thread(self._blobs.latest_state, start.task, processes)
        if paths is None:
            raise rpc.TaskStartError("the state it saved is gone", fatal=True)
        if self._workers_save:
            return {rank: str(path) for rank, path in enumerate(paths)}
        return dict(enumerate(await asyncio.gather(*(asyncio.to_thread(path.read_bytes) for path in paths))))

    def shared_path(self, member: rpc.TaskWorker) -> str | None:
        """Where a worker writes its state itself; None if it must be sent to the controller."""
        path = self._blobs.state_path(member.task, member.attempt, member.rank)
        return str(path) if self._workers_save else None

    async def store(
        self, stop: events.StopTask, members: Sequence[rpc.TaskWorker], outcomes: Sequence[rpc.WorkerStopResult]
    ) -> tuple[bool, list[str]]:
        """Store what the workers of a stopped task saved; whether all of it is saved, and notes."""
        record = self._context.machine.tasks.get(stop.task)
        if not stop.checkpoint_timeout_s or record is None:
            return False, []
        states = {
            member.rank: SavedMemberState(member.node, rpc.saved_state_name(member), outcome.state)
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
