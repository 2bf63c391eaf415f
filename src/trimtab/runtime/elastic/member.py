"""The member process of an elastic group: the user's object in a wrapper that counts steps.

The group calls the wrapper, the wrapper calls the user's object. It never commits a step twice, never commits one of
another world, never exposes a half-changed state, and never waits for a lost member's part longer than it is allowed.
Calls of a step come through Ray, on the main thread; what cannot wait behind a step (health, release, leaving) comes
over the control channel, on other threads: the methods that begin with `beside_`, and `drain`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError, nearest
from trimtab.core.frozen import Frozen

PULL_S = 0.1  # between checks whether to stop waiting for a part


class MemberWorld(Frozen):
    """The world as one member sees it: the argument of `enter(world)`."""

    rank: int
    size: int
    epoch: int  # 1, 2, 3 ...: unique to a world
    step: int  # complete steps
    nodes: tuple[str, ...] = ()  # by rank

    def share(self, count: int) -> slice:
        """This member's slice of `count` rows: contiguous and even; all ranks together cover all rows."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)


class MemberMethods(Frozen):
    """Which methods a member class has."""

    compute: str  # its name: `compute`, or `step` if it has nothing else
    commit: bool
    enter: bool
    state: bool  # save and load
    merge: bool
    health: bool

    @property
    def replicated(self) -> bool:
        """Whether all members have the same state: a class with `merge` has one per member."""
        return self.state and not self.merge


class MemberFacts(Frozen):
    """A member's process and progress."""

    pid: int
    committed: int  # the last step that its state includes


class StepHalf(Frozen):
    """One half of a step in one member."""

    seconds: float
    value: Any = None  # returned by the user's commit


class WorldMismatchError(RuntimeError):
    """The call belongs to another world or step than this member is in."""


class PartLostError(RuntimeError):
    """A part of the step is lost with the member that made it."""


def find_member_methods(kind: type) -> MemberMethods:
    """The methods of a class; InputError if it cannot be a member."""

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
        self._methods = find_member_methods(kind)
        self._object = kind(*args, **kwargs)
        self._world: MemberWorld | None = None
        self._committed = 0
        self._last: StepHalf | None = None  # of the last commit, for a repeated call
        self._state_lock = threading.Lock()  # held while the state changes
        self._let_go = threading.Event()  # set: stop waiting for parts
        self._may_leave = threading.Event()

    # ---- called by the group, one at a time ----------------------------------------------------------------------

    def facts(self) -> MemberFacts:
        return MemberFacts(os.getpid(), self._committed)

    def enter(self, world: MemberWorld) -> MemberFacts:
        """Enter a world; the group has made sure that the state is the current one."""
        self._world, self._committed = world, world.step
        if self._methods.enter:
            self._resolve(self._object.enter(world))
        return self.facts()

    def compute(self, step: int, epoch: int, batch: Any) -> tuple[StepHalf, Any]:
        """The first half: this member's part, which others will read. Changes nothing that is kept."""
        self._expect(epoch)
        self._let_go.clear()
        began = time.perf_counter()
        part = self._resolve(getattr(self._object, self._methods.compute)(step, batch))
        if not self._methods.commit:
            self._committed = step
        return StepHalf(time.perf_counter() - began), part

    def commit(self, step: int, epoch: int, parts: Sequence[Any]) -> StepHalf:
        """The second half: apply all parts (references, by rank) once; a repeated call returns the same result."""
        if step == self._committed and self._last is not None:
            return self._last
        self._expect(epoch)
        if step != self._committed + 1:
            raise WorldMismatchError(f"step {step} was to be committed after step {self._committed}")
        fetched = self._fetch(parts)
        began = time.perf_counter()
        with self._state_lock:
            value = self._resolve(self._object.commit(step, fetched))
            self._committed = step
        self._last = StepHalf(time.perf_counter() - began, value)
        return self._last

    def give(self) -> tuple[int, Any]:
        """The state and the step it includes: for a new member, or to be kept."""
        with self._state_lock:
            return self._committed, self._resolve(self._object.save())

    def take(self, committed: int, state: Sequence[Any]) -> MemberFacts:
        """Go on from a state (a reference to it)."""
        self._let_go.clear()
        fetched = self._fetch(state)
        with self._state_lock:
            if self._methods.state:
                self._resolve(self._object.load(fetched[0]))
            self._committed, self._last = committed, None
        return self.facts()

    def merge(self, states: Sequence[Any]) -> None:
        """Take over the states of removed members without a successor."""
        self._let_go.clear()
        fetched = self._fetch(states)
        with self._state_lock:
            self._resolve(self._object.merge(fetched))

    # ---- over the control channel, beside a step -----------------------------------------------------------------

    def beside_health(self) -> None:
        """Raise if the member is unhealthy."""
        if self._methods.health and self._resolve(self._object.health()) is False:
            raise RuntimeError("health() says False")

    def beside_let_go(self) -> None:
        """Stop waiting for parts of lost members."""
        self._let_go.set()

    def beside_leave(self) -> None:
        """The group goes on without this member: it need not stay until its notice is over."""
        self._may_leave.set()

    def drain(self, seconds: float) -> None:
        """The pool preempts this member: stay until the group has released it, but not longer than `seconds`."""
        self._may_leave.wait(max(0.0, seconds - min(1.0, seconds / 4)))

    def cancel(self) -> None:
        self._let_go.set()
        self._may_leave.set()
        own = getattr(self._object, "cancel", None)
        if callable(own):
            self._resolve(own())

    def save(self) -> tuple[int, Any]:
        """For the pool on preemption: nothing is lost, even if this is the only member."""
        return self.give() if self._methods.state else (self._committed, None)

    def load(self, state: tuple[int, Any]) -> None:
        """Restore the state after preemption."""
        if self._methods.state:
            self._resolve(self._object.load(state[1]))
            self._committed = state[0]

    def _expect(self, epoch: int) -> None:
        if self._world is None or self._world.epoch != epoch:
            mine = self._world.epoch if self._world else "none"
            raise WorldMismatchError(f"the call is for world {epoch}, this member is in {mine}")

    def _fetch(self, parts: Sequence[Any]) -> list[Any]:
        """The objects behind the references; PartLostError if one is lost."""
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

    def _resolve(self, value: Any) -> Any:
        return asyncio.run(value) if inspect.iscoroutine(value) else value
