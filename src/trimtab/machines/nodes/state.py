"""State of the node machine. Makes no decisions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import Resources
from trimtab.model.nodes import THERE, NodeFacts, NodePolicy, NodeState, NodeView
from trimtab.model.pool import PreemptionPolicy

EVICT_AFTER_S = 30.0  # on a node that drains without a deadline, for tasks that leave by themselves
EVICT_SLACK_S = 5.0  # beyond cancel and checkpoint

NodeShape = tuple[str, int]  # accelerator kind, units


class Announced(str, enum.Enum):
    """What was announced of a node to elastic groups."""

    absent = "absent"
    used = "used"
    draining = "draining"


class NodeDrain(Frozen):
    """A drain of a node."""

    deadline: float | None  # never before the request
    requested: float | None  # as requested, to recognize a repeated request
    reason: Reason


@dataclass(eq=False)
class TrackedNode:
    """A node, from its join until it is forgotten."""

    id: str
    facts: NodeFacts
    outside: Resources
    joined: float  # for the first time
    state: NodeState
    reason: Reason
    since: float
    place: str = ""  # its given name, which survives a restart under another id
    listed: bool = True  # by Ray
    in_use: bool = False  # UseNode was issued, and no RemoveNode after it
    silent: bool = False  # by its last heartbeat event
    drain: NodeDrain | None = None  # may outlast a loss, as long as Ray lists the node
    hold_until: float | None = None
    losses: list[float] = field(default_factory=list)  # times, also of earlier ids of its name; within `forget_s`
    announced: Announced = Announced.absent
    announce_by: float | None = None  # set exactly while `announced` is outdated
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def there(self) -> bool:
        return self.state in THERE

    @property
    def kind(self) -> NodeShape | None:
        gpus = self.facts.total.get("gpu")
        return (self.facts.kind, gpus) if gpus and self.there else None

    @property
    def display_name(self) -> str:
        return display_name(self.id, self.facts)

    def view(self, common: NodeShape | None) -> NodeView:
        """The node as others see it; `common` are the accelerators of most nodes."""
        deadline = self.hold_until if self.state is NodeState.held else None
        if self.state is NodeState.draining and self.drain is not None:
            deadline = self.drain.deadline
        kept = (self.id, self.state, self.facts, self.reason, self.since, self.outside)
        unlike = self.kind is not None and self.kind != common
        return NodeView(*kept, deadline, unlike, len(self.losses), self.announce_by is None)


@dataclass(eq=False)
class NodesState:
    """All nodes that are up, or went not long ago."""

    policy: NodePolicy
    now: float
    version: int  # incremented with every change that `views` shows
    last_change: int  # number of the last announced change
    nodes: dict[str, TrackedNode]


def to_announce(node: TrackedNode) -> Announced:
    """What should be announced: a drain only of a node whose join was announced."""
    if node.state in (NodeState.ready, NodeState.suspect):
        return Announced.used
    if node.state is NodeState.draining and node.announced is not Announced.absent:
        return Announced.draining
    return Announced.absent


def name_of(facts: NodeFacts) -> str:
    """The node's given name, if any: Ray names an unnamed node by its address."""
    return facts.name if facts.name != facts.address else ""


def display_name(node: str, facts: NodeFacts | None) -> str:
    """Node name for display: its given name, or the start of Ray's long id."""
    return (name_of(facts) if facts is not None else "") or (node[:12] if len(node) > 20 else node)


def node_order(node: TrackedNode) -> tuple[bool, float, str]:
    return not node.facts.head, node.joined, node.id


def is_sooner(deadline: float | None, other: float | None, by_s: float) -> bool:
    """Whether a deadline precedes the other by more than `by_s`; None is the latest."""
    return deadline is not None and (other is None or deadline < other - by_s)


def evict_after_s(left_s: float | None, policy: PreemptionPolicy) -> float:
    """Seconds until tasks are evicted from a draining node whose deadline is in `left_s` (None: it has none).

    Early enough to cancel and checkpoint as the policy allows, but never in the first half of the time: tasks may leave
    by themselves.
    """
    if left_s is None:
        return EVICT_AFTER_S
    left_s = max(0.0, left_s)
    return left_s - min(left_s / 2, policy.cancel_timeout_s + policy.save_timeout_s + EVICT_SLACK_S)
