"""The controller of an elastic group: feeds its machine events and executes the machine's instructions.

Runs on its own thread with an event loop, so that members may join, leave and be health-checked between two steps. It
learns of nodes and tasks through one long poll of the pool controller and calls members over clients. It decides
nothing: membership, world changes and giving up are the machine's. Every wait has a deadline. The caller's thread only
requests steps and waits for their results.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.elastic import events as e
from trimtab.machines.elastic.machine import ElasticMachine
from trimtab.model.nodes import ElasticSpec, NodeState, NodeView, World
from trimtab.model.pool import ENDED, IN_QUEUE, TaskState
from trimtab.runtime.client.connection import ControllerListener, KnownTasks
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot, value_of
from trimtab.runtime.elastic.collectives import StateLostError, StepOutcome, StepRun, WorldSetup
from trimtab.runtime.elastic.member_tasks import ANSWER_S, LOSSES, MemberClient, MemberTasks
from trimtab.runtime.elastic.view import GroupLogEntry, GroupStats, StepResult
from trimtab.runtime.procs.background import Background, RestartPolicy

log = logging.getLogger("trimtab")

LONG_POLL_S = 10.0  # one long poll
RETRY_S = 0.25  # after a failed poll
PUBLISH_EVERY_S = 1.0
WARN_AFTER_S = 3.0
TICK_S = 0.2  # at most
CLOSE_S = 30.0
RESTART_POLICY = RestartPolicy(max_failures=20, window_s=600.0, max_backoff_s=2.0)  # then the group gives up
FAULTS = (  # a member that leaves for one of these is not called any more
    ReasonCode.hung,
    ReasonCode.unhealthy,
    ReasonCode.node_lost,
    ReasonCode.process_died,
)


class GroupError(TrimtabError):
    """An elastic group cannot go on, or a step of it failed."""

    exit_status = 4


class GroupGaveUpError(GroupError):
    """The group has given up: too few members for too long, or its members fail repeatedly."""


class StepFailedError(GroupError):
    """A member's own code raised; the cause is what it raised. The step does not count."""


@dataclass
class _StepRequest:
    """A step that the caller waits for."""

    batch: Any
    result: concurrent.futures.Future[StepResult]
    redone: int = 0
    began: float = field(default_factory=time.monotonic)


