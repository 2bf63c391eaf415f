"""Drains nodes in Ray, and lists draining nodes.

Stricter than Ray, which accepts a drain of an unknown node and of the head, whose raylet then exits and takes the
cluster with it: both are refused here, as is a deadline in the past. Ray ends a drained node once it is idle; it does
nothing when the deadline passes, and a drain cannot be undone.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.runtime.procs.background import first_line

ANSWER_S = 5.0
MIN_ID_PREFIX = 4  # characters
HEAD = "node:__internal_head__"  # resource that marks the head node


class DrainReason(enum.IntEnum):
    """Ray's drain reasons."""

    idle = 1  # refused by Ray unless the node is idle
    preemption = 2  # never refused


class PastDeadlineError(InputError):
    """The deadline of a drain has passed."""


class UnknownNodeError(InputError):
    """No node matches, or several do."""


class HeadNodeError(InputError):
    """The head node cannot be drained: the cluster ends with it."""


def drain(
    ray: Any,
    node_id: str,
    deadline_s: float | None,
    cause: str,
    reason: DrainReason = DrainReason.preemption,
) -> None:
    """Drain a node that will be removed `deadline_s` from now (None: when it is idle).

    A second drain replaces the deadline. InputError for an unknown node, the head or a past deadline; InfeasibleError
    if Ray refuses; UnreachableError if it does not answer.
    """
    checked_deadline(deadline_s)
    found(ray, node_id)
    deadline_ms = 0 if deadline_s is None else math.ceil((time.time() + deadline_s) * 1000)
    accepted, why_not = _ask(ray, "drain_node", node_id, int(reason), cause, deadline_ms, timeout=ANSWER_S)
    if not accepted:
        raise InfeasibleError(f"Ray does not drain node {node_id[:12]}: {why_not}")


def draining(ray: Any) -> dict[str, float | None]:
    """Draining nodes with their deadlines in epoch seconds (None: no deadline), without removed ones."""
    seen: Mapping[str, int] = _ask(ray, "get_draining_nodes", timeout=ANSWER_S)
    return {node: deadline_ms / 1000 if deadline_ms else None for node, deadline_ms in seen.items()}


def found(ray: Any, node: str) -> str:
    """Id of the alive node with this id, id prefix, name or address; HeadNodeError for the head."""
    wanted = node.strip().lower()
    alive = [info for info in ray.nodes() if info.get("Alive")]
    matches = [info for info in alive if wanted in _names(info)]
    if not matches and len(wanted) >= MIN_ID_PREFIX:
        matches = [info for info in alive if str(info["NodeID"]).startswith(wanted)]
    if not matches:
        raise UnknownNodeError(f"there is no node {node}", hint="`trimtab cluster status` shows nodes and their names")
    if len(matches) > 1:
        several = ", ".join(sorted(info["NodeID"][:12] for info in matches))
        raise UnknownNodeError(f"several nodes are called {node}: {several}", hint="give an id prefix")
    if HEAD in matches[0].get("Resources", {}):
        raise HeadNodeError(f"{node} is the head: without it there is no cluster", hint="stop the cluster instead")
    return str(matches[0]["NodeID"])


def checked_deadline(deadline_s: float | None) -> None:
    """PastDeadlineError unless it is in the future."""
    if deadline_s is not None and (not math.isfinite(deadline_s) or deadline_s <= 0):
        raise PastDeadlineError(f"a deadline {deadline_s:g} s from now has passed already", hint="seconds, more than 0")


def _names(node: Mapping[str, Any]) -> list[str]:
    names = (node["NodeID"], node.get("NodeName"), node.get("NodeManagerHostname"), node.get("NodeManagerAddress"))
    return [str(name).lower() for name in names if name]


def _ask(ray: Any, method: str, *arguments: Any, timeout: float) -> Any:
    """Call the GCS client; Ray has no public API for draining."""
    if not ray.is_initialized():
        raise UnreachableError("Ray is gone: this process has left it", hint="connect again")
    try:
        return getattr(ray._private.worker.global_worker.gcs_client, method)(*arguments, timeout=timeout)
    except Exception as fault:
        raise UnreachableError(
            f"Ray does not answer: {first_line(fault)}",
            hint="`ray status` shows whether it runs",
        ) from None
