"""Launcher of engines on slots of a pool of a Ray cluster, one task each, so that freed GPUs go to other tasks.

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
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import Resources
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.pool import ENDED, IN_QUEUE, TaskState
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.updates import ControllerListener, KnownTasks
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.elastic.member_client import MemberClient, MemberGoneError, MemberHungError, MemberRaisedError
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.wire import open_session
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, describe
from trimtab.runtime.rollout.launch.launcher import (
    EngineCommand,
    EngineProcessState,
    LauncherCallbacks,
    NoRoomError,
    Started,
    safe_name,
)
from trimtab.runtime.rollout.launch.readiness import start_with_retries, wait_until_serving
from trimtab.runtime.rollout.launch.slot_task import EngineSlotTask

log = logging.getLogger("trimtab.rollout")

ANSWER_S = 30.0  # for the controller or a task to answer
NEWS_WAIT_S = 0.5  # of a call for news, which is then repeated for the current tasks
ENGINE_CHECK_S = 1.0  # between checks of an engine's process
ENGINE_END_S = 3.0  # for the processes of an engine that listens no more
TASK_END_S = 60.0  # for a task to end
UNTIMED_DRAIN_S = 30.0  # a node that drains without a deadline
NO_TIMEOUT_S = 1e7
LOSSES = (
    ReasonCode.node_lost,
    ReasonCode.slot_lost,
    ReasonCode.process_died,
    ReasonCode.start_timeout,
    ReasonCode.restarts_used,
)


class WorkerSlot:
    """A worker's task in the slots' pool."""

    def __init__(self, worker: str, member: MemberClient) -> None:
        self.worker = worker
        self.member = member
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

    async def call(self, method: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        """Calls the task; UnreachableError if it is gone, hangs or raises."""
        try:
            return await self.member.call(method, *args, within_s=within_s)
        except (MemberGoneError, MemberHungError, MemberRaisedError) as fault:
            raise UnreachableError(str(fault), where=f"worker {self.worker}") from fault


class SlotLauncher:
    """Starts and stops engines on slots of `slots`, a pool of the session's controller.

    `resources` is what an engine needs, on one node. A worker without a slot after `room_s` stays in the pool's queue,
    and the rollout pool goes on without it until then.
    """

    def __init__(
        self,
        pool: LauncherCallbacks,
        session: Session,
        slots: Pool | str,
        command: EngineCommand,
        *,
        resources: Mapping[str, float],
        priority: float = 3.0,
        labels: Mapping[str, str] | None = None,
        notice_s: float = 30.0,
        room_s: float = 5.0,
        idle_s: float = 30.0,
        deadlines: EngineDeadlines | None = None,
    ) -> None:
        self.unit = _checked(resources)
        self.pool = pool
        self.session = session
        self.slots = session.pool(slots) if isinstance(slots, str) else slots
        self.command = command
        self.notice_s = notice_s
        self.on_nodes: list[Callable[[tuple[NodeView, ...]], None]] = []
        self.worker_slots: dict[str, WorkerSlot] = {}  # by worker
        self._settings: dict[str, Any] = {"priority": priority, "labels": dict(labels or {}), "notice_s": notice_s}
        self._room_s, self._idle_s = room_s, idle_s
        self._deadlines = deadlines
        self._http: aiohttp.ClientSession | None = None
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
            return await self._launch(slot, version, path)
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
        if not slot.taken and await self._ended_by_itself(slot, ending_s):
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
        if self._http is not None:
            await self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def add_loop(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Adds a background loop that runs until `close`."""
        self._loops.append(self.background.start(f"slots: {loop.__name__.strip('_')}", loop))

    async def ask(self, method: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        """Calls the controller."""
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
            EngineSlotTask,
            (worker,),
            resources=self.unit.floats(),
            id=f"{safe_name(worker)}.{self._run_id}.{next(self._numbers)}",
            ends_with_me=True,
            restarts=0,
            wait_s=NO_TIMEOUT_S,
            awaits_node=True,
            **self._settings,
        )
        slot = self.worker_slots[worker] = WorkerSlot(worker, MemberClient(worker, await self._in_thread(submit)))
        return slot

    async def _wait_for_slot(self, slot: WorkerSlot) -> None:
        """Waits for the slot; NoRoomError after `room_s` in the queue."""
        deadline = time.monotonic() + self._room_s
        while not (slot.member.there and slot.state is TaskState.running):
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

    async def _launch(self, slot: WorkerSlot, version: int, path: str | None) -> Started:
        return await start_with_retries(self, lambda: self._launch_once(slot, version, path))

    async def _launch_once(self, slot: WorkerSlot, version: int, path: str | None) -> Started:
        command = self.command
        self._http = self._http or open_session()

        async def probe() -> EngineProcessState:
            seen: EngineProcessState = await slot.call("probe")
            return seen

        within_s = command.stop_s + ANSWER_S  # a previous engine ends first
        url = await slot.call("launch", command, version, path, within_s=within_s)
        engine = await wait_until_serving(slot.worker, url, command, self._http, probe, self._deadlines)
        slot.up = True
        slot.watching = self.background.start(
            f"engine of {slot.worker}",
            functools.partial(self._watch, slot),
            on_failed=lambda _, error: self._engine_gone(slot, f"its engine cannot be watched: {describe(error)}"),
        )
        return Started(engine, command.started_version(version, path), url, slot.member.node)

    async def _watch(self, slot: WorkerSlot) -> None:
        """Reports an engine that ends before its task."""
        while slot.up:
            await asyncio.sleep(ENGINE_CHECK_S)
            try:
                ended = await slot.call("ended")
            except UnreachableError:
                continue  # the task's own end is reported by the controller
            if ended and slot.up and slot.state is TaskState.running:
                slot.watching = None
                self._engine_gone(slot, ended)

    async def _ended_by_itself(self, slot: WorkerSlot, within_s: float) -> bool:
        with contextlib.suppress(UnreachableError):
            return bool(await slot.call("ended", within_s, within_s=within_s + ANSWER_S))
        return False

    # ---- returning a slot --------------------------------------------------------------------------------------------

    async def _hand_over(self, slot: WorkerSlot) -> None:
        """After notice: ends the engine; the task returns to the queue by itself."""
        with contextlib.suppress(UnreachableError):
            await slot.call("leave", within_s=self.command.stop_s + ANSWER_S)
        deadline = time.monotonic() + self.notice_s + TASK_END_S
        while slot.state is TaskState.cancelling and self.worker_slots.get(slot.worker) is slot and not self._closed:
            if time.monotonic() > deadline:
                raise UnreachableError(f"its task does not leave its slot: {slot.reason}")
            await slot.wait_for_change(1.0)

    async def _give_back(self, slot: WorkerSlot) -> None:
        """Ends the engine, then the task."""
        if self.worker_slots.get(slot.worker) is slot:
            del self.worker_slots[slot.worker]
        if slot.member.there:
            with contextlib.suppress(UnreachableError):
                await slot.call("leave", within_s=self.command.stop_s + ANSWER_S)
        slot.member.down("its slot was given back")
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
            nodes = {node.node: node for node in news.nodes}
            for slot in list(self.worker_slots.values()):
                self._on_node(slot, nodes.get(slot.member.node))
            for callback in self.on_nodes:
                callback(news.nodes)
        self._release_idle()

    async def _on_task(self, slot: WorkerSlot, seen: TaskSnapshot) -> None:
        slot.member.seen = seen.state, seen.attempt
        slot.reason = str(seen.reason)
        if slot.member.there and seen.attempt != slot.member.attempt:  # it ended and restarted between two updates
            slot.member.down("its task was started again")
            self._engine_gone(slot, "its task was started again")
        if seen.state is TaskState.running and not slot.member.there:
            await self._on_slot(slot, seen)
        elif seen.state is TaskState.cancelling and seen.reason.code not in LOSSES:
            self._on_notice(slot, seen)
        elif seen.state in (TaskState.cancelling, *IN_QUEUE, *ENDED):
            slot.member.down(f"its task is {seen.state.value}: {seen.reason}")
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
        handle, node = seen.handles[0] if seen.handles else None, seen.members[0].node
        if handle is None:
            member = seen.members[0]
            find = functools.partial(self.session._ray.get_actor, member.actor, namespace=member.namespace)
            try:
                handle = await self._in_thread(find)
            except ValueError:
                return  # gone again; the next update reports it
        slot.member.up(handle, node, seen.attempt)
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

    def _on_node(self, slot: WorkerSlot, node: NodeView | None) -> None:
        """A draining node: the worker leaves in time."""
        if node is None or node.state is not NodeState.draining or slot.node_leaving:
            return
        slot.node_leaving = True
        left_s = UNTIMED_DRAIN_S
        if node.deadline is not None and self._offset is not None:
            left_s = max(0.0, node.deadline - self._offset - time.monotonic())
        why = f"node {node.facts.name or node.node[:12]} is draining: {node.reason.sentence}"
        if slot.up or slot.starting:
            slot.taken = True
            self._notify(self.pool.take, slot.worker, left_s, why, forced=True)
        elif slot.member.there:
            self._spawn(self._give_back(slot))

    def _release_idle(self) -> None:
        """Returns slots without an engine, and those of removed workers."""
        known = {view.worker for view in self.pool.workers()}
        now = time.monotonic()
        for slot in list(self.worker_slots.values()):
            if slot.up or slot.starting or slot.state is TaskState.cancelling:
                continue
            if slot.worker not in known or (slot.member.there and now - slot.idle_since > self._idle_s):
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