class GroupController:
    """Drives one group."""

    def __init__(self, spec: ElasticSpec, members: MemberTasks, tell: Callable[[GroupLogEntry], None]) -> None:
        self.spec = spec
        self.steps = 0  # complete steps
        self.world: World | None = None  # entered by every member; None while it changes
        self._members = members
        self._methods = members.spec.member_methods
        self._client_id = members.session.client
        self._listener = tell
        self._stats = GroupStats()
        self._machine = ElasticMachine(spec)
        self._offset = float(members.session.status()["time"]) - time.monotonic()  # to the controller's clock
        self._request: _StepRequest | None = None
        self._running: StepRun | None = None
        self._gave_up: Reason | None = None
        self._wait_for: e.WaitForMembers | None = None
        self._nodes: dict[str, NodeView] = {}
        self._happened: list[GroupLogEntry] = []  # since the last step
        self._tasks: set[asyncio.Task[None]] = set()
        self._background = Background(prefix=f"trimtab-group-{spec.name}")
        self._closing = False
        self._up = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name=f"trimtab-group-{spec.name}", daemon=True
        )

    # ---- from the caller's thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread: members are requested as soon as nodes are known."""
        self._thread.start()
        self._up.wait(ANSWER_S)

    def request_step(self, batch: Any) -> concurrent.futures.Future[StepResult]:
        result: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._handle_step, _StepRequest(batch, result))
        return result

    def request_size(self, size: int | None) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._handle_size, size, done)
        done.result(ANSWER_S)

    def view(self) -> dict[str, Any]:
        facts: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: facts.set_result(self._facts()))
        return facts.result(ANSWER_S)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._close)
            self._thread.join(CLOSE_S + 5.0)
        self._members.close()

    # ---- the loop ------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # the set of clients changed
        self._ended = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._up.set()
        listener = ControllerListener(
            f"group {self.spec.name}", self._poll_controller, self._known_tasks, self._on_update, RETRY_S
        )
        works = [
            self._background.start(
                name, work, policy=RESTART_POLICY, on_failed=lambda _, fault: self._fail_group(fault)
            )
            for name, work in (("news", listener.run), ("tick", self._tick), ("publish", self._publish_often))
        ]
        await self._ended.wait()
        try:
            await asyncio.wait_for(self._end_all(), CLOSE_S)
        except (asyncio.TimeoutError, TrimtabError) as fault:
            log.warning("group %s did not end in order: %s", self.spec.name, fault or "it took too long")
        for work in (*works, *self._tasks):
            work.cancel()
        await asyncio.gather(*works, *self._tasks, return_exceptions=True)

    def _now(self) -> float:
        return self._offset + time.monotonic()

    def _handle_event(self, event: e.ElasticEvent) -> None:
        """Pass an event to the machine and execute its instructions."""
        if self._closing and not isinstance(event, e.GroupClosed):
            return
        try:
            instructions = self._machine.handle(event, self._now())
        except Exception as fault:  # a bug here must not leave the caller waiting
            log.exception("the machine of group %s failed", self.spec.name)
            self._fail_group(fault)
            return
        for instruction in instructions:
            self._execute(instruction)

    def _execute(self, instruction: e.ElasticInstruction) -> None:
        if isinstance(instruction, e.StartMember):
            self._spawn(self._start(instruction))
        elif isinstance(instruction, e.StopMember):
            self._spawn(self._end(instruction.member, instruction.reason))
        elif isinstance(instruction, e.EnterWorld):
            self.world = None
            self._spawn(self._enter(instruction))
        elif isinstance(instruction, e.RunStep):
            self._spawn(self._run(instruction))
        elif isinstance(instruction, e.InterruptStep):
            if self._running is not None:
                self._running.interrupt(instruction.reason.sentence)
        elif isinstance(instruction, e.CheckHealth):
            self._spawn(self._check_health(instruction))
        elif isinstance(instruction, e.RequestUnits):
            bundles = [dict(self.spec.unit.floats())] * instruction.units
            self._spawn(self._request_resources(bundles))
        elif isinstance(instruction, e.WaitForMembers):
            self._wait(instruction)
        else:
            self._give_up(instruction.reason)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("group %s: %s", self.spec.name, fault, exc_info=fault)
            self._fail_group(fault)

    def _fail_group(self, fault: BaseException) -> None:
        """An unexpected fault: fail the pending step and all later ones."""
        self._gave_up = self._gave_up or Reason(ReasonCode.raised, f"{type(fault).__name__}: {fault}")
        self._fail(self._given_up())

    async def _tick(self) -> None:
        while True:
            due = self._machine.next_deadline()
            wait_s = TICK_S if due is None else min(TICK_S, max(0.01, due - self._now()))
            await asyncio.sleep(wait_s)
            self._handle_event(e.ElasticTick())

    # ---- nodes and tasks -----------------------------------------------------------------------------------------

    def _known_tasks(self) -> KnownTasks:
        self._changed.clear()
        return {id: client.seen for id, client in self._members.tasks.items()}

    async def _poll_controller(self, known: KnownTasks, version: int) -> ClientUpdate | None:
        """The next update; None if the set of clients has changed meanwhile."""
        from ray import exceptions

        call = self._members.session._controller._actor.news.remote(known, version, LONG_POLL_S)
        answer = asyncio.wrap_future(call.future())
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({answer, changed}, timeout=LONG_POLL_S + ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                update: ClientUpdate = value_of(answer.result())
                return update
            if changed.done():
                return None
            raise UnreachableError(f"the controller has not answered for {LONG_POLL_S + ANSWER_S:.0f} s")
        except exceptions.RayActorError:  # it restarts: a plain call finds it again
            again: ClientUpdate = await self._members.ask_controller("news", known, version, 0.0)
            return again
        finally:
            answer.cancel()
            changed.cancel()

    async def _on_update(self, update: ClientUpdate, nodes_changed: bool) -> None:
        if nodes_changed:  # nodes first: members lost with their node are not to be replaced there
            self._on_nodes(update.nodes, update.change)
        for seen in update.tasks:
            client = self._members.tasks.get(seen.id)
            if client is not None:
                self._on_task(client, seen)

    def _on_nodes(self, nodes: Sequence[NodeView], change: int) -> None:
        self._stats.start(node.node for node in nodes)
        nodes = [shown for node in nodes if (shown := _as_announced(node)) is not None]
        before, self._nodes = self._nodes, {node.node: node for node in nodes}
        for entry in self._stats.nodes(before, self._nodes, self._now(), self.spec.unit):
            self._log_event(entry)
        self._handle_event(e.NodesChanged(tuple(nodes), change))

    def _on_task(self, client: MemberClient, seen: TaskSnapshot) -> None:
        before, client.seen = client.seen, (seen.state, seen.attempt)
        if seen.state in IN_QUEUE:
            client.down(f"{client.member} was evicted: {seen.reason}")
            self._handle_event(e.MemberPending(client.member, seen.reason))
        elif seen.state is TaskState.running and (not client.there or seen.attempt != before[1]):
            self._spawn(self._started(client, seen))
        elif seen.state is TaskState.cancelling and seen.reason.code in LOSSES:
            self._lost(client, str(seen.reason))
        elif seen.state is TaskState.cancelling and not client.ending:
            self._handle_event(e.MemberPreempted(client.member, self._members.spec.notice_s, seen.reason))
        elif seen.state in ENDED:
            if not client.ending:
                self._lost(client, str(seen.reason), fatal=seen.reason.code is ReasonCode.start_failed)
            self._members.forget(client)
            self._handle_event(e.MemberLeft(client.member))
            self._stats.left(self._nodes.get(client.node), self._now())

    async def _started(self, client: MemberClient, seen: TaskSnapshot) -> None:
        handle = await self._members.handle_of(seen)
        if (
            handle is None
            or self._members.tasks.get(seen.id) is not client
            or client.seen != (seen.state, seen.attempt)
        ):
            return  # there is a later update by now
        if client.attempt:  # it ran before: the machine must forget where
            self._handle_event(e.MemberPending(client.member, seen.reason))
        node = seen.members[0].node
        client.up(handle, node, seen.attempt)
        sentence = f"{client.member} runs on node {node[:12]}"
        self._log_event(GroupLogEntry("started", sentence, client.member, node, task=client.task.id))
        self._handle_event(e.MemberStarted(client.member, node))

    def _lost(self, client: MemberClient, why: str, *, fatal: bool = False) -> None:
        """A member is lost unexpectedly; reported once."""
        if client.lost:
            return
        client.lost = True
        client.down(why)
        if not client.ending:
            self._log_event(GroupLogEntry("lost", f"{client.member} is lost: {why}", client.member, client.node))
            self._handle_event(e.MemberLost(client.member, why, fatal))

    # ---- members -------------------------------------------------------------------------------------------------

    async def _start(self, order: e.StartMember) -> None:
        try:
            await self._members.submit(order.member)
            self._changed.set()
        except TrimtabError as fault:
            self._handle_event(e.MemberLost(order.member, str(fault), fatal=not isinstance(fault, UnreachableError)))

    async def _end(self, member: str, reason: Reason) -> None:
        client = await self._members.client_of(member)
        if client is None:
            self._handle_event(e.MemberLeft(member))
            return
        client.ending = True
        if not client.lost:
            self._log_event(GroupLogEntry("left", f"{member} leaves: {reason.sentence}", member, client.node, reason))
        if client.there and reason.code not in FAULTS:
            await self._members.keep_last(client, self.steps)
            await self._members.release(client)
        await self._members.complete(client)

    def _discard(self, member: str, why: str) -> None:
        """A member cannot go on, but its process may be alive: it counts as lost, and is ended."""
        client = self._members.clients.pop(member, None)
        if client is not None:
            self._lost(client, why)
            client.ending = True
            self._spawn(self._members.complete(client))

    async def _check_health(self, check: e.CheckHealth) -> None:
        client = self._members.clients.get(check.member)
        if client is not None and client.there:
            with contextlib.suppress(TrimtabError):  # an unreachable controller says nothing about the member
                self._handle_event(e.HealthChecked(check.member, await self._members.health(client, check.timeout_s)))

    async def _request_resources(self, bundles: list[dict[str, float]]) -> None:
        with contextlib.suppress(TrimtabError):
            await self._members.ask_controller("want", self._client_id, bundles)

    # ---- worlds and steps ----------------------------------------------------------------------------------------

    async def _enter(self, order: e.EnterWorld) -> None:
        entry = WorldSetup(order, self._members.clients, self._methods, self.steps, self._members.kept, self._now)
        try:
            failed = await entry.run()
        except StateLostError:
            lost = f"every member that had the state of step {self.steps} is lost"
            hint = "keep_state=True keeps a copy in this process; min=2 survives the loss of one node"
            self._give_up(Reason(ReasonCode.process_died, f"{lost}; {hint}"))
            return
        if failed:
            self._handle_event(e.WorldFailed(order.world.epoch, tuple(failed), "; ".join(failed.values())))
            return
        self.world, self._wait_for = order.world, None
        sentence = f"world {order.world.epoch}: {order.world.size} members ({order.world.reason.sentence})"
        self._log_event(GroupLogEntry("world", sentence, reason=order.world.reason, size=order.world.size))
        self._handle_event(e.WorldEntered(order.world.epoch))
        self._spawn(self._publish())

    def _handle_size(self, size: int | None, done: concurrent.futures.Future[None]) -> None:
        try:
            for instruction in self._machine.handle(e.ResizeRequested(size), self._now()):
                self._execute(instruction)
            done.set_result(None)
        except InputError as fault:
            done.set_exception(fault)

    def _handle_step(self, request: _StepRequest) -> None:
        if self._gave_up is not None or self._closing:
            request.result.set_exception(self._given_up())
        elif self._request is not None:
            request.result.set_exception(GroupError("a step of this group is under way", hint="one step at a time"))
        else:
            self._request = request
            self._handle_event(e.StepBoundary(self.steps))

    async def _run(self, order: e.RunStep) -> None:
        request, world = self._request, self.world
        assert request is not None
        assert world is not None
        clients = [self._members.clients[member] for member in world.members if member in self._members.clients]
        if len(clients) < world.size:
            outcome = StepOutcome(False, "a member is gone")
        else:
            sentence = f"step {order.step} runs on {world.size} members"
            self._notify(GroupLogEntry("step", sentence, step=order.step, size=world.size))
            self._running = StepRun(order, clients, self._methods, self.spec.step_timeout_s, self._members.stop_waiting)
            outcome = await self._running.run(request.batch)
            self._running = None
        for client in clients:
            if not client.there and not client.lost:
                self._discard(client.member, "its process does not answer")
        if outcome.complete:
            await self._step_done(order, world, outcome, request)
        elif outcome.failure is not None:
            self._request = None
            for member, why in outcome.unfit.items():
                self._discard(member, f"it may have changed half of its state: {why}")
            self._handle_event(e.StepInterrupted(order.step, outcome.why))
            self._handle_event(e.StepBoundary(self.steps, wanted=False))
            torn = "; members whose commit raised are replaced" if outcome.unfit else ""
            failed = StepFailedError(f"step {order.step}: {outcome.why}", hint=f"the step does not count{torn}")
            failed.__cause__ = outcome.failure.fault
            request.result.set_exception(failed)
        else:
            request.redone += 1
            self._stats.redone += 1
            sentence = f"step {order.step} is done again: {outcome.why}"
            self._log_event(GroupLogEntry("redone", sentence, reason=Reason(ReasonCode.redone, outcome.why)))
            self._handle_event(e.StepInterrupted(order.step, outcome.why, outcome.hung))

    async def _step_done(self, order: e.RunStep, world: World, outcome: StepOutcome, request: _StepRequest) -> None:
        self.steps = order.step
        for member, why in outcome.unfit.items():
            self._discard(member, why)
        for member in outcome.hung:
            self._discard(member, "it did not commit in time")
        self._members.kept = None
        if self._members.spec.keep_state:
            await self._members.keep_any(self.steps)
        self._stats.stepped(world, self._now())
        changes, self._happened = tuple(self._happened), []
        self._request = None
        self._handle_event(e.StepDone(order.step))
        request.result.set_result(
            StepResult(
                number=order.step,
                world=world,
                values=outcome.values,
                compute_s=outcome.compute_s,
                commit_s=outcome.commit_s,
                seconds=outcome.seconds,
                waited_s=time.monotonic() - request.began - outcome.seconds,
                redone=request.redone,
                changes=changes,
            )
        )

    # ---- waiting, giving up, closing -----------------------------------------------------------------------------

    def _wait(self, wait: e.WaitForMembers) -> None:
        left_s = wait.deadline - self._now()
        self._loop.call_later(min(WARN_AFTER_S, left_s / 2), self._warn, wait)
        self._wait_for = wait
        self._spawn(self._members.keep_any(self.steps))

    def _warn(self, wait: e.WaitForMembers) -> None:
        """A start takes a moment and needs no warning; a longer wait does."""
        if self._wait_for is wait and not self._closing and self._gave_up is None:
            left_s = wait.deadline - self._now()
            self._log_event(
                GroupLogEntry("waits", f"{wait.reason.sentence}; gives up in {left_s:.0f} s", reason=wait.reason)
            )
            log.warning("group %s waits, %.0f s at most: %s", self.spec.name, left_s, wait.reason)

    def _give_up(self, reason: Reason) -> None:
        self._gave_up = reason
        self._log_event(GroupLogEntry("gave up", reason.sentence, reason=reason))
        self._fail(self._given_up())

    def _given_up(self) -> GroupError:
        if self._gave_up is None:
            return GroupError(f"group {self.spec.name} is closed")
        hint = f"`trimtab why {self.spec.name}` says more"
        return GroupGaveUpError(f"group {self.spec.name} gave up: {self._gave_up}", hint=hint)

    def _fail(self, fault: TrimtabError) -> None:
        if self._request is not None:
            request, self._request = self._request, None
            request.result.set_exception(fault)
        else:
            log.warning("%s", fault.what)

    def _close(self) -> None:
        self._handle_event(e.GroupClosed())
        self._closing = True
        if self._request is not None:
            self._request.result.cancel()
            self._request = None
        self._ended.set()

    async def _end_all(self) -> None:
        await self._members.end_all(CLOSE_S / 2)
        async with self._publishing:
            await self._members.ask_controller("publish", "group", self.spec.name, None, self._client_id)
        await self._request_resources([])

    # ---- reporting -----------------------------------------------------------------------------------------------

    def _log_event(self, entry: GroupLogEntry) -> None:
        entry = replace(entry, at=self._now(), step=self.steps)
        self._happened.append(entry)
        self._stats.record(entry)
        self._notify(entry)

    def _notify(self, entry: GroupLogEntry) -> None:
        """Call the listener only; not kept in the story."""
        try:
            self._listener(entry)
        except Exception:
            log.exception("the listener of group %s failed", self.spec.name)

    async def _publish_often(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:  # one at a time: the last publication is the end
            if not self._closing:
                facts = {**self._facts(), **self._stats.observed()}
                with contextlib.suppress(TrimtabError):
                    await self._members.ask_controller("publish", "group", self.spec.name, facts, self._client_id)

    def _facts(self) -> dict[str, Any]:
        seen = {**self._machine.view(), "redone": self._stats.redone}
        facts = self._stats.facts(seen, self.spec, self._members.pool.name, self._wait_for, self._gave_up, self._now())
        return {**facts, "background": [row for row in self._background.status() if row["failures"]]}


def _as_announced(view: NodeView) -> NodeView | None:
    """A node as of the last announced change: changes within one window change the world once."""
    if view.announced:
        return view
    return replace(view, state=NodeState.suspect, deadline=None) if view.state is NodeState.draining else None
