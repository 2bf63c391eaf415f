"""What happens to nodes (events), and what is to be done about it (instructions).

Whoever drives the machine listens to Ray and to a link of its own to each node, and feeds what changed; being told the
same twice changes nothing. Instructions about nodes take effect at once: they end in nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.reasons import Reason
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.nodes import NodeChange, NodeFacts

# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSeen:
    """Ray has the node alive; also says that its figures changed."""

    node: str
    facts: NodeFacts
    outside: Resources = NOTHING


@dataclass(frozen=True)
class NodeGone:
    """Ray does not have the node any more. `expected`: it ended in order (a drain that ran out, `ray stop`)."""

    node: str
    expected: bool = False


@dataclass(frozen=True)
class HeartbeatReceived:
    """The node's own link speaks (again)."""

    node: str


@dataclass(frozen=True)
class HeartbeatMissed:
    """The node's own link is there, but has said nothing for so long."""

    node: str
    silent_s: float


@dataclass(frozen=True)
class ConnectionBroken:
    """The link broke and the node's raylet does not listen any more: the node is dead."""

    node: str
    why: str


@dataclass(frozen=True)
class DrainRequested:
    """The node will go at `deadline` (None: whenever it is empty). `by_ray`: Ray said so, else a person or a hook."""

    node: str
    deadline: float | None
    cause: str
    by_ray: bool = False


@dataclass(frozen=True)
class DrainCancelled:
    """The node stays after all."""

    node: str


@dataclass(frozen=True)
class NodeTick:
    """Time has passed."""


NodeEvent = (
    NodeSeen
    | NodeGone
    | HeartbeatReceived
    | HeartbeatMissed
    | ConnectionBroken
    | DrainRequested
    | DrainCancelled
    | NodeTick
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UseNode:
    """What the node has may be used from now on; also: its figures changed while it was used."""

    node: str
    facts: NodeFacts
    outside: Resources
    reason: Reason


@dataclass(frozen=True)
class CordonNode:
    """Nothing new goes to the node; what runs there goes on."""

    node: str
    reason: Reason


@dataclass(frozen=True)
class DrainNode:
    """Nothing new goes to the node, and what is there has to be elsewhere by the deadline (None: when it can)."""

    node: str
    deadline: float | None
    reason: Reason


@dataclass(frozen=True)
class RemoveNode:
    """The node is gone, and everything on it."""

    node: str
    reason: Reason


@dataclass(frozen=True)
class AnnounceNodeChange:
    """Tell those who grow and shrink with nodes what happened within a window, as one."""

    change: NodeChange


NodeInstruction = UseNode | CordonNode | DrainNode | RemoveNode | AnnounceNodeChange
