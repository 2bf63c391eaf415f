"""What the group machine remembers. Decides nothing; a snapshot is all of it, as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import Resources
from trimtab.model.nodes import ElasticSpec, MemberState, NodeState, NodeView, World


class ElasticPhase(str, enum.Enum):
    """What a group is doing."""

    idle = "idle"  # no step is under way, and none was asked for
    waiting = "waiting"  # a step was asked for, but there are too few members, or the last try just failed
    entering = "entering"  # its members are being told of a world
    stepping = "stepping"
    given_up = "given_up"
    closed = "closed"


OVER = (ElasticPhase.given_up, ElasticPhase.closed)


@dataclass(frozen=True)
class LeaveCause:
    """Why a member has to leave, and by when no step is begun with it any more; None: it can take its time."""

    reason: Reason
    leave_by: float | None


@dataclass(eq=False)
class ElasticMember:
    """One member."""

    id: str
    number: int
    state: MemberState
    reason: Reason
    since: float
    node: str = ""  # empty: it waits, or is being constructed
    replaces: str = ""  # for whom it was started
    restart_at: float | None = None  # it counts as a restart, made then ...
    restart_weight: int = 0  # ... so many times ...
    restart_node: str = ""  # ... for one that was lost there
    step: int | None = None  # whose outcome it has; None: nobody's, it is new
    proven: bool = False  # it has completed a step
    causes: tuple[LeaveCause, ...] = ()  # of a leaving one, one of each code; in the order they came
    health_due: float | None = None
    health_by: float | None = None  # when the answer is due
    stop_by: float | None = None  # of one that is gone: when its end is due to be confirmed

    @property
    def leave_by(self) -> float | None:
        """No step is begun with it after that: the nearest of its deadlines."""
        return min((one.leave_by for one in self.causes if one.leave_by is not None), default=None)


@dataclass(frozen=True)
class LostMember:
    """A member that was lost unplanned, and not replaced yet."""

    member: str
    node: str
    reason: Reason
    weight: int  # as how many restarts its replacement counts


@dataclass(eq=False)
class ElasticState:
    """One group."""

    spec: ElasticSpec
    now: float = 0.0
    phase: ElasticPhase = ElasticPhase.idle
    step: int = 0  # complete ones
    epoch: int = 0  # of the last world that was to be entered
    world: World | None = None  # the last one that was entered
    # Of the phase: entering and stepping have a deadline; waiting has one of its own, which a failed try does not move.
    deadline: float | None = None
    next_world: World | None = None  # exactly while entering
    leavers: tuple[str, ...] = ()  # of `next_world`
    wants_step: bool = False  # a step was asked for and is not complete
    redo: bool = False  # it was begun and interrupted
    interrupting: Reason | None = None  # InterruptStep was said
    wait_deadline: float | None = None
    wait_reason: Reason | None = None
    wait_key: str = ""  # what the last Wait was about
    retry_at: float = 0.0  # no world or step is tried before: the last one failed, and nobody knows why
    failed_attempts: int = 0  # such failures in a row
    # Members.
    created_count: int = 0
    members: dict[str, ElasticMember] = field(
        default_factory=dict
    )  # in order of number; gone ones until that is confirmed
    nodes: tuple[NodeView, ...] = ()
    nodes_known: bool = False
    change: int = 0
    requested: int | None = None  # what a person wants
    want: int = 0  # as it was said last
    # Replacements.
    pending_replacements: list[LostMember] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)  # within the window
    rounds: int = 0  # of replacements in a row, none of which has completed a step
    round_open: bool = False  # a loss that belongs to the last round: nothing was started since
    not_before: float = 0.0  # no replacement
    capped: bool = False
    fatal: str = ""  # why the last start failed that another would not mend
    ever_started: bool = False
    # Telling.
    departed: list[tuple[str, Reason]] = field(default_factory=list)  # who is gone since the last world was entered
    restart_count: int = 0
    redone_count: int = 0
    end_reason: Reason | None = None
    stories: dict[str, list[StoryEntry]] = field(default_factory=dict)  # of the group and its members


def units_on(node: NodeView, unit: Resources) -> int:
    """How many members a node has room for, when nothing of ours is there."""
    left = node.facts.total.minus(node.outside)
    return min(left.get(name) // units for name, units in unit)


@dataclass(frozen=True)
class MemberCapacity:
    """What nodes offer to members; worked out once for each news of nodes."""

    ready: int  # members that nodes have room for which may be used
    silent: tuple[tuple[str, int], ...]  # nodes whose link says nothing, and how many each has room for
    draining: frozenset[str]

    def capacity(self, members: dict[str, ElasticMember]) -> int:
        """How many members there is room for. A silent node counts while it holds some."""
        if not self.silent:
            return self.ready
        holding = {one.node for one in members.values() if one.state is not MemberState.gone}
        return self.ready + sum(units for node, units in self.silent if node in holding)


def member_capacity(nodes: tuple[NodeView, ...], unit: Resources) -> MemberCapacity:
    """What these nodes offer."""
    states = NodeState
    return MemberCapacity(
        sum(units_on(one, unit) for one in nodes if one.state is states.ready),
        tuple((one.node, units_on(one, unit)) for one in nodes if one.state is states.suspect),
        frozenset(one.node for one in nodes if one.state is states.draining),
    )


def group_view(state: ElasticState, size: int, wanted: int) -> dict[str, object]:
    """A group as people and programs see it."""
    ranks = {name: rank for rank, name in enumerate(state.world.members)} if state.world is not None else {}
    return {
        "name": state.spec.name,
        "phase": state.phase.value,
        "size": size,
        "wanted": wanted,
        "least": state.spec.min_members,
        "most": state.spec.max_members,
        "asked": state.requested,
        "epoch": state.world.epoch if state.world is not None else 0,
        "step": state.step,
        "change": state.change,
        "restarts": state.restart_count,
        "redone": state.redone_count,
        "waiting": str(state.wait_reason) if state.phase is ElasticPhase.waiting and state.wait_reason else None,
        "wait_deadline": state.wait_deadline if state.phase is ElasticPhase.waiting else None,
        "ended": str(state.end_reason) if state.end_reason is not None else None,
        "members": [
            {
                "id": one.id,
                "state": one.state.value,
                "node": one.node or None,
                "rank": ranks.get(one.id) if one.state in (MemberState.working, MemberState.leaving) else None,
                "since": one.since,
                "reason": {"code": one.reason.code.value, "sentence": one.reason.sentence},
            }
            for one in state.members.values()
        ],
    }
