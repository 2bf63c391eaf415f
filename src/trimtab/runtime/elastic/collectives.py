"""The two things that an elastic group does with all its members at once: enter a world, and run a step.

Both are carried out for the machine, over lines to members, and say what came of it; neither decides who is a member.
A step has two halves. In the first every member computes a part and keeps nothing, so a loss leaves the step undone and
it can be done again, whole. In the second every member commits all parts; once one has, the step counts: who could not
follow gets the state of one that has. Parts and states travel from member to member, never through this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.machines.elastic.events import EnterWorld, RunStep
from trimtab.model.nodes import World
from trimtab.runtime.elastic.member import MemberFacts, MemberMethods, MemberWorld, PartLostError, StepHalf
from trimtab.runtime.elastic.member_client import MemberClient, MemberGoneError, MemberHungError, MemberRaisedError

FOLLOW_S = 0.2  # after a loss in the second half, until the others are told to wait no longer for its part
ANSWER_S = 30.0

ReleaseMember = Callable[[MemberClient], Awaitable[None]]


@dataclass(frozen=True)
class KeptState:
    """A state that this process keeps, since nobody else could: the step it includes, and a reference to it."""

    step: int
    state: Any


class StateLostError(Exception):
    """Nobody has the state of the group any more."""


# ---- entering a world ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldSetupResult:
    """What came of entering a world. `failed`: members by name that did not answer, and why."""

    failed: dict[str, str] = field(default_factory=dict)


class WorldSetup:
    """Enters one world."""

    def __init__(
        self,
        order: EnterWorld,
        lines: dict[str, MemberClient],
        member_methods: MemberMethods,
        steps: int,
        kept: KeptState | None,
        now: Callable[[], float],
    ) -> None:
        self._order = order
        self._lines = lines
        self._member_methods = member_methods
        self._steps = steps
        self._kept = kept
        self._now = now
        self._given: dict[str, asyncio.Task[Any]] = {}

    async def run(self) -> WorldSetupResult:
        """Leavers hand over, newcomers take over, all learn of the world. StateLostError: there is nothing to take."""
        failed: dict[str, str] = {}
        if self._member_methods.replicated:
            await self._replicate(failed)
        elif self._member_methods.merge:
            await self._hand_over(failed)
        world = self._order.world
        if not failed:
            told = [self._tell(world, rank, failed) for rank in range(world.size)]
            await asyncio.gather(*told)
        return WorldSetupResult(failed)

    async def _replicate(self, failed: dict[str, str]) -> None:
        """Every member of the world that lacks the current state gets it from one that has it."""
        world = self._order.world
        sources = dict(self._order.newcomers)
        behind = [member for member in world.members if member in sources or self._lines[member].committed != self._steps]
        if not behind:
            return
        mates = [member for member in world.members if member not in behind]
        heirs = [] if mates or self._order.leavers else await self._came_back(behind)
        await asyncio.gather(
            *(
                self._bring(member, [sources.get(member), *mates, *self._order.leavers, *heirs], failed)
                for member in behind
                if member not in heirs
            )
        )

    async def _came_back(self, behind: Sequence[str]) -> list[str]:
        """Newcomers that the pool has given their state back, which is the current one; at the start, the first."""
        if not self._steps:
            return list(behind[:1])  # its weights are as good as anybody's, and all are to begin with the same
        found = []
        for member in behind:
            with contextlib.suppress(MemberGoneError, MemberHungError, MemberRaisedError):
                facts: MemberFacts = await self._lines[member].call("facts", within_s=self._left_s())
                if facts.committed == self._steps:
                    self._lines[member].committed = facts.committed
                    found.append(member)
        return found

    async def _bring(self, member: str, sources: Sequence[str | None], failed: dict[str, str]) -> None:
        line = self._lines[member]
        for source in dict.fromkeys(sources):
            if source is None or source == member or source not in self._lines or not self._lines[source].there:
                continue
            try:
                committed, state = await self._give(source)
            except (MemberGoneError, MemberHungError, MemberRaisedError):
                continue
            if committed == self._steps:
                await self._take(line, committed, state, failed)
                return
        if self._kept is not None:
            await self._take(line, self._kept.step, self._kept.state, failed)
        elif self._steps:
            raise StateLostError

    async def _give(self, source: str) -> Any:
        """The state of a member, asked once however many take it."""
        if source not in self._given:
            call = self._lines[source].call_with_refs("give", within_s=self._left_s(), returns=2)
            self._given[source] = asyncio.ensure_future(call)
        return await asyncio.shield(self._given[source])

    async def _take(self, line: MemberClient, committed: int, state: Any, failed: dict[str, str]) -> None:
        try:
            facts: MemberFacts = await line.call("take", committed, [state], within_s=self._left_s())
            line.committed = facts.committed
        except (MemberGoneError, MemberHungError, MemberRaisedError, PartLostError) as fault:
            failed[line.member] = str(fault)

    async def _hand_over(self, failed: dict[str, str]) -> None:
        """Each member has a state of its own: a newcomer gets that of whom it replaces, what is left goes to rank 0."""
        heirs = {source: member for member, source in self._order.newcomers if source in self._order.leavers}
        states = []
        for leaver in self._order.leavers:
            with contextlib.suppress(MemberGoneError, MemberHungError, MemberRaisedError, KeyError):
                committed, state = await self._give(leaver)
                if leaver in heirs:
                    await self._take(self._lines[heirs[leaver]], committed, state, failed)
                else:
                    states.append(state)
        if states and self._order.world.members:
            first = self._lines[self._order.world.members[0]]
            try:
                await first.call("merge", states, within_s=self._left_s())
            except (MemberGoneError, MemberHungError, MemberRaisedError, PartLostError) as fault:
                failed[first.member] = str(fault)

    async def _tell(self, world: World, rank: int, failed: dict[str, str]) -> None:
        line = self._lines[world.members[rank]]
        seen = MemberWorld(rank, world.size, world.epoch, self._steps, world.nodes)
        try:
            await line.call("enter", seen, within_s=self._left_s())
        except (MemberGoneError, MemberHungError, MemberRaisedError) as fault:
            failed[line.member] = str(fault)

    def _left_s(self) -> float:
        return max(0.1, self._order.deadline - self._now())


# ---- running a step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepOutcome:
    """What came of one attempt at a step."""

    complete: bool  # it counts
    why: str = ""  # where it does not
    hung: tuple[str, ...] = ()  # did not answer in time
    unfit: dict[str, str] = field(default_factory=dict)  # by member: could not follow a step that counts, and why
    failure: MemberRaisedError | None = None  # the user's code raised; done again, it would raise again
    values: tuple[Any, ...] = ()  # by rank
    compute_s: tuple[float, ...] = ()  # by rank
    commit_s: tuple[float, ...] = ()
    seconds: float = 0.0


class StepRun:
    """Runs one attempt at a step with one world."""

    def __init__(
        self,
        order: RunStep,
        lines: Sequence[MemberClient],
        member_methods: MemberMethods,
        timeout_s: float,
        let_go: ReleaseMember,
    ) -> None:
        self._order = order
        self._lines = list(lines)  # by rank
        self._member_methods = member_methods
        self._timeout_s = timeout_s
        self._let_go = let_go
        self._interrupted: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def interrupt(self, why: str) -> None:
        """Give it up, unless the second half has begun."""
        if not self._interrupted.done():
            self._interrupted.set_result(why)

    async def run(self, batch: Any) -> StepOutcome:
        """Both halves."""
        began = time.monotonic()
        parts: list[Any] = [None] * len(self._lines)
        halves: list[StepHalf | None] = [None] * len(self._lines)
        stopped = await self._compute(batch, parts, halves)
        if stopped is None:
            outcome = await (self._commit(parts) if self._member_methods.commit else self._fetch(parts))
        else:
            outcome = stopped
        computed = tuple(half.seconds if half else 0.0 for half in halves)
        return replace(outcome, compute_s=computed, seconds=time.monotonic() - began)

    async def _compute(self, batch: Any, parts: list[Any], halves: list[StepHalf | None]) -> StepOutcome | None:
        """The first half; what stopped it, if anything did. It is given up with the first that is lost."""

        async def compute_rank(rank: int) -> None:
            line, order = self._lines[rank], self._order
            half, part = await line.call_with_refs(
                "compute", order.step, order.epoch, batch, within_s=self._timeout_s, returns=2
            )
            halves[rank], parts[rank] = half, part

        calls = [asyncio.ensure_future(compute_rank(rank)) for rank in range(len(self._lines))]
        everyone = asyncio.gather(*calls)
        try:
            both: set[asyncio.Future[Any]] = {everyone, self._interrupted}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not everyone.done():
                return StepOutcome(False, self._interrupted.result())
            everyone.result()
        except MemberHungError:
            await asyncio.wait(calls, timeout=FOLLOW_S)
            hung = tuple(line.member for line, half in zip(self._lines, halves, strict=True) if half is None)
            return StepOutcome(False, f"{', '.join(hung)} did not end it within {self._timeout_s:.3g} s", hung)
        except MemberGoneError as fault:
            return StepOutcome(False, str(fault))
        except MemberRaisedError as fault:
            return StepOutcome(False, str(fault), failure=fault)
        finally:
            everyone.cancel()
            await asyncio.gather(everyone, *calls, return_exceptions=True)
        return None

    async def _fetch(self, parts: Sequence[Any]) -> StepOutcome:
        """A class without a second half: its parts are the values."""
        try:
            waits = [asyncio.wrap_future(part.future()) for part in parts]
            values = await asyncio.wait_for(asyncio.gather(*waits), self._timeout_s)
        except Exception as fault:
            return StepOutcome(False, f"its values could not be had: {type(fault).__name__}")
        self._count(self._lines)
        return StepOutcome(True, values=tuple(values))

    async def _commit(self, parts: Sequence[Any]) -> StepOutcome:
        """The second half: what one has committed counts, and the others follow."""
        order = self._order
        calls = [
            asyncio.ensure_future(line.call("commit", order.step, order.epoch, list(parts), within_s=self._timeout_s))
            for line in self._lines
        ]
        await self._all_end(calls)
        halves: dict[str, StepHalf] = {}
        faults: dict[str, Exception] = {}
        for line, call in zip(self._lines, calls, strict=True):
            fault = call.exception()
            if fault is None:
                halves[line.member] = call.result()
            elif isinstance(fault, Exception):
                faults[line.member] = fault
        if not halves:
            return self._nobody_committed(faults)
        done = [line for line in self._lines if line.member in halves]
        self._count(done)
        unfit = await self._follow(done, faults)
        return StepOutcome(
            True,
            hung=tuple(member for member, fault in faults.items() if isinstance(fault, MemberHungError)),
            unfit=unfit,
            values=tuple(halves[line.member].value if line.member in halves else None for line in self._lines),
            commit_s=tuple(halves[line.member].seconds if line.member in halves else 0.0 for line in self._lines),
        )

    async def _all_end(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """All calls are over. After a loss the others are not left to wait for a part that will not come."""
        pending: set[asyncio.Future[Any]] = set(calls)
        told = False
        while pending:
            lost = any(call.done() and call.exception() is not None for call in calls)
            wait_s = FOLLOW_S if lost and not told else None
            done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and not told:
                told = True
                late = [line for line, call in zip(self._lines, calls, strict=True) if not call.done()]
                await asyncio.gather(*(self._let_go(line) for line in late))

    def _nobody_committed(self, faults: dict[str, Exception]) -> StepOutcome:
        hung = tuple(member for member, fault in faults.items() if isinstance(fault, MemberHungError))
        raised = next((fault for fault in faults.values() if isinstance(fault, MemberRaisedError)), None)
        why = "; ".join(dict.fromkeys(str(fault) for fault in faults.values()))
        # Whoever raised may have changed something before: what its state is, nobody knows.
        unfit = {member: str(fault) for member, fault in faults.items() if isinstance(fault, MemberRaisedError)}
        return StepOutcome(False, why, hung, unfit=unfit, failure=raised)

    async def _follow(self, done: Sequence[MemberClient], faults: dict[str, Exception]) -> dict[str, str]:
        """Those who live and could not commit get the state of one that has; who cannot is unfit."""
        behind = [
            line
            for line in self._lines
            if isinstance(faults.get(line.member), (PartLostError, MemberRaisedError)) and line.there
        ]
        unfit = {line.member: str(faults[line.member]) for line in behind}
        for source in done if behind and self._member_methods.replicated else ():
            with contextlib.suppress(MemberGoneError, MemberHungError, MemberRaisedError):
                committed, state = await source.call_with_refs("give", within_s=self._timeout_s, returns=2)
                for line in behind:
                    if isinstance(faults[line.member], PartLostError):
                        with contextlib.suppress(MemberGoneError, MemberHungError, MemberRaisedError, PartLostError):
                            facts = await line.call("take", committed, [state], within_s=self._timeout_s)
                            line.committed = facts.committed
                            del unfit[line.member]
                break
        return unfit

    def _count(self, lines: Sequence[MemberClient]) -> None:
        for line in lines:
            line.committed = self._order.step
