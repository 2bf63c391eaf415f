"""What the node machine remembers of a node, and the words it has for it. Decides nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import GRAIN, Resources
from trimtab.model.nodes import THERE, NodeFacts, NodeState

NAMED = 5  # nodes in a sentence

NodeShape = tuple[str, int]  # of accelerators, and units of them


class Announced(str, enum.Enum):
    """What groups believe of a node."""

    absent = "absent"
    used = "used"
    draining = "draining"


@dataclass(frozen=True)
class NodeDrain:
    """That a node will go."""

    deadline: float | None  # never before the moment it was asked
    requested: float | None  # as it was asked, so that asking the same again is known
    reason: Reason


@dataclass(eq=False)
class TrackedNode:
    """One node."""

    id: str
    facts: NodeFacts
    outside: Resources
    joined: float  # for the first time
    state: NodeState
    reason: Reason
    since: float
    place: str = ""  # the name it came with: the same when it is started again under another id; empty: it had none
    listed: bool = True  # Ray has it
    in_use: bool = False  # a UseNode was said, and no LoseNode after it
    silent: bool = False  # what its link last said
    drain: NodeDrain | None = None  # may outlast a loss, as long as Ray lists the node
    hold_until: float | None = None
    losses: list[float] = field(default_factory=list)  # when; of its name, too; not older than the policy remembers
    announced: Announced = Announced.absent
    announce_by: float | None = None  # exactly when groups believe something else than what is
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def there(self) -> bool:
        """Whether it is there, used or not."""
        return self.state in THERE

    @property
    def kind(self) -> NodeShape | None:
        """Its accelerators, if it is there and has any."""
        gpus = self.facts.total.get("gpu")
        return (self.facts.kind, gpus) if gpus and self.there else None

    @property
    def display_name(self) -> str:
        """What people call it."""
        return display_name(self.id, self.facts)


def to_announce(node: TrackedNode) -> Announced:
    """What groups ought to believe: who drains is news only to those who knew it."""
    if node.state in (NodeState.ready, NodeState.suspect):
        return Announced.used
    if node.state is NodeState.draining and node.announced is not Announced.absent:
        return Announced.draining
    return Announced.absent


def name_of(facts: NodeFacts) -> str:
    """The name that somebody gave the node, if any: Ray's name for a nameless one is its host."""
    return facts.name if facts.name != facts.address else ""


def display_name(node: str, facts: NodeFacts | None) -> str:
    """What people call a node: its name, or the beginning of Ray's long id."""
    return (name_of(facts) if facts is not None else "") or (node[:12] if len(node) > 20 else node)


def rank(node: TrackedNode) -> tuple[bool, float, str]:
    """Node order."""
    return not node.facts.head, node.joined, node.id


def change_reason(joined: list[TrackedNode], draining: list[TrackedNode], lost: list[TrackedNode]) -> Reason:
    """The gravest cause; all of them in the sentence."""
    said = ((lost, "gone"), (draining, "draining"), (joined, "joined"))
    first = next(nodes[0] for nodes, _ in said if nodes)
    words = [f"{word}: {_titles(nodes)}" for nodes, word in said if nodes]
    return Reason(first.reason.code, f"{'; '.join(words)} ({first.reason.sentence})")


def _titles(nodes: list[TrackedNode]) -> str:
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return ", ".join(node.display_name for node in nodes[:NAMED]) + more


def went(node: TrackedNode, why: str) -> str:
    """Why a node is gone that was to go, or ended in order."""
    return f"it went as announced ({node.drain.reason.sentence})" if node.drain is not None else why


def until(word: str, deadline: float | None, now: float) -> str:
    """How long something will be, said at the moment it begins."""
    return "" if deadline is None else f"; {word} {deadline - now:.3g} s"


def sooner(one: float | None, other: float | None, by_s: float) -> bool:
    """Whether the one deadline is before the other, by more than that; None is the latest."""
    return one is not None and (other is None or one < other - by_s)


def figures(facts: NodeFacts, outside: Resources) -> str:
    """What a node has, and what is not ours of it."""
    return f"it has {facts.total}" + (f", of which others hold {outside}" if outside else "")


def gpu_text(kind: NodeShape) -> str:
    """Accelerators as people say them."""
    return f"{kind[1] / GRAIN:g} {kind[0] or 'GPU'}" + ("s" if not kind[0] and kind[1] != GRAIN else "")
