"""Nodes and elastic groups: states, facts and settings, validated on construction.

Decisions about them are made in `trimtab.machines.nodes` and `trimtab.machines.elastic`.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import COUNT, MAX_COUNT, SHORTEST_S, Ranges, check_fields
from trimtab.core.reasons import Reason
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.pool import Labels


class NodeState(str, enum.Enum):
    """State of a node."""

    ready = "ready"  # up and in use
    held = "held"  # up, but flapped: not used until it has been steady
    suspect = "suspect"  # no heartbeat: its tasks run on, nothing new is placed there
    draining = "draining"  # goes at its deadline: its tasks move, nothing new is placed there
    lost = "lost"  # gone, with all tasks on it
    left = "left"  # gone as announced


THERE = (NodeState.ready, NodeState.held, NodeState.suspect, NodeState.draining)


class NodeFacts(Frozen):
    """What a node has."""

    total: Resources
    labels: Labels = ()
    kind: str = ""  # of its accelerators, in Ray's words; empty: none, or not stated
    address: str = ""  # host or IP
    name: str = ""  # for display; empty: its id
    head: bool = False


class NodeView(Frozen):
    """A node as other components see it."""

    node: str
    state: NodeState
    facts: NodeFacts
    reason: Reason
    since: float
    outside: Resources = NOTHING  # held by other users of Ray than trimtab
    deadline: float | None = None  # of a drain, or of a hold
    unlike: bool = False  # other accelerators than most nodes, or another number of them
    losses: int = 0  # how often
    announced: bool = True  # False: a join or drain whose window for further changes is still open


class NodeChange(Frozen):
    """Node changes of one window, announced together; each id is in at most one of the fields."""

    number: int  # 1, 2, 3 ...
    at: float
    joined: tuple[str, ...] = ()  # and returned
    draining: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    reason: Reason | None = None


class NodePolicy(Frozen):
    """How nodes are judged; times in seconds."""

    suspect_s: float = 1.0  # without a heartbeat: suspect
    lost_s: float = 10.0  # without a heartbeat: lost
    join_window_s: float = 0.3  # joins within it are one change
    drain_window_s: float = 3.0  # drains within it are one change ...
    urgent_drain_s: float = 10.0  # ... unless a deadline is nearer than this: then announced at once
    free_losses: int = 1  # losses within `forget_s` before a node is held
    hold_s: float = 5.0  # after the next loss; doubles with each further one
    max_hold_s: float = 300.0
    forget_s: float = 600.0  # a loss counts for this long

    RANGES: ClassVar[Ranges] = {"free_losses": COUNT}

    def __post_init__(self) -> None:
        check_fields(self, "the node policy")
        if self.lost_s < self.suspect_s:
            raise InputError("a node cannot be lost before it is suspect", where="the node policy", hint="lost_s")


class MemberState(str, enum.Enum):
    """State of a member of an elastic group."""

    pending = "pending"  # its task is submitted: queued or being constructed
    ready = "ready"  # constructed; joins the world at the next step boundary
    working = "working"  # has a rank in the current world
    leaving = "leaving"  # has its rank until the next step boundary
    gone = "gone"  # ended or lost


class ElasticSpec(Frozen):
    """An elastic group: as many members as there is capacity for, one unit of resources each, within limits."""

    name: str
    unit: Resources  # resources of a member
    min_members: int = 1  # below: the group waits
    max_members: int | None = None  # None: as many as fit
    wait_s: float = 600.0  # below `min_members`, then the group fails
    step_timeout_s: float = 600.0  # a member that takes longer is hung
    health_every_s: float = 5.0  # 0: never checked
    health_timeout_s: float = 5.0
    restarts: int = 10  # unplanned replacements within `restart_window_s`
    restart_window_s: float = 600.0
    back_off_s: float = 0.5  # before the second replacement in a row; doubles
    max_back_off_s: float = 30.0
    handover_s: float = 5.0  # a draining member leaves at least this long before its node's deadline

    RANGES: ClassVar[Ranges] = {"min_members": (1, MAX_COUNT, "min"), "max_members": (*COUNT, "max"), "restarts": COUNT}

    def __post_init__(self) -> None:
        where = f"group {self.name}"
        if not self.name or any(character in self.name for character in "/\\\n\0: "):
            raise InputError(f"{self.name!r} cannot be the name of a group", hint="letters, digits, - . and _")
        if not self.unit:
            raise InputError("a member must ask for something", where=where, hint='per_node={"gpu": 1}')
        check_fields(self, where)
        if self.max_members is not None and self.max_members < self.min_members:
            raise InputError(f"max {self.max_members} is less than min {self.min_members}", where=where)
        if 0 < self.health_every_s < SHORTEST_S:
            raise InputError(
                f"health_every_s must be 0 (never) or at least {SHORTEST_S:g}, not {self.health_every_s}", where=where
            )


class World(Frozen):
    """The members between two step boundaries, by rank: contiguous, in node order."""

    epoch: int  # 1, 2, 3 ...
    members: tuple[str, ...]  # rank = position
    nodes: tuple[str, ...]  # of those members
    reason: Reason

    @property
    def size(self) -> int:
        return len(self.members)
