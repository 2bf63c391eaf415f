"""The nouns of the fleet: nodes as they come and go, and groups that grow and shrink with them.

Frozen facts, checked where they are made. What is done about a node or a group is decided in `trimtab.fleet`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.core.errors import InputError
from trimtab.core.numbers import LONGEST_S, SHORTEST_S, check_whole, is_number
from trimtab.core.reasons import Reason
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.pool import Labels


class NodeState(str, enum.Enum):
    """Where a node is."""

    ready = "ready"  # there, and may be used
    held = "held"  # there, but it came and went too often: not used until it has been steady
    suspect = "suspect"  # its link says nothing: what runs there goes on, nothing new goes there
    draining = "draining"  # it will go at its deadline: what is there moves, nothing new goes there
    lost = "lost"  # gone, with all that was on it
    left = "left"  # gone as announced


THERE = (NodeState.ready, NodeState.held, NodeState.suspect, NodeState.draining)


@dataclass(frozen=True)
class NodeFacts:
    """What a node has."""

    total: Resources
    labels: Labels = ()
    kind: str = ""  # of its accelerators, as Ray names them; empty where it has none or does not say
    address: str = ""  # host or IP
    name: str = ""  # what people call it; empty: its id
    head: bool = False


@dataclass(frozen=True)
class NodeView:
    """A node as others see it."""

    node: str
    state: NodeState
    facts: NodeFacts
    reason: Reason
    since: float
    outside: Resources = NOTHING  # what others than trimtab hold of it
    deadline: float | None = None  # of a drain, or when a held node is used again
    unlike: bool = False  # other accelerators, or another number of them, than most nodes have
    losses: int = 0  # how often it was lost
    announced: bool = True  # False: it joined or drains, and the window in which others may do the same is still open


@dataclass(frozen=True)
class NodeChange:
    """What happened to nodes within one window, told as one: ids, each in at most one of these."""

    number: int  # 1, 2, 3 ...
    at: float
    joined: tuple[str, ...] = ()  # returned ones among them
    draining: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    reason: Reason | None = None


def _no_seconds(name: str, value: object, where: str) -> InputError:
    return InputError(f"{name} must be a number of seconds from 0 to {LONGEST_S:g}, not {value!r}", where=where)


@dataclass(frozen=True)
class NodePolicy:
    """How nodes are judged. Seconds."""

    suspect_s: float = 1.0  # silent for so long: suspect
    lost_s: float = 10.0  # silent for so long: lost
    join_window_s: float = 0.3  # joins within it are one change
    drain_window_s: float = 3.0  # drains within it are one change ...
    urgent_drain_s: float = 10.0  # ... unless a deadline is nearer than this: then at once
    free_losses: int = 1  # so many losses within `forget_s` are taken without holding the node back
    hold_s: float = 5.0  # held so long after the next one, twice as long after each further one
    max_hold_s: float = 300.0
    forget_s: float = 600.0  # a loss is forgotten after so long

    def __post_init__(self) -> None:
        for name in ("suspect_s", "lost_s", "join_window_s", "drain_window_s", "urgent_drain_s", "hold_s", "max_hold_s",
                     "forget_s"):  # fmt: skip
            if not is_number(getattr(self, name), 0, LONGEST_S):
                raise _no_seconds(name, getattr(self, name), "the node policy")
        if self.lost_s < self.suspect_s:
            raise InputError("a node cannot be lost before it is suspect", where="the node policy", hint="lost_s")
        check_whole("free_losses", self.free_losses, "the node policy")


class MemberState(str, enum.Enum):
    """Where a member of an elastic group is."""

    pending = "pending"  # its task was submitted; it waits for room or is being constructed
    ready = "ready"  # constructed; enters the world at the next step boundary
    working = "working"  # has a rank in the world of this epoch
    leaving = "leaving"  # still has its rank; goes at the next step boundary
    gone = "gone"  # ended, lost or given up


@dataclass(frozen=True)
class ElasticSpec:
    """An elastic group: one member per unit of resources, as many as there is room for, within limits."""

    name: str
    unit: Resources  # what one member asks
    min_members: int = 1  # fewer: the group waits
    max_members: int | None = None  # None: as many as there is room for
    wait_s: float = 600.0  # how long it waits below `min_members` before it gives up
    step_timeout_s: float = 600.0  # a member that takes longer hangs
    health_every_s: float = 5.0  # 0: never asked
    health_timeout_s: float = 5.0
    restarts: int = 10  # unplanned replacements within `restart_window_s` before no more are tried
    restart_window_s: float = 600.0
    back_off_s: float = 0.5  # before a second replacement in a row, twice as long before each further one
    max_back_off_s: float = 30.0
    handover_s: float = 5.0  # a draining member is out so long before its node's deadline, at the latest

    def __post_init__(self) -> None:
        where = f"group {self.name}"
        if not self.name or any(character in self.name for character in "/\\\n\0: "):
            raise InputError(f"{self.name!r} cannot be the name of a group", hint="letters, digits, - . and _")
        if not self.unit:
            raise InputError("a member must ask for something", where=where, hint='per_node={"gpu": 1}')
        check_whole("min", self.min_members, where, 1)
        if self.max_members is not None:
            check_whole("max", self.max_members, where)
        if self.max_members is not None and self.max_members < self.min_members:
            raise InputError(f"max {self.max_members} is less than min {self.min_members}", where=where)
        check_whole("restarts", self.restarts, where)
        for name in ("wait_s", "step_timeout_s", "health_every_s", "health_timeout_s", "restart_window_s",
                     "back_off_s", "max_back_off_s", "handover_s"):  # fmt: skip
            if not is_number(getattr(self, name), 0, LONGEST_S):
                raise _no_seconds(name, getattr(self, name), where)
        if 0 < self.health_every_s < SHORTEST_S:
            raise InputError(
                f"health_every_s must be 0 (never) or at least {SHORTEST_S:g}, not {self.health_every_s}", where=where
            )


@dataclass(frozen=True)
class World:
    """Who works together from one step boundary to the next: members by rank, contiguous, in node order."""

    epoch: int  # 1, 2, 3 ...
    members: tuple[str, ...]  # rank = position
    nodes: tuple[str, ...]  # of those members
    reason: Reason

    @property
    def size(self) -> int:
        """How many."""
        return len(self.members)
