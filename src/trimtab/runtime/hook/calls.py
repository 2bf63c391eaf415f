"""What the hook calls: a drain through the controller where one runs, else straight to Ray; and what is wanted.

A controller that is there but does not answer is an error: a drain is never carried out behind its back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.client.connection import ControllerConnection
from trimtab.runtime.controller.rpc import controllers
from trimtab.runtime.hook.server import WantedNodes
from trimtab.runtime.rayapi import draining

ANSWER_S = 20.0


class NodeHookCalls:
    """Of one Ray. `name` is the controller's; without it the only one there is, if there is one."""

    def __init__(self, ray: Any, name: str | None = None) -> None:
        self._ray = ray
        self._name = name

    def how(self) -> str:
        """Where a drain would go now, in a sentence."""
        found = self._found()
        return f"drains go through the controller {found}" if found else "no controller runs: drains go to Ray"

    def drain(self, node: str, deadline_s: float | None, cause: str) -> Mapping[str, Any]:
        """Drain a node, by its id, the beginning of it, its name or its address."""
        draining.checked_deadline(deadline_s)
        node_id = draining.found(self._ray, node)
        controller = self._controller()
        if controller is None:
            draining.drain(self._ray, node_id, deadline_s, cause)
        else:
            controller.ask("drain_node", node_id, deadline_s, cause, timeout_s=ANSWER_S)
        return {"node_id": node_id, "through": f"controller {controller.name}" if controller else "ray"}

    def look(self) -> WantedNodes:
        """How many worker nodes are wanted, and how many nodes there are by state."""
        controller = self._controller()
        if controller is not None:
            status = controller.ask("status", timeout_s=ANSWER_S)
            return WantedNodes(status.get("desired_workers"), Counter(one["state"] for one in status["fleet"]))
        going = draining.draining(self._ray)
        alive = [one["NodeID"] for one in self._ray.nodes() if one.get("Alive")]
        return WantedNodes(None, Counter("draining" if node in going else "ready" for node in alive))

    def _controller(self) -> ControllerConnection | None:
        name = self._found()
        return ControllerConnection(self._ray, name, None, None, ANSWER_S, make=False) if name else None

    def _found(self) -> str | None:
        if not self._ray.is_initialized():
            raise UnreachableError("Ray is gone: this process has left it", hint="start the hook again")
        try:
            there = controllers(self._ray)
        except Exception as fault:
            said = str(fault).strip().splitlines()
            raise UnreachableError(f"Ray does not answer: {said[0] if said else type(fault).__name__}") from None
        if self._name is not None or len(there) <= 1:
            return self._name or next(iter(there), None)
        raise UnreachableError(
            f"this Ray has several controllers: {', '.join(there)}", hint="start the hook with --name"
        )
