"""The collective operations of an elastic group: enter a world, and run a step.

Both execute an instruction of the machine over member clients and return the outcome; neither decides membership. A
step has two halves. In the first, every member computes a part and keeps nothing, so after a loss the whole step can be
redone. In the second, every member commits all parts; once one has, the step counts, and members that could not commit
get the state of one that has. Parts and states travel between members through the object store, never through this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field, replace
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.machines.elastic.events import EnterWorld, RunStep
from trimtab.model.nodes import World
from trimtab.runtime.elastic.member import MemberFacts, MemberMethods, MemberWorld, PartLostError, StepHalf
from trimtab.runtime.elastic.member_tasks import (
    KeptState,
    MemberClient,
    MemberError,
    MemberGoneError,
    MemberHungError,
    MemberRaisedError,
)

FOLLOW_S = 0.2  # after a loss in the second half, until the others stop waiting for its part
ANSWER_S = 30.0

ReleaseMember = Callable[[MemberClient], Awaitable[None]]


class StateLostError(Exception):
    """No member has the state of the group any more."""


# ---- entering a world ------------------------------------------------------------------------------------------------


class WorldSetup:
    """Enters one world."""

    def __init__(
        self,
        order: EnterWorld,
        clients: dict[str, MemberClient],
        member_methods: MemberMethods,
        steps: int,
        kept: KeptState | None,
        now: Callable[[], float],
    ) -> None:
        self._order = order
        self._clients = clients
        self._methods = member_methods
        self._steps = steps
        self._kept = kept
        self._now = now
        self._given: dict[str, asyncio.Task[Any]] = {}

    async def run(self) -> dict[str, str]:
        """Hand over states and have all members enter; returns members that failed, and why.

        StateLostError: no state is left.
        """
        failed: dict[str, str] = {}
        if self._methods.replicated:
            await self._replicate(failed)
        elif self._methods.merge:
            await self._hand_over(failed)
        world = self._order.world
        if not failed:
            entering = [self._enter(world, rank, failed) for rank in range(world.size)]
            await asyncio.gather(*entering)
        return failed

    async def _replicate(self, failed: dict[str, str]) -> None:
        """Every member of the world that lacks the current state gets it from one that has it."""
        world = self._order.world
        sources = dict(self._order.newcomers)
        behind = [
            member for member in world.members if member in sources or self._clients[member].committed != self._steps
        ]
        if not behind:
            return
        up_to_date = [member for member in world.members if member not in behind]
        successors = [] if up_to_date or self._order.leavers else await self._restored_members(behind)
        await asyncio.gather(
            *(
                self._bring_up_to_date(
                    member, [sources.get(member), *up_to_date, *self._order.leavers, *successors], failed
                )
                for member in behind
                if member not in successors
            )
        )

    async def _restored_members(self, behind: Sequence[str]) -> list[str]:
        """New members whose current state the pool has restored; at the start, the first."""
        if not self._steps:
            return list(behind[:1])  # any initial weights will do, but all members must begin with the same
        found = []
        for member in behind:
            with contextlib.suppress(MemberError):
                facts: MemberFacts = await self._clients[member].call("facts", within_s=self._left_s())
                if facts.committed == self._steps:
                    self._clients[member].committed = facts.committed
                    found.append(member)
        return found

    async def _bring_up_to_date(self, member: str, sources: Sequence[str | None], failed: dict[str, str]) -> None:
        client = self._clients[member]
        for source in dict.fromkeys(sources):
            if source is None or source == member or source not in self._clients or not self._clients[source].there:
                continue
            try:
                committed, state = await self._state_of(source)
            except MemberError:
                continue
            if committed == self._steps:
                await self._load_state(client, committed, state, failed)
                return
        if self._kept is not None:
            await self._load_state(client, self._kept.step, self._kept.state, failed)
        elif self._steps:
            raise StateLostError

    async def _state_of(self, source: str) -> Any:
        """The state of a member, requested once however many take it."""
        if source not in self._given:
            call = self._clients[source].call_with_refs("give", within_s=self._left_s(), returns=2)
            self._given[source] = asyncio.ensure_future(call)
        return await asyncio.shield(self._given[source])

    async def _load_state(self, client: MemberClient, committed: int, state: Any, failed: dict[str, str]) -> None:
        try:
            facts: MemberFacts = await client.call("take", committed, [state], within_s=self._left_s())
            client.committed = facts.committed
        except (MemberError, PartLostError) as fault:
            failed[client.member] = str(fault)

    async def _hand_over(self, failed: dict[str, str]) -> None:
        """Each member has its own state: a new one gets that of the member it replaces, the rest goes to rank 0."""
        successors = {source: member for member, source in self._order.newcomers if source in self._order.leavers}
        states = []
        for leaver in self._order.leavers:
            with contextlib.suppress(MemberError, KeyError):
                committed, state = await self._state_of(leaver)
                if leaver in successors:
                    await self._load_state(self._clients[successors[leaver]], committed, state, failed)
                else:
                    states.append(state)
        if states and self._order.world.members:
            first = self._clients[self._order.world.members[0]]
            try:
                await first.call("merge", states, within_s=self._left_s())
            except (MemberError, PartLostError) as fault:
                failed[first.member] = str(fault)

    async def _enter(self, world: World, rank: int, failed: dict[str, str]) -> None:
        client = self._clients[world.members[rank]]
        seen = MemberWorld(rank, world.size, world.epoch, self._steps, world.nodes)
        try:
            await client.call("enter", seen, within_s=self._left_s())
        except MemberError as fault:
            failed[client.member] = str(fault)

    def _left_s(self) -> float:
        return max(0.1, self._order.deadline - self._now())


# ---- running a step --------------------------------------------------------------------------------------------------


class StepOutcome(Frozen):
    """Outcome of one attempt at a step."""

    complete: bool  # the step counts
    why: str = ""  # if it does not
    hung: tuple[str, ...] = ()  # did not answer in time
    unfit: dict[str, str] = field(default_factory=dict)  # by member: why it could not commit a step that counts
    failure: MemberRaisedError | None = None  # user code raised; a retry would raise again
    values: tuple[Any, ...] = ()  # by rank
    compute_s: tuple[float, ...] = ()  # by rank
    commit_s: tuple[float, ...] = ()
    seconds: float = 0.0


class StepRun:
    """Runs one attempt at a step with one world."""

    def __init__(
        self,
        order: RunStep,
        clients: Sequence[MemberClient],
        member_methods: MemberMethods,
        timeout_s: float,
        stop_waiting: ReleaseMember,
    ) -> None:
        self._order = order
        self._clients = list(clients)  # by rank
        self._methods = member_methods
        self._timeout_s = timeout_s
        self._stop_waiting = stop_waiting
        self._interrupted: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def interrupt(self, why: str) -> None:
        """Abandon the step, unless its second half has begun."""
        if not self._interrupted.done():
            self._interrupted.set_result(why)

    async def run(self, batch: Any) -> StepOutcome:
        began = time.monotonic()
        parts: list[Any] = [None] * len(self._clients)
        halves: list[StepHalf | None] = [None] * len(self._clients)
        stopped = await self._compute(batch, parts, halves)
        if stopped is None:
            outcome = await (self._commit(parts) if self._methods.commit else self._fetch(parts))
        else:
            outcome = stopped
        computed = tuple(half.seconds if half else 0.0 for half in halves)
        return replace(outcome, compute_s=computed, seconds=time.monotonic() - began)

    async def _compute(self, batch: Any, parts: list[Any], halves: list[StepHalf | None]) -> StepOutcome | None:
        """The first half; returns what stopped it, if anything. It ends with the first member that is lost."""

        async def compute_rank(rank: int) -> None:
            client, order = self._clients[rank], self._order
            half, part = await client.call_with_refs(
                "compute", order.step, order.epoch, batch, within_s=self._timeout_s, returns=2
            )
            halves[rank], parts[rank] = half, part

        calls = [asyncio.ensure_future(compute_rank(rank)) for rank in range(len(self._clients))]
        gathered = asyncio.gather(*calls)
        try:
            both: set[asyncio.Future[Any]] = {gathered, self._interrupted}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not gathered.done():
                return StepOutcome(False, self._interrupted.result())
            gathered.result()
        except MemberHungError:
            await asyncio.wait(calls, timeout=FOLLOW_S)
            hung = tuple(client.member for client, half in zip(self._clients, halves, strict=True) if half is None)
            return StepOutcome(False, f"{', '.join(hung)} did not end it within {self._timeout_s:.3g} s", hung)
        except MemberGoneError as fault:
            return StepOutcome(False, str(fault))
        except MemberRaisedError as fault:
            return StepOutcome(False, str(fault), failure=fault)
        finally:
            gathered.cancel()
            await asyncio.gather(gathered, *calls, return_exceptions=True)
        return None

    async def _fetch(self, parts: Sequence[Any]) -> StepOutcome:
        """For a class without `commit`: its parts are the values."""
        try:
            waits = [asyncio.wrap_future(part.future()) for part in parts]
            values = await asyncio.wait_for(asyncio.gather(*waits), self._timeout_s)
        except Exception as fault:
            return StepOutcome(False, f"its values could not be fetched: {type(fault).__name__}")
        self._count(self._clients)
        return StepOutcome(True, values=tuple(values))

    async def _commit(self, parts: Sequence[Any]) -> StepOutcome:
        """The second half: the step counts once one member has committed."""
        order = self._order
        calls = [
            asyncio.ensure_future(client.call("commit", order.step, order.epoch, list(parts), within_s=self._timeout_s))
            for client in self._clients
        ]
        await self._wait_all(calls)
        halves: dict[str, StepHalf] = {}
        faults: dict[str, Exception] = {}
        for client, call in zip(self._clients, calls, strict=True):
            fault = call.exception()
            if fault is None:
                halves[client.member] = call.result()
            elif isinstance(fault, Exception):
                faults[client.member] = fault
        if not halves:
            return self._not_committed(faults)
        done = [client for client in self._clients if client.member in halves]
        self._count(done)
        unfit = await self._follow(done, faults)
        return StepOutcome(
            True,
            hung=tuple(member for member, fault in faults.items() if isinstance(fault, MemberHungError)),
            unfit=unfit,
            values=tuple(halves[client.member].value if client.member in halves else None for client in self._clients),
            commit_s=tuple(
                halves[client.member].seconds if client.member in halves else 0.0 for client in self._clients
            ),
        )

    async def _wait_all(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Wait for all calls. After a loss the others stop waiting for its part."""
        pending: set[asyncio.Future[Any]] = set(calls)
        released = False
        while pending:
            lost = any(call.done() and call.exception() is not None for call in calls)
            wait_s = FOLLOW_S if lost and not released else None
            done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and not released:
                released = True
                late = [client for client, call in zip(self._clients, calls, strict=True) if not call.done()]
                await asyncio.gather(*(self._stop_waiting(client) for client in late))

    def _not_committed(self, faults: dict[str, Exception]) -> StepOutcome:
        hung = tuple(member for member, fault in faults.items() if isinstance(fault, MemberHungError))
        raised = next((fault for fault in faults.values() if isinstance(fault, MemberRaisedError)), None)
        why = "; ".join(dict.fromkeys(str(fault) for fault in faults.values()))
        # A member that raised may have changed its state before: its state is unknown.
        unfit = {member: str(fault) for member, fault in faults.items() if isinstance(fault, MemberRaisedError)}
        return StepOutcome(False, why, hung, unfit=unfit, failure=raised)

    async def _follow(self, done: Sequence[MemberClient], faults: dict[str, Exception]) -> dict[str, str]:
        """Live members that could not commit get the state of one that has; those that cannot take it are unfit."""
        behind = [
            client
            for client in self._clients
            if isinstance(faults.get(client.member), (PartLostError, MemberRaisedError)) and client.there
        ]
        unfit = {client.member: str(faults[client.member]) for client in behind}
        for source in done if behind and self._methods.replicated else ():
            with contextlib.suppress(MemberError):
                committed, state = await source.call_with_refs("give", within_s=self._timeout_s, returns=2)
                for client in behind:
                    if isinstance(faults[client.member], PartLostError):
                        with contextlib.suppress(MemberError, PartLostError):
                            facts = await client.call("take", committed, [state], within_s=self._timeout_s)
                            client.committed = facts.committed
                            del unfit[client.member]
                break
        return unfit

    def _count(self, clients: Sequence[MemberClient]) -> None:
        for client in clients:
            client.committed = self._order.step
