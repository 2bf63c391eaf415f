"""Events and instructions of the node machine.

The runtime reports changes from Ray and from its own connection to each node; repeated events change nothing.
Instructions take effect at once and have no outcome events.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.reasons import Reason
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.nodes import NodeChange, NodeFacts


class NodeEvent:
    """An event of the node machine."""


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSeen(NodeEvent):
    """Ray lists the node as alive, or its resources changed."""

    node: str
    facts: NodeFacts
    outside: Resources = NOTHING


@dataclass(frozen=True)
class NodeGone(NodeEvent):
    """Ray no longer lists the node. `expected`: it ended in order (a completed drain, `ray stop`)."""

    node: str
    expected: bool = False


@dataclass(frozen=True)
class HeartbeatReceived(NodeEvent):
    """A heartbeat on the node's connection, the first or after a silence."""

    node: str


@dataclass(frozen=True)
class HeartbeatMissed(NodeEvent):
    """No heartbeat on the node's connection for `silent_s`."""

    node: str
    silent_s: float


@dataclass(frozen=True)
class ConnectionBroken(NodeEvent):
    """The connection broke and the node's raylet no longer listens: the node is dead."""

    node: str
    why: str


@dataclass(frozen=True)
class DrainRequested(NodeEvent):
    """The node will go at `deadline` (None: when it is empty). `by_ray`: announced by Ray, else by a user or hook."""

    node: str
    deadline: float | None
    cause: str
    by_ray: bool = False


@dataclass(frozen=True)
class DrainCancelled(NodeEvent):
    """The node stays."""

    node: str


@dataclass(frozen=True)
class NodeTick(NodeEvent):
    """Time has passed."""


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UseNode:
    """The node may be used from now on; or its resources changed while in use."""

    node: str
    facts: NodeFacts
    outside: Resources
    reason: Reason


@dataclass(frozen=True)
class CordonNode:
    """Place nothing new on the node; its tasks run on."""

    node: str
    reason: Reason


@dataclass(frozen=True)
class DrainNode:
    """Place nothing new on the node, and move its tasks by the deadline (None: when possible)."""

    node: str
    deadline: float | None
    reason: Reason


@dataclass(frozen=True)
class RemoveNode:
    """The node is gone, with everything on it."""

    node: str
    reason: Reason


@dataclass(frozen=True)
class AnnounceNodeChange:
    """Announce the node changes of a window to elastic groups, as one change."""

    change: NodeChange


NodeInstruction = UseNode | CordonNode | DrainNode | RemoveNode | AnnounceNodeChange
