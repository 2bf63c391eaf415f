"""State of the group machine. Makes no decisions."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import Resources
from trimtab.model.nodes import ElasticSpec, MemberState, NodeState, NodeView, World


class ElasticPhase(str, enum.Enum):
    """Phase of a group."""

    idle = "idle"  # no step is running or requested
    waiting = "waiting"  # a step is requested, but there are too few members, or the last attempt just failed
    entering = "entering"  # members enter a new world
    stepping = "stepping"
    given_up = "given_up"
    closed = "closed"


OVER = (ElasticPhase.given_up, ElasticPhase.closed)
UP = (MemberState.ready, MemberState.working)
LIVE = tuple(state for state in MemberState if state is not MemberState.gone)


class LeaveCause(Frozen):
    """Why a member has to leave, and when the last step with it may begin; None: no deadline."""

    reason: Reason
    leave_by: float | None


@dataclass(eq=False)
class ElasticMember:
    """A member of a group."""

    id: str
    number: int
    state: MemberState
    reason: Reason
    since: float
    node: str = ""  # empty: pending
    replaces: str = ""  # the member it was started for
    restart_at: float | None = None  # it counts as a restart at that time ...
    restart_weight: int = 0  # ... this many times ...
    restart_node: str = ""  # ... for a member lost on this node
    step: int | None = None  # whose result it has; None: it is new
    proven: bool = False  # it has completed a step
    causes: tuple[LeaveCause, ...] = ()  # only while leaving; one per code, in order of arrival
    health_due: float | None = None
    health_by: float | None = None  # when the result is due
    stop_by: float | None = None  # while gone: when its end must be confirmed

    @property
    def leave_by(self) -> float | None:
        """No step is started with it after that: the nearest of its deadlines."""
        return min((cause.leave_by for cause in self.causes if cause.leave_by is not None), default=None)


class LostMember(Frozen):
    """A member that was lost unplanned, and is not replaced yet."""

    member: str
    node: str
    reason: Reason
    weight: int  # restarts that its replacement counts for


@dataclass(eq=False)
class ElasticState:
    """An elastic group."""

    spec: ElasticSpec
    now: float = 0.0
    phase: ElasticPhase = ElasticPhase.idle
    step: int = 0  # completed
    epoch: int = 0  # of the last world, entered or not
    world: World | None = None  # the last one entered
    without_rank: list[str] = field(default_factory=list)  # of its members: those started again since
    # Of entering and stepping; waiting has its own deadline, which a failed attempt does not move.
    deadline: float | None = None
    next_world: World | None = None  # set exactly while entering
    leavers: tuple[str, ...] = ()  # of `next_world`
    wants_step: bool = False  # a step is requested and not complete
    redo: bool = False  # it was started and interrupted
    interrupting: Reason | None = None  # InterruptStep was issued
    wait_deadline: float | None = None
    wait_reason: Reason | None = None
    wait_key: str = ""  # reason code of the last WaitForMembers
    retry_at: float = 0.0  # back-off after a failure without a known cause
    failed_attempts: int = 0  # such failures in a row
    # Members.
    created_count: int = 0
    # In order of number; gone members until their end is confirmed.
    members: dict[str, ElasticMember] = field(default_factory=dict)
    nodes: tuple[NodeView, ...] = ()
    nodes_known: bool = False
    change: int = 0
    requested: int | None = None  # by a user
    want: int = 0  # by the last RequestUnits
    # Replacements.
    unreplaced: list[LostMember] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)  # within the window
    rounds: int = 0  # of replacements in a row that completed no step
    round_open: bool = False  # no replacement was started since the last loss
    not_before: float = 0.0  # of a replacement
    capped: bool = False
    fatal: str = ""  # why the last start failed, if a retry would fail the same way
    ever_started: bool = False
    # Reporting.
    departed: list[tuple[str, Reason]] = field(default_factory=list)  # since the last world was entered
    restart_count: int = 0
    redone_count: int = 0
    end_reason: Reason | None = None
    stories: dict[str, list[StoryEntry]] = field(default_factory=dict)  # of the group and its members

    def live(self, names: Iterable[str]) -> Iterator[ElasticMember]:
        """Those members that are not gone: late events of gone members change nothing."""
        found = (self.members.get(name) for name in names)
        return (member for member in found if member is not None and member.state is not MemberState.gone)

    def in_state(self, *states: MemberState) -> list[ElasticMember]:
        return [member for member in self.members.values() if member.state in states]

    @property
    def leaving(self) -> list[ElasticMember]:
        return self.in_state(MemberState.leaving)

    def ranked(self, name: str) -> bool:
        return self.world is not None and name in self.world.members and name not in self.without_rank


def units_on(node: NodeView, unit: Resources) -> int:
    """How many members fit on an otherwise unused node."""
    left = node.facts.total.minus(node.outside)
    return min(left.get(name) // units for name, units in unit)


class MemberCapacity(Frozen):
    """Capacity of nodes for members; computed once per NodesChanged."""

    ready: dict[str, int]  # usable nodes, and how many members fit on each
    total: int  # of them
    silent: tuple[tuple[str, int], ...]  # suspect nodes, and how many members fit on each
    draining: frozenset[str]

    def capacity(self, members: dict[str, ElasticMember]) -> int:
        """How many members fit: on a silent node while it holds some; where a node came back smaller, all it holds."""
        holding = Counter(member.node for member in members.values() if member.state is not MemberState.gone)
        silent = sum(units for node, units in self.silent if node in holding)
        running = Counter(member.node for member in members.values() if member.state in UP)
        beyond = sum(max(0, count - self.ready[node]) for node, count in running.items() if node in self.ready)
        return self.total + silent + beyond


def member_capacity(nodes: tuple[NodeView, ...], unit: Resources) -> MemberCapacity:
    ready = {node.node: units_on(node, unit) for node in nodes if node.state is NodeState.ready}
    return MemberCapacity(
        ready,
        sum(ready.values()),
        tuple((node.node, units_on(node, unit)) for node in nodes if node.state is NodeState.suspect),
        frozenset(node.node for node in nodes if node.state is NodeState.draining),
    )
