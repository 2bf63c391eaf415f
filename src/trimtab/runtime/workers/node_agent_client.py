"""The controller's side of node agents: creates them, calls them with a deadline, reports deaths of processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.controller.heartbeats import AgentAddress
from trimtab.runtime.controller.leases import ClientProcess
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, first_line
from trimtab.runtime.procs.processes import born
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.workers.node_agent import EXIT_WAIT_S, NodeAgent

log = logging.getLogger(__name__)

_POLL_S = 20.0


class NodeAgents:
    """The node agents of a controller. A dead agent is created again."""

    def __init__(self, controller: str, on_death: Callable[[str, int, float], None], background: Background) -> None:
        self._controller = controller
        self._on_death = on_death
        self._background = background
        self._actors: dict[str, Any] = {}  # by joined node: its handle
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._watched: dict[str, set[tuple[int, float]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}  # results of hello()

    @property
    def nodes(self) -> list[str]:
        return list(self._actors)

    async def join(self, node: str, timeout_s: float = 60.0) -> bool:
        """Create an agent on the node; false if there is one."""
        if node in self._actors:
            return False
        self._actors[node] = None
        self._watched.setdefault(node, set())
        try:
            self.facts[node] = await self.request(node, "hello", timeout_s=timeout_s)
        except BaseException:
            self.lost(node)
            raise
        if node in self._actors and node not in self._polls:
            self._polls[node] = self._background.start(
                f"deaths on node {node[:12]}", lambda: self._poll(node), policy=NEVER_GIVE_UP
            )
        return True

    def lost(self, node: str) -> None:
        self._actors.pop(node, None)
        self._watched.pop(node, None)
        self.facts.pop(node, None)
        poll = self._polls.pop(node, None)
        if poll is not None:
            poll.cancel()

    async def request(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the agent of a node; a dead one is created again, until the timeout."""
        from ray.exceptions import ActorUnschedulableError, RayError

        deadline = time.monotonic() + timeout_s
        why, pause_s = "", 0.1
        while node in self._actors and (left := deadline - time.monotonic()) > 0:
            try:
                return await asyncio.wait_for(self._request(node, method, *arguments), left)
            except asyncio.TimeoutError:
                break
            except ActorUnschedulableError as fault:  # the node is leaving
                self._actors[node] = None
                raise UnreachableError(f"node {node[:12]} accepts no new actors: {first_line(fault)}") from None
            except (RayError, ValueError) as fault:  # ValueError: a dying actor holds its name
                why = first_line(fault)
            if node in self._actors:
                self._actors[node] = None
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, 2 * pause_s)
        if node not in self._actors:
            raise UnreachableError(f"node {node[:12]} is gone")
        raise UnreachableError(
            f"the agent of node {node[:12]} did not answer within {timeout_s:g} s", where=why or None
        )

    async def watch(self, node: str, pid: int, start: float, timeout_s: float = 30.0) -> None:
        """Report the death of this process, once."""
        if node in self._watched:
            self._watched[node].add((pid, start))
            await self.request(node, "watch", [(pid, start)], timeout_s=timeout_s)

    def unwatch(self, node: str, pid: int, start: float) -> None:
        self._watched.get(node, set()).discard((pid, start))

    async def renew(self, node: str) -> None:
        """Replace an agent that hangs."""
        actor = self._actors.get(node)
        if actor is not None:
            self._actors[node] = None
            await _ended(actor, self.facts.get(node))

    def all_gpus(self, node: str) -> tuple[str, ...]:
        return tuple(self.facts.get(node, {}).get("gpus", ()))

    async def heartbeat_address(self, node: str) -> AgentAddress | None:
        """Heartbeat address of a node's agent; read again each time, as it may be a new agent."""
        if node in self._actors:
            self.facts[node] = await self.request(node, "hello", timeout_s=5.0)
        known = self.facts.get(node)
        return None if known is None else (str(known["link"][0]), int(known["link"][1]))

    async def process_alive(self, process: ClientProcess | None) -> bool | None:
        """Whether a client's process is alive; None if its node does not answer."""
        if process is None:
            return None
        try:
            alive: bool | None = await self.request(process.node, "process_alive", process, timeout_s=5.0)
        except UnreachableError:
            return None
        return alive

    async def close(self) -> None:
        """End all agents, and their run directories."""
        await asyncio.gather(*(self.leave(node) for node in self.nodes))

    async def _request(self, node: str, method: str, *arguments: Any) -> Any:
        actor = self._actors.get(node) or await self._create(node)
        return await getattr(actor, method).remote(*arguments)

    async def leave(self, node: str) -> None:
        """End the agent of a node, and its run directory."""
        with contextlib.suppress(UnreachableError):
            await self.request(node, "leave", timeout_s=10.0)
        actor, facts = self._actors.get(node), self.facts.get(node)
        self.lost(node)  # first, so that it is not created again
        await _ended(actor, facts)

    async def _create(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = ray.remote(NodeAgent).options(
            name=node_agent_name(self._controller, node),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        actor = await asyncio.to_thread(kind.remote, self._controller, node)
        if node not in self._actors:
            ray.kill(actor)
            raise UnreachableError(f"node {node[:12]} is gone")
        self._actors[node] = actor
        return actor

    async def _poll(self, node: str) -> None:
        """Poll for deaths until the node is lost."""
        epoch, known = "", 0
        while node in self._actors:
            try:
                answered, deaths = await self.request(node, "deaths", epoch, known, _POLL_S, timeout_s=_POLL_S + 10.0)
                if answered != epoch:  # a new agent: set its watches before its count is used
                    self.facts[node] = await self.request(node, "hello", timeout_s=30.0)
                    await self.request(node, "watch", list(self._watched.get(node, ())), timeout_s=30.0)
                    epoch, known = answered, 0
            except UnreachableError:
                await self.renew(node)  # it may hang
                await asyncio.sleep(1.0)
                continue
            known += len(deaths)
            for pid, start in deaths:
                if (pid, start) in self._watched.get(node, ()):
                    self._watched[node].discard((pid, start))
                    try:
                        self._on_death(node, pid, start)
                    except Exception:  # must not end the polling
                        log.exception("the death of process %s on node %s", pid, node[:12])


async def _ended(actor: Any, facts: dict[str, Any] | None) -> None:
    """Kill an agent's actor, and wait until its process is gone if it is on this machine."""
    import ray

    if actor is not None:
        await asyncio.to_thread(ray.kill, actor)
    deadline = time.monotonic() + EXIT_WAIT_S
    while facts and born(facts["pid"]) == facts["born"] and time.monotonic() < deadline:
        await asyncio.sleep(0.005)


def node_agent_name(controller: str, node: str) -> str:
    return f"trimtab:{controller}:node-agent:{node[:12]}"
