"""The conductor of an elastic group: drives its machine with what happens, and carries out what the machine says.

A thread of its own with a loop, so that members may come, leave and be asked how they are also while the caller does
something else between two steps. It hears of nodes and tasks through one long call to the controller, calls members
over lines, and decides nothing: who is a member, when the world changes and when to give up is the machine's business.
Every wait has a deadline. The caller's thread only asks for steps and waits for their results.
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
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot, value_of
from trimtab.runtime.elastic.collectives import StateLostError, StepOutcome, StepRun, WorldSetup
from trimtab.runtime.elastic.member_client import MemberClient
from trimtab.runtime.elastic.member_tasks import ANSWER_S, MemberTasks
from trimtab.runtime.elastic.view import GroupLogEntry, GroupStats, StepResult
from trimtab.runtime.procs.background import Background, RestartPolicy

log = logging.getLogger("trimtab")

NEWS_S = 10.0  # one long call
SOON_S = 0.25  # after a call that failed
PUBLISH_EVERY_S = 1.0
WARN_AFTER_S = 3.0
TICK_S = 0.2  # at the latest
CLOSE_S = 30.0
AGAIN = RestartPolicy(max_failures=20, window_s=600.0, max_backoff_s=2.0)  # more than that, and the group gives up
FAULTS = (
    ReasonCode.hung,
    ReasonCode.unhealthy,
    ReasonCode.node_lost,
    ReasonCode.process_died,
)  # who leaves for these is not asked anything
LOSSES = (
    ReasonCode.node_lost,
    ReasonCode.slot_lost,
    ReasonCode.process_died,
    ReasonCode.gang_broken,
    ReasonCode.start_timeout,
    ReasonCode.restarts_used,
)


class GroupError(TrimtabError):
    """An elastic group cannot go on, or a step of it failed."""

    exit_status = 4


class GroupGaveUpError(GroupError):
    """The group has given up: it was too small for too long, or its members fail again and again."""


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
    """Conducts one group."""

    def __init__(self, spec: ElasticSpec, crew: MemberTasks, tell: Callable[[GroupLogEntry], None]) -> None:
        self.spec = spec
        self.steps = 0  # that are complete
        self.world: World | None = None  # that every member has entered; None while that changes
        self._crew = crew
        self._member_methods = crew.plan.member_methods
        self._client = crew.session.client
        self._tell = tell
        self._tally = GroupStats()
        self._machine = ElasticMachine(spec)
        self._offset = float(crew.session.status()["time"]) - time.monotonic()  # deadlines of nodes are by that clock
        self._request: _StepRequest | None = None
        self._running: StepRun | None = None
        self._gave_up: Reason | None = None
        self._waits: e.WaitForMembers | None = None
        self._nodes: dict[str, NodeView] = {}
        self._version = -1
        self._happened: list[GroupLogEntry] = []  # since the last step
        self._acts: set[asyncio.Task[None]] = set()
        self._background = Background(prefix=f"trimtab-group-{spec.name}")
        self._closing = False
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"trimtab-group-{spec.name}", daemon=True)

    # ---- from the caller's thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin: members are asked for as soon as nodes are known."""
        self._thread.start()
        self._up.wait(ANSWER_S)

    def request_step(self, batch: Any) -> concurrent.futures.Future[StepResult]:
        """A step that is run as soon as it can be."""
        result: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._ask_step, _StepRequest(batch, result))
        return result

    def request_size(self, size: int | None) -> None:
        """A person wants so many members."""
        asked: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._ask_size, size, asked)
        asked.result(ANSWER_S)

    def view(self) -> dict[str, Any]:
        """The group and its members, as plain data."""
        asked: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: asked.set_result(self._facts()))
        return asked.result(ANSWER_S)

    def close(self) -> None:
        """End every member and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._close)
            self._thread.join(CLOSE_S + 5.0)
        self._crew.close()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        asyncio.run(self._conduct())

    async def _conduct(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # the lines are others than before
        self._ended = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._up.set()
        works = [
            self._background.start(name, work, policy=AGAIN, on_failed=lambda _, fault: self._break(fault))
            for name, work in (("news", self._listen), ("tick", self._tick), ("publish", self._publish_often))
        ]
        await self._ended.wait()
        try:
            await asyncio.wait_for(self._end_all(), CLOSE_S)
        except (asyncio.TimeoutError, TrimtabError) as fault:
            log.warning("group %s did not end in order: %s", self.spec.name, fault or "it took too long")
        for work in (*works, *self._acts):
            work.cancel()
        await asyncio.gather(*works, *self._acts, return_exceptions=True)

    def _now(self) -> float:
        return self._offset + time.monotonic()

    def _feed(self, event: e.ElasticEvent) -> None:
        """Tell the machine, and do what it says."""
        if self._closing and not isinstance(event, e.GroupClosed):
            return
        try:
            instructions = self._machine.handle(event, self._now())
        except Exception as fault:  # a fault of ours must not leave the caller waiting
            log.exception("the machine of group %s failed", self.spec.name)
            self._break(fault)
            return
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: e.ElasticInstruction) -> None:
        if isinstance(instruction, e.StartMember):
            self._act(self._start(instruction))
        elif isinstance(instruction, e.StopMember):
            self._act(self._end(instruction.member, instruction.reason))
        elif isinstance(instruction, e.EnterWorld):
            self.world = None
            self._act(self._enter(instruction))
        elif isinstance(instruction, e.RunStep):
            self._act(self._run(instruction))
        elif isinstance(instruction, e.InterruptStep):
            if self._running is not None:
                self._running.interrupt(instruction.reason.sentence)
        elif isinstance(instruction, e.CheckHealth):
            self._act(self._ask_health(instruction))
        elif isinstance(instruction, e.RequestUnits):
            bundles = [dict(self.spec.unit.floats())] * instruction.units
            self._act(self._want(bundles))
        elif isinstance(instruction, e.WaitForMembers):
            self._wait(instruction)
        else:
            self._give_up(instruction.reason)

    def _act(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._acts.add(task)
        task.add_done_callback(self._acted)

    def _acted(self, task: asyncio.Task[None]) -> None:
        self._acts.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("group %s: %s", self.spec.name, fault, exc_info=fault)
            self._break(fault)

    def _break(self, fault: BaseException) -> None:
        """A fault of ours: whoever waits for this group, now or later, is to hear of it."""
        self._gave_up = self._gave_up or Reason(ReasonCode.raised, f"{type(fault).__name__}: {fault}")
        self._fail(self._given_up())

    async def _tick(self) -> None:
        while True:
            due = self._machine.next_deadline()
            wait_s = TICK_S if due is None else min(TICK_S, max(0.01, due - self._now()))
            await asyncio.sleep(wait_s)
            self._feed(e.ElasticTick())

    # ---- hearing of nodes and tasks ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            self._changed.clear()
            known = {id: line.seen for id, line in self._crew.tasks.items()}
            try:
                news = await self._news(known)
            except Exception as fault:  # whatever it is: a group that hears nothing more would wait for ever
                log.warning("group %s hears nothing: %s", self.spec.name, fault)
                await asyncio.sleep(SOON_S)
                continue
            if news is not None:
                self._hear(news)

    async def _news(self, known: dict[str, tuple[TaskState, int]]) -> ClientUpdate | None:
        """What is new; None where the question is another one by now."""
        from ray import exceptions

        call = self._crew.session._controller._actor.news.remote(known, self._version, NEWS_S)
        answer = asyncio.wrap_future(call.future())
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({answer, changed}, timeout=NEWS_S + ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                news: ClientUpdate = value_of(answer.result())
                return news
            if changed.done():
                return None
            raise UnreachableError(f"the controller has said nothing for {NEWS_S + ANSWER_S:.0f} s")
        except exceptions.RayActorError:  # it restarts: a plain question finds it again
            again: ClientUpdate = await self._crew.asked("news", known, self._version, 0.0)
            return again
        finally:
            answer.cancel()
            changed.cancel()

    def _hear(self, news: ClientUpdate) -> None:
        if news.version != self._version:  # first: what went with its node is not to be replaced there
            self._version = news.version
            self._hear_nodes(news.nodes, news.change)
        for seen in news.tasks:
            line = self._crew.tasks.get(seen.id)
            if line is not None:
                self._hear_task(line, seen)

    def _hear_nodes(self, nodes: Sequence[NodeView], change: int) -> None:
        self._tally.start(node.node for node in nodes)
        nodes = [shown for node in nodes if (shown := _as_told(node)) is not None]
        before, self._nodes = self._nodes, {node.node: node for node in nodes}
        for entry in self._tally.nodes(before, self._nodes, self._now(), self.spec.unit):
            self._say(entry)
        self._feed(e.NodesChanged(tuple(nodes), change))

    def _hear_task(self, line: MemberClient, seen: TaskSnapshot) -> None:
        before, line.seen = line.seen, (seen.state, seen.attempt)
        if seen.state in IN_QUEUE:
            line.down(f"{line.member} was evicted: {seen.reason}")
            self._feed(e.MemberPending(line.member, seen.reason))
        elif seen.state is TaskState.running and (not line.there or seen.attempt != before[1]):
            self._act(self._started(line, seen))
        elif seen.state is TaskState.cancelling and seen.reason.code in LOSSES:
            self._lost(line, str(seen.reason))
        elif seen.state is TaskState.cancelling and not line.ending:
            self._feed(e.MemberPreempted(line.member, self._crew.plan.notice_s, seen.reason))
        elif seen.state in ENDED:
            if not line.ending:
                self._lost(line, str(seen.reason), fatal=seen.reason.code is ReasonCode.start_failed)
            self._crew.forget(line)
            self._feed(e.MemberLeft(line.member))
            self._tally.left(self._nodes.get(line.node), self._now())

    async def _started(self, line: MemberClient, seen: TaskSnapshot) -> None:
        handle = await self._crew.handle_of(seen)
        if handle is None or self._crew.tasks.get(seen.id) is not line or line.seen != (seen.state, seen.attempt):
            return  # there is other news of it by now
        if line.attempt:  # it ran before: the machine is to forget where
            self._feed(e.MemberPending(line.member, seen.reason))
        node = seen.members[0].node
        line.up(handle, node, seen.attempt)
        said = f"{line.member} runs on node {node[:12]}"
        self._say(GroupLogEntry("started", said, line.member, node, task=line.task.id))
        self._feed(e.MemberStarted(line.member, node))

    def _lost(self, line: MemberClient, why: str, *, fatal: bool = False) -> None:
        """A member is gone, unasked; told once."""
        if line.lost:
            return
        line.lost = True
        line.down(why)
        if not line.ending:
            self._say(GroupLogEntry("lost", f"{line.member} is lost: {why}", line.member, line.node))
            self._feed(e.MemberLost(line.member, why, fatal))

    # ---- members -------------------------------------------------------------------------------------------------

    async def _start(self, order: e.StartMember) -> None:
        try:
            await self._crew.submit(order.member)
            self._changed.set()
        except TrimtabError as fault:
            self._feed(e.MemberLost(order.member, str(fault), fatal=not isinstance(fault, UnreachableError)))

    async def _end(self, member: str, reason: Reason) -> None:
        line = await self._crew.line_of(member)
        if line is None:
            self._feed(e.MemberLeft(member))
            return
        line.ending = True
        if not line.lost:
            self._say(GroupLogEntry("left", f"{member} leaves: {reason.sentence}", member, line.node, reason))
        if line.there and reason.code not in FAULTS:
            await self._crew.keep_last(line, self.steps)
            await self._crew.release(line)
        await self._crew.complete(line)

    def _discard(self, member: str, why: str) -> None:
        """A member cannot go on, but its process may live: it counts as lost, and is ended."""
        line = self._crew.lines.pop(member, None)
        if line is not None:
            self._lost(line, why)
            line.ending = True
            self._act(self._crew.complete(line))

    async def _ask_health(self, check: e.CheckHealth) -> None:
        line = self._crew.lines.get(check.member)
        if line is not None and line.there:
            with contextlib.suppress(TrimtabError):  # no controller to ask says nothing about the member
                self._feed(e.HealthChecked(check.member, await self._crew.health(line, check.timeout_s)))

    async def _want(self, bundles: list[dict[str, float]]) -> None:
        with contextlib.suppress(TrimtabError):
            await self._crew.asked("want", self._client, bundles)

    # ---- worlds and steps ----------------------------------------------------------------------------------------

    async def _enter(self, order: e.EnterWorld) -> None:
        entry = WorldSetup(order, self._crew.lines, self._member_methods, self.steps, self._crew.kept, self._now)
        try:
            entered = await entry.run()
        except StateLostError:
            lost = f"every member that had the state of step {self.steps} is lost"
            hint = "keep_state=True keeps a copy in this process; min=2 survives the loss of one node"
            self._give_up(Reason(ReasonCode.process_died, f"{lost}; {hint}"))
            return
        if entered.failed:
            why = "; ".join(entered.failed.values())
            self._feed(e.WorldFailed(order.world.epoch, tuple(entered.failed), why))
            return
        self.world, self._waits = order.world, None
        said = f"world {order.world.epoch}: {order.world.size} members ({order.world.reason.sentence})"
        self._say(GroupLogEntry("world", said, reason=order.world.reason, size=order.world.size))
        self._feed(e.WorldEntered(order.world.epoch))
        self._act(self._publish())

    def _ask_size(self, size: int | None, asked: concurrent.futures.Future[None]) -> None:
        try:
            for instruction in self._machine.handle(e.ResizeRequested(size), self._now()):
                self._carry_out(instruction)
            asked.set_result(None)
        except InputError as fault:
            asked.set_exception(fault)

    def _ask_step(self, request: _StepRequest) -> None:
        if self._gave_up is not None or self._closing:
            request.result.set_exception(self._given_up())
        elif self._request is not None:
            request.result.set_exception(GroupError("a step of this group is under way", hint="one step at a time"))
        else:
            self._request = request
            self._feed(e.StepBoundary(self.steps))

    async def _run(self, order: e.RunStep) -> None:
        request, world = self._request, self.world
        assert request is not None
        assert world is not None
        lines = [self._crew.lines[member] for member in world.members if member in self._crew.lines]
        if len(lines) < world.size:
            outcome = StepOutcome(False, "a member is gone")
        else:
            said = f"step {order.step} runs on {world.size} members"
            self._whisper(GroupLogEntry("step", said, step=order.step, size=world.size))
            self._running = StepRun(order, lines, self._member_methods, self.spec.step_timeout_s, self._crew.let_go)
            outcome = await self._running.run(request.batch)
            self._running = None
        for line in lines:
            if not line.there and not line.lost:
                self._discard(line.member, "its process does not answer any more")
        if outcome.complete:
            await self._step_done(order, world, outcome, request)
        elif outcome.failure is not None:
            self._request = None
            for member, why in outcome.unfit.items():
                self._discard(member, f"it may have changed half of its state: {why}")
            self._feed(e.StepInterrupted(order.step, outcome.why))
            self._feed(e.StepBoundary(self.steps, wanted=False))
            torn = "; members whose commit raised are replaced" if outcome.unfit else ""
            failed = StepFailedError(f"step {order.step}: {outcome.why}", hint=f"the step does not count{torn}")
            failed.__cause__ = outcome.failure.fault
            request.result.set_exception(failed)
        else:
            request.redone += 1
            self._tally.redone += 1
            said = f"step {order.step} is done again: {outcome.why}"
            self._say(GroupLogEntry("redone", said, reason=Reason(ReasonCode.redone, outcome.why)))
            self._feed(e.StepInterrupted(order.step, outcome.why, outcome.hung))

    async def _step_done(self, order: e.RunStep, world: World, outcome: StepOutcome, request: _StepRequest) -> None:
        self.steps = order.step
        for member, why in outcome.unfit.items():
            self._discard(member, why)
        for member in outcome.hung:
            self._discard(member, "it did not commit in time")
        self._crew.kept = None
        if self._crew.plan.keeps:
            await self._crew.keep_any(self.steps)
        self._tally.stepped(world, self._now())
        changes, self._happened = tuple(self._happened), []
        self._request = None
        self._feed(e.StepDone(order.step))
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

    # ---- waiting, giving up, the end -----------------------------------------------------------------------------

    def _wait(self, wait: e.WaitForMembers) -> None:
        left_s = wait.deadline - self._now()
        self._loop.call_later(min(WARN_AFTER_S, left_s / 2), self._warn, wait)
        self._waits = wait
        self._act(self._crew.keep_any(self.steps))

    def _warn(self, wait: e.WaitForMembers) -> None:
        """A start takes a moment, and is nothing to warn of; a wait is."""
        if self._waits is wait and not self._closing and self._gave_up is None:
            left_s = wait.deadline - self._now()
            self._say(GroupLogEntry("waits", f"{wait.reason.sentence}; gives up in {left_s:.0f} s", reason=wait.reason))
            log.warning("group %s waits, %.0f s at most: %s", self.spec.name, left_s, wait.reason)

    def _give_up(self, reason: Reason) -> None:
        self._gave_up = reason
        self._say(GroupLogEntry("gave up", reason.sentence, reason=reason))
        self._fail(self._given_up())

    def _given_up(self) -> GroupError:
        if self._gave_up is None:
            return GroupError(f"group {self.spec.name} is closed")
        hint = f"`trimtab explain {self.spec.name}` says more"
        return GroupGaveUpError(f"group {self.spec.name} gave up: {self._gave_up}", hint=hint)

    def _fail(self, fault: TrimtabError) -> None:
        if self._request is not None:
            request, self._request = self._request, None
            request.result.set_exception(fault)
        else:
            log.warning("%s", fault.what)

    def _close(self) -> None:
        self._feed(e.GroupClosed())
        self._closing = True
        self._fail_silently()
        self._ended.set()

    def _fail_silently(self) -> None:
        if self._request is not None:
            self._request.result.cancel()
            self._request = None

    async def _end_all(self) -> None:
        await self._crew.end_all(CLOSE_S / 2)
        async with self._publishing:
            await self._crew.asked("publish", "group", self.spec.name, None, self._client)
        await self._want([])

    # ---- telling others ------------------------------------------------------------------------------------------

    def _say(self, happening: GroupLogEntry) -> None:
        happening = replace(happening, at=self._now(), step=self.steps)
        self._happened.append(happening)
        self._tally.happened(happening)
        self._whisper(happening)

    def _whisper(self, happening: GroupLogEntry) -> None:
        """Only to who listens: nothing to be remembered."""
        try:
            self._tell(happening)
        except Exception:
            log.exception("what listens to group %s failed", self.spec.name)

    async def _publish_often(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:  # one at a time: the last word is that it ended
            if not self._closing:
                facts = {**self._facts(), **self._tally.observed()}
                with contextlib.suppress(TrimtabError):
                    await self._crew.asked("publish", "group", self.spec.name, facts, self._client)

    def _facts(self) -> dict[str, Any]:
        seen = {**self._machine.view(), "redone": self._tally.redone}
        facts = self._tally.facts(seen, self.spec, self._crew.pool.name, self._waits, self._gave_up, self._now())
        return {**facts, "background": [row for row in self._background.status() if row["failures"]]}


def _as_told(view: NodeView) -> NodeView | None:
    """A node as the last change told it: what comes and goes within one window changes the world once."""
    if view.told:
        return view
    return replace(view, state=NodeState.suspect, deadline=None) if view.state is NodeState.draining else None
