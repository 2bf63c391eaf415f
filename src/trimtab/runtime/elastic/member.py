"""What runs in a member's process of an elastic group: the user's object, in a shell that counts steps.

The group calls the shell, the shell calls the user. It never commits a step twice, never commits one that belongs to
another world, never shows a state that is half changed, and never waits for a part of somebody who is gone longer than
it is let. Calls of a step come through Ray, on the main thread; what cannot wait behind a step (health, letting go,
leaving) comes through the control door, on threads of its own: the methods that begin with `beside_`, and `drain`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.errors import InputError, nearest

PULL_S = 0.1  # between looks at whether a part is still worth waiting for


@dataclass(frozen=True)
class MemberWorld:
    """The world as one member sees it: what `enter(world)` is told."""

    rank: int
    size: int
    epoch: int  # 1, 2, 3 ...: another number, another world
    step: int  # how many steps are complete
    nodes: tuple[str, ...] = ()  # by rank

    def share(self, count: int) -> slice:
        """This member's part of so many rows: contiguous, as even as can be, all ranks together exactly all rows."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)


@dataclass(frozen=True)
class MemberMethods:
    """Which of the methods that a member may have a class has."""

    compute: str  # its name: `compute`, or `step` of a class that has nothing else
    commit: bool
    enter: bool
    state: bool  # save and load
    merge: bool
    health: bool

    @property
    def replicated(self) -> bool:
        """Whether all members have the same state: a class that can merge states has one of its own in each."""
        return self.state and not self.merge


@dataclass(frozen=True)
class MemberFacts:
    """What a member says of itself."""

    pid: int
    committed: int  # the last step that its state includes


@dataclass(frozen=True)
class StepHalf:
    """One half of a step, as a member did it."""

    seconds: float
    value: Any = None  # what the user's commit returned


class WorldMismatchError(RuntimeError):
    """The call belongs to another world, or to another step, than this member is in."""


class PartLostError(RuntimeError):
    """A part of the step is not to be had any more: whoever made it is gone."""


def find_member_methods(kind: type) -> MemberMethods:
    """What the class can do; InputError where it cannot be a member."""

    def has(name: str) -> bool:
        return callable(getattr(kind, name, None))

    compute = "compute" if has("compute") else "step" if has("step") else None
    where = f"class {kind.__name__}"
    if compute is None:
        near = nearest("compute", [name for name in dir(kind) if not name.startswith("_")])
        hint = "compute(step, batch) returns a part, commit(step, parts) applies all of them"
        raise InputError(
            "a member of an elastic group has a method compute (or step)",
            where=where,
            hint=f"did you mean {near}? {hint}" if near else hint,
        )
    if has("save") != has("load"):
        lacking = "load" if has("save") else "save"
        raise InputError(f"it has no {lacking}()", where=where, hint="save() gives the state that load(state) takes")
    if has("merge") and not has("save"):
        raise InputError("it has merge(), but no save()", where=where, hint="merge(states) takes what save() gives")
    if compute == "step" and has("commit"):
        raise InputError("it has commit, but no compute", where=where, hint="rename step to compute")
    return MemberMethods(compute, has("commit"), has("enter"), has("save"), has("merge"), has("health"))


