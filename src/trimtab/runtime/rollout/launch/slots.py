"""Engines on slots of a pool of a Ray cluster, one task for each, so that a freed GPU really goes to somebody else.

A worker that is to start asks the pool for a slot, by its priority like everybody; one that is stopped gives it back:
an engine that merely sleeps would keep it. When the slots' pool evicts a worker, its task is given notice, the rollout
pool drains it and the slot is handed over; its task stays in the queue, and when its turn comes the worker may be used
again. What must never happen: a slot that is held with no engine in it for longer than `idle_s`; a task that goes on
after the process of the rollout pool; an engine that is still there when its slot is somebody else's.

All of it lives on the loop of the rollout pool; the controller is asked on threads beside it, with deadlines.
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
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.elastic.member_client import MemberClient
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.wire import open_session
from trimtab.runtime.procs.background import Background, describe
from trimtab.runtime.rollout.launch.launcher import (
    EngineCommand,
    EngineProcessState,
    LauncherCallbacks,
    NoRoomError,
    Started,
    plain,
)
from trimtab.runtime.rollout.launch.readiness import PORT_TRIES, PortTakenError, serving
from trimtab.runtime.rollout.launch.slot_record import ANSWER_S, WorkerSlot
from trimtab.runtime.rollout.launch.slot_task import EngineSlotTask

log = logging.getLogger("trimtab.rollout")

NEWS_S = 0.5  # a question for news waits so long at most: then it is asked of the tasks there are by then
LOOK_S = 1.0  # between looks at an engine's process
GIVE_UP_S = 60.0  # for a task to end
UNTIMED_DRAIN_S = 30.0  # a node that drains without a deadline
NO_TIMEOUT_S = 1e7
LOSSES = (
    ReasonCode.node_lost,
    ReasonCode.slot_lost,
    ReasonCode.process_died,
    ReasonCode.start_timeout,
    ReasonCode.restarts_used,
)


class SlotLauncher:
    """Starts and ends engines on slots of `slots`, a pool of the session's controller.

    `resources` is what one engine needs, on one node. A worker whose slot is not there within `room_s` waits for it in
    the pool's queue, and the rollout pool goes on without it until then.
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
        self.places: dict[str, WorkerSlot] = {}  # by worker
        self._settings: dict[str, Any] = {"priority": priority, "labels": dict(labels or {}), "notice_s": notice_s}
        self._room_s, self._idle_s = room_s, idle_s
        self._deadlines = deadlines
        self._http: aiohttp.ClientSession | None = None
        self._run_id = uuid.uuid4().hex[:6]
        self._numbers = itertools.count(1)
        self._version = -1  # of the nodes, as last heard
        self._offset: float | None = None  # of the controller's clock
        self._threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="trimtab-slots")
        self.background = Background(prefix="slots")
        self._loops: list[asyncio.Task[None]] = []
        self._aside_tasks: set[asyncio.Task[None]] = set()
        self._submitting: dict[str, asyncio.Task[WorkerSlot]] = {}
        self._listening = self._closed = False

    # ---- what the rollout pool asks ----------------------------------------------------------------------------------

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        """An engine on a slot of its own; NoRoomError where the slot is still awaited."""
        self.listen()
        place = self.places.get(worker) or await self._submitted(worker)
        place.starting = True
        try:
            await self._placed(place)
            return await self._launch(place, version, path)
        finally:
            place.starting, place.idle_since = False, time.monotonic()

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Another engine in the same slot."""
        place = self.places.get(worker)
        if place is not None:
            place.stop_watching()
        return await self.start(worker, version, path)

    async def stop(self, worker: str) -> None:
        """The engine ends, and the slot is given back, or handed over where the pool has claimed it.

        After an engine that ended by itself the slot is kept for a while: most likely it is started again.
        """
        if worker in self._submitting:
            await asyncio.wait([self._submitting[worker]])
        place = self.places.get(worker)
        if place is None:
            return
        place.stop_watching()
        if place.state in IN_QUEUE and place.taken:
            return  # it waits for its slot, and has no engine
        if place.state is TaskState.cancelling:
            await self._hand_over(place)
            return
        if not place.taken and await self._ended_by_itself(place):
            place.idle_since = time.monotonic()
            return
        await asyncio.shield(self._aside(self._give_back(place)))
        if place.taken:  # its node goes: elsewhere, if there is room
            self._tell(self.pool.resume, worker)

    async def close(self) -> None:
        """Ends all tasks, and hears nothing more."""
        if self._closed:
            return
        self._closed = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, *self._aside_tasks, *self._submitting.values(), return_exceptions=True)
        for place in self.places.values():
            place.stop_watching()
        ends = [self._aside(self._give_back(place)) for place in list(self.places.values())]
        await asyncio.gather(*ends, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def also(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Something else that goes on until the launcher is closed."""
        self._loops.append(self.background.start(f"slots: {loop.__name__.strip('_')}", loop))

    async def ask(self, door: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        """Ask the controller."""
        return await self._beside(functools.partial(self.session.ask, door, *args, timeout_s=within_s))

    # ---- having a slot -----------------------------------------------------------------------------------------------

    async def _submitted(self, worker: str) -> WorkerSlot:
        """Its task, submitted; also where nobody waits for that any more, so that it can be found and ended."""
        task = self._submitting.get(worker)
        if task is None:
            task = self._submitting[worker] = asyncio.create_task(self._submit(worker))
            task.add_done_callback(functools.partial(self._is_submitted, worker))
        return await asyncio.shield(task)

    def _is_submitted(self, worker: str, task: asyncio.Task[WorkerSlot]) -> None:
        del self._submitting[worker]
        if not task.cancelled():
            task.exception()  # whoever waited has it; that nobody did is no fault

    async def _submit(self, worker: str) -> WorkerSlot:
        submit = functools.partial(
            self.slots.submit,
            EngineSlotTask,
            (worker,),
            resources=self.unit.floats(),
            id=f"{plain(worker)}.{self._run_id}.{next(self._numbers)}",
            ends_with_me=True,
            restarts=0,
            wait_s=NO_TIMEOUT_S,
            awaits_node=True,
            **self._settings,
        )
        place = self.places[worker] = WorkerSlot(worker, MemberClient(worker, await self._beside(submit)))
        return place

    async def _placed(self, place: WorkerSlot) -> None:
        """Until its slot is there; NoRoomError after `room_s` in the queue."""
        deadline = time.monotonic() + self._room_s
        while not (place.line.there and place.state is TaskState.running):
            if self.places.get(place.worker) is not place or place.state in ENDED:
                raise UnreachableError(f"its task in pool {self.slots.name} ended: {place.reason}")
            left_s = deadline - time.monotonic()
            if left_s <= 0 and place.state in IN_QUEUE:
                raise await self._no_room(place)
            place.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(place.changed.wait(), max(0.05, min(left_s, 1.0)))

    async def _no_room(self, place: WorkerSlot) -> NoRoomError:
        """The rollout pool goes on without the worker, until its task has a slot."""
        reason = place.reason
        with contextlib.suppress(TrimtabError):
            reason = (await self.ask("explain", place.line.task.id)).reason.sentence
        why = f"there is no room in pool {self.slots.name}: {reason}"
        place.taken = True
        self._tell(self.pool.take, place.worker, 0.0, why, forced=True)
        return NoRoomError(why, where=f"worker {place.worker}")

    async def _launch(self, place: WorkerSlot, version: int, path: str | None) -> Started:
        for _ in range(PORT_TRIES - 1):
            with contextlib.suppress(PortTakenError):
                return await self._launch_once(place, version, path)
        return await self._launch_once(place, version, path)

    async def _launch_once(self, place: WorkerSlot, version: int, path: str | None) -> Started:
        command = self.command
        self._http = self._http or open_session()

        async def look() -> EngineProcessState:
            seen: EngineProcessState = await place.call("look")
            return seen

        within_s = command.stop_s + ANSWER_S  # an engine that is there ends first
        url = await place.call("launch", command, version, path, within_s=within_s)
        engine, note = await serving(place.worker, url, command, self._http, look, self._deadlines)
        place.up = True
        place.watching = self.background.start(
            f"engine of {place.worker}",
            functools.partial(self._watch, place),
            on_failed=lambda _, error: self._gone(place, f"its engine cannot be watched: {describe(error)}"),
        )
        return Started(engine, command.starts_with(version, path), url, place.line.node, note)

    async def _watch(self, place: WorkerSlot) -> None:
        """Tell the rollout pool when the engine ends and its task does not."""
        while place.up:
            await asyncio.sleep(LOOK_S)
            try:
                ended = await place.call("ended")
            except UnreachableError:
                continue  # of the task's own end the news will tell
            if ended and place.up and place.state is TaskState.running:
                place.watching = None
                self._gone(place, ended)

    async def _ended_by_itself(self, place: WorkerSlot) -> bool:
        with contextlib.suppress(UnreachableError):
            return bool(await place.call("ended"))
        return False

    # ---- giving it up ------------------------------------------------------------------------------------------------

    async def _hand_over(self, place: WorkerSlot) -> None:
        """The pool has given notice: the engine ends, and the task returns to the queue by itself."""
        with contextlib.suppress(UnreachableError):
            await place.call("leave", within_s=self.command.stop_s + ANSWER_S)
        deadline = time.monotonic() + self.notice_s + GIVE_UP_S
        while place.state is TaskState.cancelling and self.places.get(place.worker) is place and not self._closed:
            if time.monotonic() > deadline:
                raise UnreachableError(f"its task does not leave its slot: {place.reason}")
            place.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(place.changed.wait(), 1.0)

    async def _give_back(self, place: WorkerSlot) -> None:
        """The engine ends, then the task, and the slot is free."""
        if self.places.get(place.worker) is place:
            del self.places[place.worker]
        if place.line.there:
            with contextlib.suppress(UnreachableError):
                await place.call("leave", within_s=self.command.stop_s + ANSWER_S)
        place.line.down("its slot was given back")
        try:
            await self._beside(functools.partial(place.line.task.complete, keep_slot=False))
        except InputError:
            return  # it has ended already
        seen: TaskSnapshot = await self.ask("wait", place.line.task.id, ENDED, GIVE_UP_S, within_s=GIVE_UP_S + ANSWER_S)
        if seen.state not in ENDED:
            raise UnreachableError(f"its task in pool {self.slots.name} does not end: {seen.reason}")

    def _gone(self, place: WorkerSlot, why: str) -> None:
        """Its engine is gone, unasked; told once."""
        if place.up:
            place.stop_watching()
            place.idle_since = time.monotonic()
            log.warning("the engine of %s is gone: %s", place.worker, why)
            self._tell(self.pool.died, place.worker, why)

    # ---- news --------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hear of nodes and tasks from now on."""
        if not self._listening and not self._closed:
            self._listening = True
            self.also(self._listen)

    async def _listen(self) -> None:
        while True:
            known = {place.line.task.id: place.line.seen for place in self.places.values()}
            try:
                if self._offset is None:
                    self._offset = float((await self.ask("status"))["time"]) - time.monotonic()
                news = await self.ask("news", known, self._version, NEWS_S)
                await self._hear(news)
            except TrimtabError as fault:
                log.warning("no news of slots: %s", fault.what)
                await asyncio.sleep(NEWS_S)
            except Exception:  # a launcher that hears nothing more would keep slots for ever
                log.exception("news of slots could not be heard")
                await asyncio.sleep(NEWS_S)

    async def _hear(self, news: ClientUpdate) -> None:
        by_task = {place.line.task.id: place for place in self.places.values()}
        for seen in news.tasks:
            if seen.id in by_task:
                await self._hear_task(by_task[seen.id], seen)
        if news.version != self._version:
            self._version = news.version
            for place in list(self.places.values()):
                self._hear_node(place, {one.node: one for one in news.nodes}.get(place.line.node))
            for hear in self.on_nodes:
                hear(news.nodes)
        self._let_idle_ones_go()

    async def _hear_task(self, place: WorkerSlot, seen: TaskSnapshot) -> None:
        place.line.seen = seen.state, seen.attempt
        place.reason = str(seen.reason)
        if place.line.there and seen.attempt != place.line.attempt:  # it went and came between two pieces of news
            place.line.down("its task was started again")
            self._gone(place, "its task was started again")
        if seen.state is TaskState.running and not place.line.there:
            await self._has_slot(place, seen)
        elif seen.state is TaskState.cancelling and seen.reason.code not in LOSSES:
            self._notice(place, seen)
        elif seen.state in (TaskState.cancelling, *IN_QUEUE, *ENDED):
            place.line.down(f"its task is {seen.state.value}: {seen.reason}")
            self._gone(place, str(seen.reason))
            if seen.state in ENDED:
                self._ended(place, seen)
        place.changed.set()

    def _ended(self, place: WorkerSlot, seen: TaskSnapshot) -> None:
        """Its task will not run again: another one may be submitted, unless somebody cancelled this one by hand."""
        if self.places.get(place.worker) is place:
            del self.places[place.worker]
        if place.taken and seen.state is not TaskState.cancelled:
            self._tell(self.pool.resume, place.worker)

    async def _has_slot(self, place: WorkerSlot, seen: TaskSnapshot) -> None:
        self._gone(place, "its task was started again")
        handle, node = seen.handles[0] if seen.handles else None, seen.members[0].node
        if handle is None:
            member = seen.members[0]
            find = functools.partial(self.session._ray.get_actor, member.actor, namespace=member.namespace)
            try:
                handle = await self._beside(find)
            except ValueError:
                return  # gone again; the news will say so
        place.line.up(handle, node, seen.attempt)
        place.node_goes, place.idle_since = False, time.monotonic()
        if place.taken:
            place.taken = False
            self._tell(self.pool.resume, place.worker)

    def _notice(self, place: WorkerSlot, seen: TaskSnapshot) -> None:
        """The pool gives the slot to somebody else."""
        if place.up or place.starting:
            place.taken = True
            why = f"pool {self.slots.name} gives its slot to others: {seen.reason.sentence}"
            self._tell(self.pool.take, place.worker, self.notice_s, why, forced=True)
        else:
            self._aside(self._hand_over(place))

    def _hear_node(self, place: WorkerSlot, node: NodeView | None) -> None:
        """Its node will go: the worker leaves in time."""
        if node is None or node.state is not NodeState.draining or place.node_goes:
            return
        place.node_goes = True
        left_s = UNTIMED_DRAIN_S
        if node.deadline is not None and self._offset is not None:
            left_s = max(0.0, node.deadline - self._offset - time.monotonic())
        why = f"node {node.facts.name or node.node[:12]} will go: {node.reason.sentence}"
        if place.up or place.starting:
            place.taken = True
            self._tell(self.pool.take, place.worker, left_s, why, forced=True)
        elif place.line.there:
            self._aside(self._give_back(place))

    def _let_idle_ones_go(self) -> None:
        """Slots without an engine, and places of workers that are none any more."""
        known = {one.worker for one in self.pool.workers()}
        now = time.monotonic()
        for place in list(self.places.values()):
            if place.up or place.starting or place.state is TaskState.cancelling:
                continue
            if place.worker not in known or (place.line.there and now - place.idle_since > self._idle_s):
                self._aside(self._give_back(place))

    # ---- how it is done ----------------------------------------------------------------------------------------------

    def _tell(self, door: Callable[..., None], *news: Any, **more: Any) -> None:
        """Tell the rollout pool; that it knows no such worker any more is no fault."""
        if self._closed:
            return
        try:
            door(*news, **more)
        except InputError as fault:
            log.info("%s", fault.what)

    def _aside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that is seen through, though nobody may wait for it any more."""
        task = asyncio.get_running_loop().create_task(work, name="rollout-slot")
        self._aside_tasks.add(task)
        task.add_done_callback(self._seen_through)
        return task

    def _seen_through(self, task: asyncio.Task[None]) -> None:
        self._aside_tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.warning("a slot was not given back: %s", fault)

    async def _beside(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _checked(resources: Mapping[str, float]) -> Resources:
    """What an engine needs, in our words: Ray's would be resources that no node has, and waited for."""
    where = "engines on slots"
    for name in resources:
        if name in ("CPU", "GPU"):
            raise InputError(f"there is no resource {name}", where=where, hint=f"did you mean {name.lower()}?")
    unit = Resources.of(resources, where=where)
    if not unit:
        raise InputError("an engine needs resources", where=where, hint="{'gpu': 1}")
    return unit
