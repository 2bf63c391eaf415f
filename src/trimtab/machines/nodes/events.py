"""Events and instructions of the node machine.

The runtime reports changes from Ray and from its own connection to each node; repeated events change nothing.
Instructions take effect at once and have no outcome events.
"""

from __future__ import annotations

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.nodes import NodeChange, NodeFacts


class NodeEvent(Frozen):
    """An event of the node machine."""


# ---- events -----------------------------------------------------------------------------------------------------


class NodeSeen(NodeEvent):
    """Ray lists the node as alive, or its resources changed."""

    node: str
    facts: NodeFacts
    outside: Resources = NOTHING


class NodeGone(NodeEvent):
    """Ray no longer lists the node. `expected`: it ended in order (a completed drain, `ray stop`)."""

    node: str
    expected: bool = False


class HeartbeatReceived(NodeEvent):
    """A heartbeat on the node's connection, the first or after a silence."""

    node: str


class HeartbeatMissed(NodeEvent):
    """No heartbeat on the node's connection for `silent_s`."""

    node: str
    silent_s: float


class ConnectionBroken(NodeEvent):
    """The connection broke and the node's raylet no longer listens: the node is dead."""

    node: str
    why: str


class DrainRequested(NodeEvent):
    """The node will go at `deadline` (None: when it is empty). `by_ray`: announced by Ray, else by a user or hook."""

    node: str
    deadline: float | None
    cause: str
    by_ray: bool = False


class DrainCancelled(NodeEvent):
    """The node stays."""

    node: str


class NodeTick(NodeEvent):
    """Time has passed."""


# ---- instructions -----------------------------------------------------------------------------------------------


class UseNode(Frozen):
    """The node may be used from now on; or its resources changed while in use."""

    node: str
    facts: NodeFacts
    outside: Resources
    reason: Reason


class CordonNode(Frozen):
    """Place nothing new on the node; its tasks run on."""

    node: str
    reason: Reason


class DrainNode(Frozen):
    """Place nothing new on the node, and move its tasks by the deadline (None: when possible)."""

    node: str
    deadline: float | None
    reason: Reason


class RemoveNode(Frozen):
    """The node is gone, with everything on it."""

    node: str
    reason: Reason


class AnnounceNodeChange(Frozen):
    """Announce the node changes of a window to elastic groups, as one change."""

    change: NodeChange


NodeInstruction = UseNode | CordonNode | DrainNode | RemoveNode | AnnounceNodeChange
