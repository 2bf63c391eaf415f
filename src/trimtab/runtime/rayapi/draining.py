"""Drains nodes in Ray, and lists draining nodes.

Stricter than Ray, which accepts a drain of an unknown node and of the head, whose raylet then exits and takes the
cluster with it: both are refused here, as is a deadline in the past. Ray ends a drained node once it is idle; it does
nothing when the deadline passes, and a drain cannot be undone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.rayapi.nodes import RayNode, ray_nodes
from trimtab.runtime.rayapi.private import own_gcs_client

ANSWER_S = 5.0
MIN_ID_PREFIX = 4  # characters
_PREEMPTION = 2  # the reason of a drain that Ray does not refuse


class PastDeadlineError(InputError):
    """The deadline of a drain has passed."""


class UnknownNodeError(InputError):
    """No node matches, or several do."""


class HeadNodeError(InputError):
    """The head node cannot be drained: the cluster ends with it."""


def drain(ray: Any, node_id: str, deadline_s: float | None, cause: str) -> None:
    """Drain a node that will be removed `deadline_s` from now (None: when it is idle).

    A second drain replaces the deadline. InputError for an unknown node, the head or a past deadline; InfeasibleError
    if Ray refuses; UnreachableError if it does not answer.
    """
    drain_node(_own_gcs(ray), ray_nodes(ray), node_id, deadline_s, cause)


def drain_node(gcs: Any, nodes: Iterable[RayNode], node_id: str, deadline_s: float | None, cause: str) -> None:
    """`drain` by a GCS client and the nodes of its cluster."""
    checked_deadline(deadline_s)
    match(nodes, node_id)
    deadline_ms = 0 if deadline_s is None else math.ceil((time.time() + deadline_s) * 1000)
    accepted, why_not = _ask(gcs.drain_node, node_id, _PREEMPTION, cause, deadline_ms)
    if not accepted:
        raise InfeasibleError(f"Ray does not drain node {node_id[:12]}: {why_not}")


def draining(ray: Any) -> dict[str, float | None]:
    """Draining nodes with their deadlines in epoch seconds (None: no deadline), without removed ones."""
    seen: Mapping[str, int] = _ask(_own_gcs(ray).get_draining_nodes)
    return {node: deadline_ms / 1000 if deadline_ms else None for node, deadline_ms in seen.items()}


def found(ray: Any, node: str) -> str:
    """Id of the alive node with this id, id prefix, name or address; HeadNodeError for the head."""
    return match(ray_nodes(ray), node)


def match(nodes: Iterable[RayNode], node: str) -> str:
    """`found` among these nodes."""
    wanted = node.strip().lower()
    alive = [each for each in nodes if each.alive]
    matches = [each for each in alive if wanted and wanted in _names(each)]
    if not matches and len(wanted) >= MIN_ID_PREFIX:
        matches = [each for each in alive if each.node_id.startswith(wanted)]
    if not matches:
        raise UnknownNodeError(f"there is no node {node}", hint="`trimtab cluster show` shows nodes and their names")
    if len(matches) > 1:
        several = ", ".join(sorted(each.node_id[:12] for each in matches))
        raise UnknownNodeError(f"several nodes are called {node}: {several}", hint="give an id prefix")
    if matches[0].head:
        raise HeadNodeError(f"{node} is the head: without it there is no cluster", hint="stop the cluster instead")
    return matches[0].node_id


def checked_deadline(deadline_s: float | None) -> None:
    """PastDeadlineError unless it is in the future."""
    if deadline_s is not None and (not math.isfinite(deadline_s) or deadline_s <= 0):
        raise PastDeadlineError(f"a deadline {deadline_s:g} s from now has passed already", hint="seconds, more than 0")


def _names(node: RayNode) -> list[str]:
    return [name.lower() for name in (node.node_id, node.name, node.host, node.address)]


def _own_gcs(ray: Any) -> Any:
    if not ray.is_initialized():
        raise UnreachableError("Ray is gone: this process has left it", hint="connect again")
    return own_gcs_client(ray)


def _ask(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments, timeout=ANSWER_S)
    except Exception as fault:
        raise UnreachableError(
            f"Ray does not answer: {first_line(fault)}", hint="`ray status` shows whether it runs"
        ) from None
