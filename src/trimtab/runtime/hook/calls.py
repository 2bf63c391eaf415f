"""Backend of the hook: drains through the controller if one runs, else directly in Ray; and the wanted nodes.

A controller that exists but does not answer is an error: a node must never be drained without its knowledge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.client.connection import ControllerConnection
from trimtab.runtime.controller.rpc import controllers
from trimtab.runtime.hook.server import WantedNodes
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.nodes import live_nodes

ANSWER_S = 20.0


class NodeHookCalls:
    """Calls on a Ray cluster. `name` is the controller's; default: the only one, if any."""

    def __init__(self, ray: Any, name: str | None = None) -> None:
        self._ray = ray
        self._name = name

    def how(self) -> str:
        """Where a drain would go now, as a sentence."""
        found = self._found()
        return f"drains go through the controller {found}" if found else "no controller runs: drains go to Ray"

    def drain(self, node: str, deadline_s: float | None, cause: str) -> Mapping[str, Any]:
        """Drain a node, given by id, id prefix, name or address."""
        draining.checked_deadline(deadline_s)
        node_id = draining.found(self._ray, node)
        controller = self._controller()
        if controller is None:
            draining.drain(self._ray, node_id, deadline_s, cause)
        else:
            controller.ask("drain_node", node_id, deadline_s, cause, timeout_s=ANSWER_S)
        return {"node_id": node_id, "through": f"controller {controller.name}" if controller else "ray"}

    def look(self) -> WantedNodes:
        """Number of wanted worker nodes, and of nodes by state."""
        controller = self._controller()
        if controller is not None:
            status = controller.ask("status", timeout_s=ANSWER_S)
            return WantedNodes(status.get("desired_workers"), Counter(node["state"] for node in status["fleet"]))
        going = draining.draining(self._ray)
        alive = [node.node_id for node in live_nodes(self._ray)]
        return WantedNodes(None, Counter("draining" if node in going else "ready" for node in alive))

    def _controller(self) -> ControllerConnection | None:
        name = self._found()
        return ControllerConnection(self._ray, name, None, None, ANSWER_S, make=False) if name else None

    def _found(self) -> str | None:
        if not self._ray.is_initialized():
            raise UnreachableError("Ray is gone: this process has left it", hint="start the hook again")
        try:
            names = controllers(self._ray)
        except Exception as fault:
            raise UnreachableError(f"Ray does not answer: {first_line(fault)}") from None
        if self._name is not None or len(names) <= 1:
            return self._name or next(iter(names), None)
        raise UnreachableError(
            f"this Ray has several controllers: {', '.join(names)}", hint="start the hook with --name"
        )
