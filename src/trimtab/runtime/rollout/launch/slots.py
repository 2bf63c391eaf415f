"""Launcher of engines on slots of a pool of a Ray cluster, one task each, so that freed GPUs go to other tasks.

The task of an engine over several nodes is a gang, which is had, kept and lost as a whole: if one of its processes
ends, the others are ended before it is started again.

A starting worker queues for a slot by its priority; a stopped worker returns it (a sleeping engine would keep it). When
the slots' pool evicts a worker, its task gets notice, the rollout pool drains the worker and the slot is handed over;
the task stays queued, and the worker may be used again when it has a slot. What must never happen: a slot held without
an engine for longer than `idle_s`; a task that outlives the process of the rollout pool; an engine that still runs when
its slot belongs to another task.

Everything runs on the rollout pool's event loop; the controller is called on threads, with deadlines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.resources import Resources
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.pool import ENDED, IN_QUEUE, TaskState
from trimtab.runtime.client.connection import ControllerListener, KnownTasks
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.task import Task
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.elastic.member_tasks import LOSSES, MemberClient, MemberError
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import open_session
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, describe
from trimtab.runtime.rollout.launch.launcher import (
    EngineCommand,
    EngineProcessState,
    LauncherCallbacks,
    NoRoomError,
    Started,
    safe_name,
)
from trimtab.runtime.rollout.launch.process_engine import EngineSlotTask, SlotTask
from trimtab.runtime.rollout.launch.processes import start_with_retries, wait_until_serving

log = logging.getLogger("trimtab.rollout")

ANSWER_S = 30.0  # for the controller or a task to answer
NEWS_WAIT_S = 0.5  # of a call for news, which is then repeated for the current tasks
ENGINE_CHECK_S = 1.0  # between checks of an engine's process
ENGINE_END_S = 3.0  # for the processes of an engine that listens no more
TASK_END_S = 60.0  # for a task to end
UNTIMED_DRAIN_S = 30.0  # a node that drains without a deadline
NO_TIMEOUT_S = 1e7


class WorkerSlot:
    """A worker's task in the slots' pool, with a member on each of its nodes."""

    def __init__(self, worker: str, task: Task, nodes: int = 1) -> None:
        self.worker = worker
        names = [worker] if nodes == 1 else [f"rank {rank} of {worker}" for rank in range(nodes)]
        self.members = [MemberClient(name, task) for name in names]
        self.member = self.members[0]  # the one that serves
        self.reason = "it was just submitted"
        self.node_leaving = False
        self.starting = False  # `start` is running
        self.up = False  # the rollout pool has its engine
        self.taken = False  # reclaimed from the rollout pool
        self.idle_since = time.monotonic()
        self.changed = asyncio.Event()
        self.watching: asyncio.Task[None] | None = None

    @property
    def state(self) -> TaskState:
        return self.member.seen[0]

    @property
    def there(self) -> bool:
        """Whether all members can be called."""
        return all(member.there for member in self.members)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(member.node for member in self.members) if self.there else ()

    def down(self, why: str) -> None:
        for member in self.members:
            member.down(why)

    def stop_watching(self) -> None:
        """The rollout pool no longer has its engine."""
        self.up = False
        if self.watching is not None:
            self.watching.cancel()
            self.watching = None

    async def wait_for_change(self, within_s: float) -> None:
        self.changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), within_s)

    async def call(self, method: str, *args: Any, rank: int = 0, within_s: float = ANSWER_S) -> Any:
        """Calls a member; UnreachableError if it is gone, hangs or raises."""
        try:
            return await self.members[rank].call(method, *args, within_s=within_s)
        except MemberError as fault:
            raise UnreachableError(str(fault), where=f"worker {self.worker}") from fault

    async def call_all(self, method: str, *args: Any, within_s: float = ANSWER_S) -> list[Any]:
        """Calls all members; raises the first error when each has returned."""
        ranks = range(len(self.members))
        calls = (self.call(method, *args, rank=rank, within_s=within_s) for rank in ranks)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def ended(self, within_s: float = 0.0) -> str:
        """How the engine ended, empty while it runs. If it does not listen, its processes get `within_s` to end."""

        async def ask(rank: int, within_s: float) -> str:
            with contextlib.suppress(UnreachableError):  # the task's own end is reported by the controller
                return str(await self.call("ended", within_s, rank=rank, within_s=within_s + ANSWER_S))
            return ""

        others = (ask(rank, 0.0) for rank in range(1, len(self.members)))
        return self.exit_reasons(await asyncio.gather(ask(0, within_s), *others))

    async def kill(self, stop_s: float) -> None:
        """Kills what is left of an engine that did not start, or of which a process ended."""
        with contextlib.suppress(UnreachableError):
            await self.call_all("end", True, within_s=stop_s + ANSWER_S)

    def exit_reasons(self, ended: Sequence[str]) -> str:
        """Exit reasons of its processes in one text; of an engine over several nodes with their ranks."""
        return "\n".join(
            f"rank {rank}: {why}" if len(self.members) > 1 else why for rank, why in enumerate(ended) if why
        )


class SlotEngines(Protocol):
    """How engines are started in slots."""

    task: type[SlotTask]  # holds a slot
    stop_s: float  # for an engine to end

    async def launch(self, slot: WorkerSlot, version: int, path: str | None) -> Started:
        """Start an engine in its slot, replacing an earlier one."""

    async def close(self) -> None: ...


class CommandEngines:
    """Engines that are processes started by a command line."""

    task = EngineSlotTask

    def __init__(self, command: EngineCommand, nodes: int, deadlines: EngineDeadlines | None) -> None:
        self.command = command if nodes == 1 else command.over(nodes)
        self.stop_s, self._nodes, self._deadlines = command.stop_s, nodes, deadlines
        self._http: aiohttp.ClientSession | None = None

    async def launch(self, slot: WorkerSlot, version: int, path: str | None) -> Started:
        return await start_with_retries(self, lambda: self._launch_once(slot, version, path))

    async def _launch_once(self, slot: WorkerSlot, version: int, path: str | None) -> Started:
        command = self.command
        self._http = self._http or open_session()

        async def probe() -> EngineProcessState:
            seen: list[EngineProcessState] = await slot.call_all("probe")
            ended = slot.exit_reasons([state.ended for state in seen])
            return EngineProcessState(ended, seen[0].listens, any(state.port_taken for state in seen))

        try:
            # A previous engine ends on all nodes before the first process of the new one is started.
            (head, dist_port), *_ = await slot.call_all("prepare", within_s=command.stop_s + ANSWER_S)
            launches = (
                slot.call("launch", command, version, path, rank, self._nodes, head, dist_port, rank=rank)
                for rank in range(self._nodes)
            )
            url, *_ = await asyncio.gather(*launches)
            engine = await wait_until_serving(slot.worker, url, command, self._http, probe, self._deadlines)
        except Exception:
            await slot.kill(command.stop_s)
            raise
        return Started(engine, command.started_version(version, path), url, ", ".join(slot.nodes))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class SlotLauncher:
    """Starts and stops engines on slots of `slots`, a pool of the session's controller.

    `engines` is their command line, or how they are started otherwise; `resources` is what one needs on a node, and on
    each of them if it is over several `nodes`. A worker without a slot after `room_s` stays in the pool's queue, and
    the rollout pool goes on without it until then.
    """

    def __init__(
        self,
        pool: LauncherCallbacks,
        session: Session,
        slots: Pool | str,
        engines: EngineCommand | SlotEngines,
        *,
        resources: Mapping[str, float],
        nodes: int = 1,
        priority: float = 3.0,
        labels: Mapping[str, str] | None = None,
        notice_s: float = 30.0,
        room_s: float = 5.0,
        idle_s: float = 30.0,
        deadlines: EngineDeadlines | None = None,
    ) -> None:
        self.unit = _checked(resources)
        self.nodes = nodes
        self.engines = CommandEngines(engines, nodes, deadlines) if isinstance(engines, EngineCommand) else engines
        self.pool = pool
        self.session = session
        self.slots = session.pool(slots) if isinstance(slots, str) else slots
        self.notice_s = notice_s
        self.on_nodes: list[Callable[[tuple[NodeView, ...]], None]] = []
        self.worker_slots: dict[str, WorkerSlot] = {}  # by worker
        self._settings: dict[str, Any] = {"priority": priority, "labels": dict(labels or {}), "notice_s": notice_s}
        if nodes > 1:
            self._settings |= {"strategy": "STRICT_SPREAD", "preemptible": True}
        self._room_s, self._idle_s = room_s, idle_s
        self._run_id = uuid.uuid4().hex[:6]
        self._numbers = itertools.count(1)
        self._offset: float | None = None  # of the controller's clock
        self._threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="trimtab-slots")
        self.background = Background(prefix="slots")
        self._loops: list[asyncio.Task[None]] = []
        self._spawned: set[asyncio.Task[None]] = set()
        self._submitting: dict[str, asyncio.Task[WorkerSlot]] = {}
        self._listening = self._closed = False

    # ---- for the rollout pool ----------------------------------------------------------------------------------------

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        """Starts an engine on its own slot; NoRoomError if the slot is still pending."""
        self.listen()
        slot = self.worker_slots.get(worker) or await self._submitted(worker)
        slot.starting = True
        try:
            await self._wait_for_slot(slot)
            started = await self.engines.launch(slot, version, path)
            slot.up = True
            slot.watching = self.background.start(
                f"engine of {worker}",
                functools.partial(self._watch, slot),
                on_failed=lambda _, error: self._engine_gone(slot, f"its engine cannot be watched: {describe(error)}"),
            )
            return started
        finally:
            slot.starting, slot.idle_since = False, time.monotonic()

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Replaces the engine in the same slot."""
        slot = self.worker_slots.get(worker)
        if slot is not None:
            slot.stop_watching()
        return await self.start(worker, version, path)

    async def stop(self, worker: str) -> None:
        """Ends the engine and returns the slot, or hands it over if the pool has claimed it.

        After an engine that ended by itself the slot is kept for a while, for a likely restart.
        """
        if worker in self._submitting:
            await asyncio.wait([self._submitting[worker]])
        slot = self.worker_slots.get(worker)
        if slot is None:
            return
        ending_s = ENGINE_END_S if slot.up else 0.0
        slot.stop_watching()
        if slot.state in IN_QUEUE and slot.taken:
            return  # queued, without an engine
        if slot.state is TaskState.cancelling:
            await self._hand_over(slot)
            return
        if not slot.taken and await slot.ended(ending_s):
            await slot.kill(self.engines.stop_s)
            slot.idle_since = time.monotonic()
            return
        await asyncio.shield(self._spawn(self._give_back(slot)))
        if slot.taken:  # its node leaves: may start on another
            self._notify(self.pool.resume, worker)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, *self._spawned, *self._submitting.values(), return_exceptions=True)
        for slot in self.worker_slots.values():
            slot.stop_watching()
        ends = [self._spawn(self._give_back(slot)) for slot in list(self.worker_slots.values())]
        await asyncio.gather(*ends, return_exceptions=True)
        await self.engines.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def add_loop(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Adds a background loop that runs until `close`."""
        self._loops.append(self.background.start(f"slots: {loop.__name__.strip('_')}", loop))

    async def ask(self, method: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        return await self._in_thread(functools.partial(self.session.ask, method, *args, timeout_s=within_s))

    # ---- getting a slot ----------------------------------------------------------------------------------------------

    async def _submitted(self, worker: str) -> WorkerSlot:
        """Submits its task; completed even if the caller is cancelled, so that the task can be ended."""
        task = self._submitting.get(worker)
        if task is None:
            task = self._submitting[worker] = asyncio.create_task(self._submit(worker))
            task.add_done_callback(functools.partial(self._is_submitted, worker))
        return await asyncio.shield(task)

    def _is_submitted(self, worker: str, task: asyncio.Task[WorkerSlot]) -> None:
        del self._submitting[worker]
        if not task.cancelled():
            task.exception()  # retrieved; waiters have raised it

    async def _submit(self, worker: str) -> WorkerSlot:
        submit = functools.partial(
            self.slots.submit,
            self.engines.task,
            (worker,),
            resources=[self.unit.floats()] * self.nodes,
            id=f"{safe_name(worker)}.{self._run_id}.{next(self._numbers)}",
            ends_with_me=True,
            restarts=0,
            wait_s=NO_TIMEOUT_S,
            awaits_node=True,
            **self._settings,
        )
        slot = self.worker_slots[worker] = WorkerSlot(worker, await self._in_thread(submit), self.nodes)
        return slot

    async def _wait_for_slot(self, slot: WorkerSlot) -> None:
        """Waits for the slot; NoRoomError after `room_s` in the queue."""
        deadline = time.monotonic() + self._room_s
        while not (slot.there and slot.state is TaskState.running):
            if self.worker_slots.get(slot.worker) is not slot or slot.state in ENDED:
                raise UnreachableError(f"its task in pool {self.slots.name} ended: {slot.reason}")
            left_s = deadline - time.monotonic()
            if left_s <= 0 and slot.state in IN_QUEUE:
                raise await self._no_room(slot)
            await slot.wait_for_change(max(0.05, min(left_s, 1.0)))

    async def _no_room(self, slot: WorkerSlot) -> NoRoomError:
        """The rollout pool goes on without the worker until its task has a slot."""
        reason = slot.reason
        with contextlib.suppress(TrimtabError):
            reason = (await self.ask("explain", slot.member.task.id)).reason.sentence
        why = f"there is no room in pool {self.slots.name}: {reason}"
        slot.taken = True
        self._notify(self.pool.take, slot.worker, 0.0, why, forced=True)
        return NoRoomError(why, where=f"worker {slot.worker}")

    async def _watch(self, slot: WorkerSlot) -> None:
        """Reports an engine that ends before its task."""
        while slot.up:
            await asyncio.sleep(ENGINE_CHECK_S)
            ended = await slot.ended()
            if ended and slot.up and slot.state is TaskState.running:
                slot.watching = None
                self._spawn(slot.kill(self.engines.stop_s))
                self._engine_gone(slot, ended)

    # ---- returning a slot --------------------------------------------------------------------------------------------

    async def _hand_over(self, slot: WorkerSlot) -> None:
        """After notice: ends the engine; the task returns to the queue by itself."""
        with contextlib.suppress(UnreachableError):
            await slot.call_all("leave", within_s=self.engines.stop_s + ANSWER_S)
        deadline = time.monotonic() + self.notice_s + TASK_END_S
        while slot.state is TaskState.cancelling and self.worker_slots.get(slot.worker) is slot and not self._closed:
            if time.monotonic() > deadline:
                raise UnreachableError(f"its task does not leave its slot: {slot.reason}")
            await slot.wait_for_change(1.0)

    async def _give_back(self, slot: WorkerSlot) -> None:
        if self.worker_slots.get(slot.worker) is slot:
            del self.worker_slots[slot.worker]
        with contextlib.suppress(UnreachableError):
            await slot.call_all("leave", within_s=self.engines.stop_s + ANSWER_S)
        slot.down("its slot was given back")
        try:
            await self._in_thread(functools.partial(slot.member.task.complete, keep_slot=False))
        except InputError:
            return  # already ended
        seen: TaskSnapshot = await self.ask(
            "wait", slot.member.task.id, ENDED, TASK_END_S, within_s=TASK_END_S + ANSWER_S
        )
        if seen.state not in ENDED:
            raise UnreachableError(f"its task in pool {self.slots.name} does not end: {seen.reason}")

    def _engine_gone(self, slot: WorkerSlot, why: str) -> None:
        """Reports an unexpected end of the engine, once."""
        if slot.up:
            slot.stop_watching()
            slot.idle_since = time.monotonic()
            log.warning("the engine of %s is gone: %s", slot.worker, why)
            self._notify(self.pool.died, slot.worker, why)

    # ---- news --------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Starts listening for changes of nodes and tasks."""
        if not self._listening and not self._closed:
            self._listening = True
            listener = ControllerListener("slots", self._poll, self._known_tasks, self._on_news, NEWS_WAIT_S)
            self._loops.append(self.background.start("slots: listen", listener.run, policy=NEVER_GIVE_UP))

    def _known_tasks(self) -> KnownTasks:
        return {slot.member.task.id: slot.member.seen for slot in self.worker_slots.values()}

    async def _poll(self, known: KnownTasks, version: int) -> ClientUpdate:
        if self._offset is None:
            self._offset = float((await self.ask("status"))["time"]) - time.monotonic()
        news: ClientUpdate = await self.ask("news", known, version, NEWS_WAIT_S)
        return news

    async def _on_news(self, news: ClientUpdate, nodes_changed: bool) -> None:
        by_task = {slot.member.task.id: slot for slot in self.worker_slots.values()}
        for seen in news.tasks:
            if seen.id in by_task:
                await self._on_task(by_task[seen.id], seen)
        if nodes_changed:
            draining = {node.node: node for node in news.nodes if node.state is NodeState.draining}
            for slot in list(self.worker_slots.values()):
                for node in (draining[name] for name in slot.nodes if name in draining):
                    self._on_draining(slot, node)
            for callback in self.on_nodes:
                callback(news.nodes)
        self._release_idle()

    async def _on_task(self, slot: WorkerSlot, seen: TaskSnapshot) -> None:
        slot.member.seen = seen.state, seen.attempt
        slot.reason = str(seen.reason)
        if slot.there and seen.attempt != slot.member.attempt:  # it ended and restarted between two updates
            slot.down("its task was started again")
            self._engine_gone(slot, "its task was started again")
        if seen.state is TaskState.running and not slot.there:
            await self._on_slot(slot, seen)
        elif seen.state is TaskState.cancelling and seen.reason.code not in LOSSES:
            self._on_notice(slot, seen)
        elif seen.state in (TaskState.cancelling, *IN_QUEUE, *ENDED):
            slot.down(f"its task is {seen.state.value}: {seen.reason}")
            self._engine_gone(slot, str(seen.reason))
            if seen.state in ENDED:
                self._ended(slot, seen)
        slot.changed.set()

    def _ended(self, slot: WorkerSlot, seen: TaskSnapshot) -> None:
        """Its task will not run again: another may be submitted, unless it was cancelled by a user."""
        if self.worker_slots.get(slot.worker) is slot:
            del self.worker_slots[slot.worker]
        if slot.taken and seen.state is not TaskState.cancelled:
            self._notify(self.pool.resume, slot.worker)

    async def _on_slot(self, slot: WorkerSlot, seen: TaskSnapshot) -> None:
        self._engine_gone(slot, "its task was started again")
        handles = list(seen.handles) or [None] * len(seen.members)
        for rank, found in enumerate(seen.members):
            if handles[rank] is None:
                find = functools.partial(self.session._ray.get_actor, found.actor, namespace=found.namespace)
                try:
                    handles[rank] = await self._in_thread(find)
                except ValueError:
                    return  # gone again; the next update reports it
        for client, handle, found in zip(slot.members, handles, seen.members, strict=True):
            client.up(handle, found.node, seen.attempt)
        slot.node_leaving, slot.idle_since = False, time.monotonic()
        if slot.taken:
            slot.taken = False
            self._notify(self.pool.resume, slot.worker)

    def _on_notice(self, slot: WorkerSlot, seen: TaskSnapshot) -> None:
        """The pool gives the slot to another task."""
        if slot.up or slot.starting:
            slot.taken = True
            why = f"pool {self.slots.name} reclaims its slot: {seen.reason.sentence}"
            self._notify(self.pool.take, slot.worker, self.notice_s, why, forced=True)
        else:
            self._spawn(self._hand_over(slot))

    def _on_draining(self, slot: WorkerSlot, node: NodeView) -> None:
        """A node of it drains: the worker leaves in time."""
        if slot.node_leaving:
            return
        slot.node_leaving = True
        left_s = UNTIMED_DRAIN_S
        if node.deadline is not None and self._offset is not None:
            left_s = max(0.0, node.deadline - self._offset - time.monotonic())
        why = f"node {node.facts.name or node.node[:12]} is draining: {node.reason.sentence}"
        if slot.up or slot.starting:
            slot.taken = True
            self._notify(self.pool.take, slot.worker, left_s, why, forced=True)
        elif slot.there:
            self._spawn(self._give_back(slot))

    def _release_idle(self) -> None:
        """Returns slots without an engine, and those of removed workers."""
        known = {view.worker for view in self.pool.workers()}
        now = time.monotonic()
        for slot in list(self.worker_slots.values()):
            if slot.up or slot.starting or slot.state is TaskState.cancelling:
                continue
            if slot.worker not in known or (slot.there and now - slot.idle_since > self._idle_s):
                self._spawn(self._give_back(slot))

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _notify(self, method: Callable[..., None], *news: Any, **more: Any) -> None:
        """Calls the rollout pool; an unknown worker is no error."""
        if self._closed:
            return
        try:
            method(*news, **more)
        except InputError as fault:
            log.info("%s", fault.what)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that is completed even if its caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work, name="rollout-slot")
        self._spawned.add(task)
        task.add_done_callback(self._spawned_done)
        return task

    def _spawned_done(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.warning("a slot was not given back: %s", fault)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _checked(resources: Mapping[str, float]) -> Resources:
    """Resources of an engine in trimtab's names: under Ray's names no node would have them."""
    where = "engines on slots"
    for name in resources:
        if name in ("CPU", "GPU"):
            raise InputError(f"there is no resource {name}", where=where, hint=f"did you mean {name.lower()}?")
    unit = Resources.of(resources, where=where)
    if not unit:
        raise InputError("an engine needs resources", where=where, hint="{'gpu': 1}")
    return unit