class MemberWrapper:
    """The user's object as the group calls it."""

    def __init__(self, kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._member_methods = find_member_methods(kind)
        self._object = kind(*args, **kwargs)
        self._world: MemberWorld | None = None
        self._committed = 0
        self._last: StepHalf | None = None  # of the last commit, for whoever asks again
        self._whole = threading.Lock()  # held while the state changes
        self._let_go = threading.Event()  # parts that do not come are not waited for
        self._may_leave = threading.Event()

    # ---- what the group calls, one after another -----------------------------------------------------------------

    def facts(self) -> MemberFacts:
        """Who this is, and how far it is."""
        return MemberFacts(os.getpid(), self._committed)

    def enter(self, world: MemberWorld) -> MemberFacts:
        """From now on, this is the world; the group has seen to it that the state is the current one."""
        self._world, self._committed = world, world.step
        if self._member_methods.enter:
            self._settled(self._object.enter(world))
        return self.facts()

    def compute(self, step: int, epoch: int, batch: Any) -> tuple[StepHalf, Any]:
        """The first half: this member's part, which others will read. Changes nothing that is kept."""
        self._expect(epoch)
        self._let_go.clear()
        began = time.perf_counter()
        part = self._settled(getattr(self._object, self._member_methods.compute)(step, batch))
        if not self._member_methods.commit:
            self._committed = step
        return StepHalf(time.perf_counter() - began), part

    def commit(self, step: int, epoch: int, parts: Sequence[Any]) -> StepHalf:
        """The second half: apply all parts (references, by rank), once; asked again, it says what it said."""
        if step == self._committed and self._last is not None:
            return self._last
        self._expect(epoch)
        if step != self._committed + 1:
            raise WorldMismatchError(f"step {step} was to be committed after step {self._committed}")
        pulled = self._pulled(parts)
        began = time.perf_counter()
        with self._whole:
            value = self._settled(self._object.commit(step, pulled))
            self._committed = step
        self._last = StepHalf(time.perf_counter() - began, value)
        return self._last

    def give(self) -> tuple[int, Any]:
        """The state, and the step it includes: for a newcomer, or to be kept."""
        with self._whole:
            return self._committed, self._settled(self._object.save())

    def take(self, committed: int, state: Sequence[Any]) -> MemberFacts:
        """Go on from a state (a reference to it)."""
        self._let_go.clear()
        pulled = self._pulled(state)
        with self._whole:
            if self._member_methods.state:
                self._settled(self._object.load(pulled[0]))
            self._committed, self._last = committed, None
        return self.facts()

    def merge(self, states: Sequence[Any]) -> None:
        """Take over what members leave behind who have no successor."""
        self._let_go.clear()
        pulled = self._pulled(states)
        with self._whole:
            self._settled(self._object.merge(pulled))

    # ---- what comes through the control door, beside a step ------------------------------------------------------

    def beside_health(self) -> None:
        """Whether the member is well: raises if not."""
        if self._member_methods.health and self._settled(self._object.health()) is False:
            raise RuntimeError("health() says False")

    def beside_let_go(self) -> None:
        """Wait no longer for parts of those who are gone."""
        self._let_go.set()

    def beside_leave(self) -> None:
        """The group goes on without this member: it need not stay until its notice is over."""
        self._may_leave.set()

    def drain(self, seconds: float) -> None:
        """The pool wants the room: stay until the group has let this member go, but not longer than that."""
        self._may_leave.wait(max(0.0, seconds - min(1.0, seconds / 4)))

    def cancel(self) -> None:
        """The end."""
        self._let_go.set()
        self._may_leave.set()
        own = getattr(self._object, "cancel", None)
        if callable(own):
            self._settled(own())

    def save(self) -> tuple[int, Any]:
        """For the pool, when it takes the room: nothing is lost, also where this is the only member."""
        return self.give() if self._member_methods.state else (self._committed, None)

    def load(self, state: tuple[int, Any]) -> None:
        """The pool gives the room back."""
        if self._member_methods.state:
            self._settled(self._object.load(state[1]))
            self._committed = state[0]

    # ---- how it is done ------------------------------------------------------------------------------------------

    def _expect(self, epoch: int) -> None:
        if self._world is None or self._world.epoch != epoch:
            mine = self._world.epoch if self._world else "none"
            raise WorldMismatchError(f"the call is for world {epoch}, this member is in {mine}")

    def _pulled(self, parts: Sequence[Any]) -> list[Any]:
        """What the references stand for; PartLostError where one does not come."""
        import ray
        from ray import exceptions

        refs = list(parts)
        try:
            while True:
                _, lacking = ray.wait(refs, num_returns=len(refs), timeout=PULL_S)
                if not lacking:
                    found: list[Any] = ray.get(refs)
                    return found
                if self._let_go.is_set():
                    raise PartLostError(f"{len(lacking)} of {len(refs)} parts did not come")
        except (exceptions.ObjectLostError, exceptions.RayActorError) as fault:
            raise PartLostError(f"a part is lost: {type(fault).__name__}") from None

    def _settled(self, value: Any) -> Any:
        return asyncio.run(value) if inspect.iscoroutine(value) else value
