"""Tells Ray that a node will go, and asks which nodes will.

Thin, and stricter than Ray: Ray accepts a drain of a node that it does not know and of the head, whose raylet then ends
and takes the cluster with it, so both are refused here, as is a deadline in the past. Ray ends a drained node by itself
once nothing is left on it; when the deadline passes it does nothing, and it knows no way back.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError

ANSWER_S = 5.0
MIN_ID_PREFIX = 4  # of the beginning of a node's id
HEAD = "node:__internal_head__"  # the resource by which Ray marks its head


class DrainReason(enum.IntEnum):
    """Why, in Ray's numbers."""

    idle = 1  # refused by Ray while anything is on the node: a task, an actor, a bundle
    preemption = 2  # never refused


class PastDeadlineError(InputError):
    """The deadline of a drain does not lie ahead."""


class UnknownNodeError(InputError):
    """There is no such node, or several."""


class HeadNodeError(InputError):
    """The head cannot be drained: the cluster lives in it."""


def drain(
    ray: Any,
    node_id: str,
    deadline_s: float | None,
    cause: str,
    reason: DrainReason = DrainReason.preemption,
) -> None:
    """Have Ray put nothing new on a node, which will go in `deadline_s` from now (None: whenever it is empty).

    A second drain replaces the deadline of the first. Raises InputError for an unknown node, the head or a deadline
    that has passed, InfeasibleError where Ray refuses, UnreachableError where it does not answer.
    """
    checked_deadline(deadline_s)
    found(ray, node_id)
    deadline_ms = 0 if deadline_s is None else math.ceil((time.time() + deadline_s) * 1000)
    accepted, why_not = _ask(ray, "drain_node", node_id, int(reason), cause, deadline_ms, timeout=ANSWER_S)
    if not accepted:
        raise InfeasibleError(f"Ray does not drain node {node_id[:12]}: {why_not}")


def draining(ray: Any) -> dict[str, float | None]:
    """Ids of nodes that will go, with their deadlines in epoch seconds (None: no deadline). Those gone are not here."""
    seen: Mapping[str, int] = _ask(ray, "get_draining_nodes", timeout=ANSWER_S)
    return {node: deadline_ms / 1000 if deadline_ms else None for node, deadline_ms in seen.items()}


def found(ray: Any, node: str) -> str:
    """The id of the living node with this id, beginning of an id, name or address; the head is refused."""
    wanted = node.strip().lower()
    alive = [one for one in ray.nodes() if one.get("Alive")]
    matches = [one for one in alive if wanted in _names(one)]
    if not matches and len(wanted) >= MIN_ID_PREFIX:
        matches = [one for one in alive if str(one["NodeID"]).startswith(wanted)]
    if not matches:
        raise UnknownNodeError(f"there is no node {node}", hint="`trimtab cluster status` shows nodes and their names")
    if len(matches) > 1:
        several = ", ".join(sorted(one["NodeID"][:12] for one in matches))
        raise UnknownNodeError(f"several nodes are called {node}: {several}", hint="give the beginning of one's id")
    if HEAD in matches[0].get("Resources", {}):
        raise HeadNodeError(f"{node} is the head: without it there is no cluster", hint="stop the cluster instead")
    return str(matches[0]["NodeID"])


def checked_deadline(deadline_s: float | None) -> None:
    """Raise InputError unless it lies ahead."""
    if deadline_s is not None and (not math.isfinite(deadline_s) or deadline_s <= 0):
        raise PastDeadlineError(f"a deadline {deadline_s:g} s from now has passed already", hint="seconds, more than 0")


def _names(node: Mapping[str, Any]) -> list[str]:
    names = (node["NodeID"], node.get("NodeName"), node.get("NodeManagerHostname"), node.get("NodeManagerAddress"))
    return [str(name).lower() for name in names if name]


def _ask(ray: Any, method: str, *arguments: Any, timeout: float) -> Any:
    """A call of the cluster's control store; Ray has no public one for draining."""
    if not ray.is_initialized():
        raise UnreachableError("Ray is gone: this process has left it", hint="connect again")
    try:
        return getattr(ray._private.worker.global_worker.gcs_client, method)(*arguments, timeout=timeout)
    except Exception as fault:
        said = str(fault).strip().splitlines()
        raise UnreachableError(
            f"Ray does not answer: {said[0] if said else type(fault).__name__}",
            hint="`ray status` shows whether it runs",
        ) from None
