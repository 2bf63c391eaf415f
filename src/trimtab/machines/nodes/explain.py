"""Reason texts of the node machine. Decides nothing."""

from __future__ import annotations

from trimtab.core.reasons import Reason, some
from trimtab.core.resources import GRAIN, Resources
from trimtab.machines.nodes.state import NodeShape, TrackedNode
from trimtab.model.nodes import NodeFacts

NAMED = 5  # nodes in a sentence


def change_reason(joined: list[TrackedNode], draining: list[TrackedNode], lost: list[TrackedNode]) -> Reason:
    """The code of the gravest change; all of them in the sentence."""
    changes = ((lost, "gone"), (draining, "draining"), (joined, "joined"))
    first = next(nodes[0] for nodes, _ in changes if nodes)
    parts = [f"{word}: {some([node.display_name for node in nodes], NAMED)}" for nodes, word in changes if nodes]
    return Reason(first.reason.code, f"{'; '.join(parts)} ({first.reason.sentence})")


def departure_text(node: TrackedNode, why: str) -> str:
    return f"it went as announced ({node.drain.reason.sentence})" if node.drain is not None else why


def duration_text(word: str, deadline: float | None, now: float) -> str:
    return "" if deadline is None else f"; {word} {deadline - now:.3g} s"


def resources_text(facts: NodeFacts, outside: Resources) -> str:
    return f"it has {facts.total}" + (f", of which others hold {outside}" if outside else "")


def gpu_text(kind: NodeShape) -> str:
    return f"{kind[1] / GRAIN:g} {kind[0] or 'GPU'}" + ("s" if not kind[0] and kind[1] != GRAIN else "")
