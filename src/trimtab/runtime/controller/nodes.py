"""Watches Ray's nodes and runs the node machine.

Polls Ray, keeps heartbeat connections to all nodes, and executes the node machine's decisions on the pool machine: use,
cordon, drain or remove a node. What others hold of a node is what Ray counts as used minus our placement groups. Ray's
figures lag, so a change counts only if it is seen twice while no placement group of ours on that node is being created
or removed, or after a group could not be created there. Runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.nodes import events as events
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.machines.nodes.state import TrackedNode, evict_after_s
from trimtab.machines.pool.events import NodeCordoned, NodeDrained, NodeJoined, NodeLost
from trimtab.machines.pool.records import PgState
from trimtab.model.nodes import NodeFacts, NodeState, NodeView
from trimtab.model.pool import PreemptionPolicy
from trimtab.runtime.controller.executor import ControllerContext
from trimtab.runtime.controller.heartbeats import AgentAddress, NodeHeartbeats
from trimtab.runtime.procs.background import Background, describe
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.gcs_records import among, amounts
from trimtab.runtime.rayapi.nodes import ray_nodes
from trimtab.runtime.rayapi.private import own_free_resources
from trimtab.runtime.store.journal import NODE_EVENTS, DamagedError, Journal
from trimtab.runtime.workers.environments import WarmWorkerKind
from trimtab.runtime.workers.task_workers import TaskWorkerManager

log = logging.getLogger("trimtab.controller")

ANSWER_S = 30.0
SNAPSHOT_EVERY = 5_000  # events
MIN_TICK_S = 0.01
TICK_RETRY_S = 1.0  # after an event on which the machine failed
EXPECTED_DEATHS = (1, 3, 4)  # Ray's death reasons of a node that was ended on purpose: SIGTERM, drained


class NodeFigures(Frozen):
    """An alive node: what it has, what of that Ray counts as free, and where its raylet listens."""

    node: str
    facts: NodeFacts
    available: Resources
    raylet: AgentAddress


class RayNodesView(Frozen):
    """Ray's nodes at one time."""

    nodes: tuple[NodeFigures, ...]
    ended: Mapping[str, int] = field(default_factory=dict)  # by dead node: Ray's death reason
    draining: Mapping[str, float | None] = field(default_factory=dict)  # by node: deadline in epoch seconds


class NodeHoldings(Frozen):
    """Our placement groups on a node, and what they hold of it."""

    groups: tuple[tuple[str, PgState], ...]
    amounts: Resources

    def outside(self, seen: NodeFigures) -> Resources:
        return seen.facts.total.minus(seen.available).minus(self.amounts)


_NOTHING_HELD = NodeHoldings((), NOTHING)


class NodeMonitor:
    """Monitors Ray's nodes. `known` are the nodes that the pool machine knows."""

    def __init__(
        self,
        context: ControllerContext,
        workers: TaskWorkerManager,
        ray: Any,
        directory: Path,
        on_lost: Callable[[str], None],
        on_change: Callable[[], None],
        poll_s: float,
    ) -> None:
        self._context = context
        self._workers = workers
        self._background = workers.background
        self._ray = ray
        self._on_lost = on_lost
        self._on_change = on_change
        self._poll_s = poll_s
        self.journal, self.machine, self.set_aside = _open_journal(directory, workers.background)
        self._heartbeats = NodeHeartbeats(
            self._on_heartbeat, workers.agents.heartbeat_address, self.machine.policy.suspect_s, workers.background
        )
        self.known: dict[str, NodeJoined] = {}
        self._raylets: dict[str, AgentAddress] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._cordoned: dict[str, str] = {}  # cordoned nodes, and why
        self._drain_timers: dict[str, asyncio.TimerHandle] = {}
        self._released: set[str] = set()  # drained nodes with nothing of ours left
        self._was_lost: set[str] = set()  # may still run processes that were given up
        self._leaving: set[asyncio.Task[None]] = set()
        self._last_outside: dict[str, Resources] = {}  # what others held at the last poll
        self._groups: dict[str, tuple[tuple[str, PgState], ...]] = {}  # ours, at the last poll
        self._timer: asyncio.TimerHandle | None = None
        self._version = self.machine.version
        self._stopped = False
        self.fault: str | None = None

    # ---- events ------------------------------------------------------------------------------------------------

    def handle(self, event: events.NodeEvent) -> None:
        """Handle an event and execute the instructions. InputError, with nothing changed, if the machine refuses."""
        now = self._context.now()
        instructions = self.machine.handle(event, now)
        self.journal.append(now, event)
        if self.journal.since_snapshot >= SNAPSHOT_EVERY:
            self.journal.snapshot(now, self.machine.dump())
        for instruction in instructions:
            self._execute(instruction)
        self._set_timer()
        if self.machine.version != self._version:
            self._version = self.machine.version
            self._on_change()

    def views(self, *, gone: bool = False) -> tuple[NodeView, ...]:
        """Present nodes in node order; with `gone`, all known nodes."""
        return self.machine.views(gone)

    async def drain(self, node: str, deadline_s: float | None, cause: str) -> str:
        """Drain a node by a deadline (None: none), in Ray too; returns the node id."""
        draining.checked_deadline(deadline_s)
        found = await asyncio.to_thread(draining.found, self._ray, node)
        deadline = None if deadline_s is None else self._context.now() + deadline_s
        self.handle(events.DrainRequested(found, deadline, cause))
        await asyncio.to_thread(draining.drain, self._ray, found, deadline_s, cause)
        return found

    def _feed(self, event: events.NodeEvent) -> None:
        try:
            self.handle(event)
        except InputError as fault:
            log.info("%s was refused: %s", type(event).__name__, fault.what)
        except Exception:
            log.exception("the node machine failed on %s", event)
            self._set_timer(not_before_s=TICK_RETRY_S)

    def _on_heartbeat(self, event: events.NodeEvent) -> None:
        if not self._stopped:
            self._feed(event)

    def _set_timer(self, *, not_before_s: float = MIN_TICK_S) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None and not self._stopped:
            delay_s = min(3600.0, max(not_before_s, deadline - self._context.now()))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._feed, events.NodeTick())

    # ---- polling ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.step()

    async def step(self, *, wait: bool = False) -> None:
        """Poll once. With `wait`, new nodes have joined on return."""
        try:
            seen = await asyncio.wait_for(asyncio.to_thread(read_ray_nodes, self._ray), ANSWER_S)
            self.fault = None
        except Exception as fault:
            self.fault = f"cannot list Ray nodes: {fault or type(fault).__name__}"
            log.warning(self.fault)
            return
        alive = {node.node: node for node in seen.nodes}
        for node in [record.id for record in self.machine.nodes.values() if record.listed and record.id not in alive]:
            self._heartbeats.drop(node)
            self._feed(events.NodeGone(node, seen.ended.get(node, 0) in EXPECTED_DEATHS))
        held = self._held()
        for node, figures in alive.items():
            self._raylets[node] = figures.raylet
            self._report_node(figures, held.get(node, _NOTHING_HELD))
        ahead_s = self._context.now() - time.time()
        for node, epoch in seen.draining.items():
            if node in alive:
                deadline = None if epoch is None else epoch + ahead_s
                self._feed(events.DrainRequested(node, deadline, "drained through Ray", by_ray=True))
        self._release_empty(held)
        self._align_machines()
        if wait and self._joining:
            await asyncio.wait(self._joining.values(), timeout=ANSWER_S)

    async def refresh(self, nodes: Collection[str], without: str) -> None:
        """Report at once what others hold on these nodes: a placement group could not be created there."""
        seen = await asyncio.wait_for(asyncio.to_thread(read_ray_nodes, self._ray), ANSWER_S)
        held = self._held(without)
        for figures in seen.nodes:
            if figures.node in nodes and figures.node in self.known:
                outside = held.get(figures.node, _NOTHING_HELD).outside(figures)
                self._feed(events.NodeSeen(figures.node, figures.facts, outside))

    def adopt(self, known: Mapping[str, NodeJoined]) -> None:
        """After a restart: take over the nodes of the pool machine, and what was in progress with them."""
        self.known.update(known)
        for node, joined in known.items():
            if node not in self.machine.nodes:
                self._feed(events.NodeSeen(node, NodeFacts(joined.total, joined.labels), joined.outside))
        for node in known:
            if node in self.machine.nodes:
                self._restore_cordon(self.machine.nodes[node])
        self._set_timer()

    def _restore_cordon(self, record: TrackedNode) -> None:
        """Cordon or drain a node again if its state requires it."""
        if record.state is NodeState.draining:
            deadline = record.drain.deadline if record.drain is not None else None
            self._drain_node(events.DrainNode(record.id, deadline, record.reason))
        elif record.state is NodeState.suspect:
            self._cordon(record.id, record.reason.sentence)

    def _align_machines(self) -> None:
        """Make the pool machine agree with the node machine, after a crash between the two."""
        for node in list(self.known):
            record = self.machine.nodes.get(node)
            if record is None or not record.there:
                reason = record.reason if record is not None else Reason(ReasonCode.ray_lost, "Ray no longer lists it")
                self._lose_node(events.RemoveNode(node, reason))
        for record in self.machine.nodes.values():
            if record.in_use and record.id not in self.known and record.id not in self._joining:
                self._use_node(events.UseNode(record.id, record.facts, record.outside, record.reason))
            elif record.id in self.known and record.id not in self._cordoned:
                self._restore_cordon(record)

    def close(self) -> None:
        self._stopped = True
        self._heartbeats.close()
        for handle in (self._timer, *self._drain_timers.values()):
            if handle is not None:
                handle.cancel()
        for task in (*self._joining.values(), *self._leaving):
            task.cancel()
        self.journal.close()

    def _report_node(self, figures: NodeFigures, held: NodeHoldings) -> None:
        """Report changes of a node."""
        known = self.known.get(figures.node)
        outside = held.outside(figures)
        if known is not None:
            ready = all(state is PgState.ready for _, state in held.groups)
            settled = ready and held.groups == self._groups.get(figures.node)
            seen_twice = settled and self._last_outside.get(figures.node) == outside
            self._groups[figures.node], self._last_outside[figures.node] = held.groups, outside
            if not seen_twice or (figures.facts.total, figures.facts.labels) != (known.total, known.labels):
                outside = known.outside
        record = self.machine.nodes.get(figures.node)
        if record is None or not record.listed or (record.facts, record.outside) != (figures.facts, outside):
            self._feed(events.NodeSeen(figures.node, figures.facts, outside))
        if figures.node in self.known and figures.node not in self._released and record is not None and record.there:
            self._heartbeats.open(figures.node, figures.raylet)

    # ---- instructions of the node machine ---------------------------------------------------------------------

    def _execute(self, instruction: events.NodeInstruction) -> None:
        if isinstance(instruction, events.UseNode):
            self._use_node(instruction)
        elif isinstance(instruction, events.CordonNode):
            self._cordon(instruction.node, instruction.reason.sentence)
        elif isinstance(instruction, events.DrainNode):
            self._drain_node(instruction)
        elif isinstance(instruction, events.RemoveNode):
            self._lose_node(instruction)
        else:
            change = instruction.change
            log.info("change %d of nodes: %s", change.number, change.reason.sentence if change.reason else "")

    def _use_node(self, instruction: events.UseNode) -> None:
        node = instruction.node
        if self._cordoned.pop(node, None) is not None:
            self._cancel_drain_timer(node)
            if node in self.known:
                self._context.feed(NodeCordoned(node, False))
        if node in self.known:
            self._tell_pool(NodeJoined(node, instruction.facts.total, instruction.outside, instruction.facts.labels))
        elif node not in self._joining:
            self._released.discard(node)
            self._joining[node] = self._background.once(f"join node {node[:12]}", self._join(node))

    def _tell_pool(self, joined: NodeJoined) -> None:
        if self.known.get(joined.node) != joined:
            self.known[joined.node] = joined
            self._context.feed(joined)

    async def _join(self, node: str) -> None:
        try:
            # An agent first: no task runs on a node where it could not be ended.
            if node in self._was_lost:
                await self._workers.node_returned(node)
                self._was_lost.discard(node)
            else:
                await self._workers.node_joined(node, self._expected())
        except Exception as fault:
            log.warning("node %s is not used yet: %s", node[:12], fault)
            await asyncio.sleep(self._poll_s)
            known = self.machine.nodes.get(node)
            if known is not None and known.there:
                self._joining[node] = self._background.once(f"join node {node[:12]}", self._join(node))
            return
        finally:
            if self._joining.get(node) is asyncio.current_task():
                del self._joining[node]
        known = self.machine.nodes[node]
        self._tell_pool(NodeJoined(node, known.facts.total, known.outside, known.facts.labels))
        if node in self._cordoned:
            self._context.feed(NodeCordoned(node))
        if node in self._raylets:
            self._heartbeats.open(node, self._raylets[node])

    def _expected(self) -> dict[WarmWorkerKind, int]:
        """Warm workers that a joining node will need."""
        machine, environments = self._context.machine, self._context.environments
        pools = [pool.spec for pool in machine.pools.values()]
        expected = {environments.kind(pool): pool.hosts_each for pool in pools if pool.hosts_each}
        waiting = next(iter(machine.queue()), None)
        if waiting is not None:
            pool = machine.pools[machine.tasks[waiting].spec.pool].spec
            expected.setdefault(environments.task_kind(waiting, pool), 1)
        return expected

    def _cordon(self, node: str, why: str) -> None:
        if node not in self._cordoned and node in self.known:
            self._context.feed(NodeCordoned(node))
        self._cordoned[node] = why

    def _drain_node(self, instruction: events.DrainNode) -> None:
        """Cordon the node, and evict what is left some time before the deadline."""
        self._cordon(instruction.node, instruction.reason.sentence)
        self._cancel_drain_timer(instruction.node)
        left_s = None if instruction.deadline is None else instruction.deadline - self._context.now()
        wait_s = evict_after_s(left_s, self._context.machine.policy or PreemptionPolicy())
        loop = asyncio.get_running_loop()
        self._drain_timers[instruction.node] = loop.call_later(
            wait_s, self._evict_all, instruction.node, instruction.reason.sentence
        )

    def _evict_all(self, node: str, why: str) -> None:
        self._drain_timers.pop(node, None)
        if node in self.known:
            self._context.feed(NodeDrained(node, why))

    def _cancel_drain_timer(self, node: str) -> None:
        handle = self._drain_timers.pop(node, None)
        if handle is not None:
            handle.cancel()

    def _lose_node(self, instruction: events.RemoveNode) -> None:
        node = instruction.node
        self._cordoned.pop(node, None)
        self._cancel_drain_timer(node)
        self._released.discard(node)
        joining = self._joining.pop(node, None)
        if joining is not None:
            joining.cancel()
        if self.known.pop(node, None) is None:
            return
        self._was_lost.add(node)
        self._last_outside.pop(node, None)
        self._groups.pop(node, None)
        self._context.feed(NodeLost(node, instruction.reason.sentence))
        self._on_lost(node)
        self._leave_node(node, self._workers.node_lost(node))

    def _release_empty(self, held: Mapping[str, NodeHoldings]) -> None:
        """End agents and warm workers on drained nodes without tasks: Ray removes such a node only when it is idle."""
        for node in self._cordoned:
            known = self.machine.nodes.get(node)
            draining_ = known is not None and known.state is NodeState.draining
            if draining_ and node in self.known and node not in self._released and node not in held:
                self._released.add(node)
                self._heartbeats.mute(node)
                self._leave_node(node, self._workers.node_left(node))

    def _leave_node(self, node: str, work: Any) -> None:
        async def done() -> None:
            try:
                await asyncio.wait_for(work, ANSWER_S)
            except (TrimtabError, asyncio.TimeoutError) as fault:
                log.warning("processes on node %s could not be ended: %s", node[:12], describe(fault))
                self._released.discard(node)  # the next poll retries

        task = self._background.once(f"leave node {node[:12]}", done())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _held(self, without: str | None = None) -> dict[str, NodeHoldings]:
        """What our placement groups hold, by node; `without`: a group that could not be created."""
        groups: dict[str, list[tuple[str, PgState]]] = {}
        bundles: dict[str, list[Resources]] = {}
        for group in self._context.machine.groups.values():
            if group.id != without:
                for bundle, node in zip(group.bundles, group.nodes, strict=True):
                    groups.setdefault(node, []).append((group.id, group.state))
                    bundles.setdefault(node, []).append(bundle)
        return {node: NodeHoldings(tuple(groups[node]), total(bundles[node])) for node in groups}


def _open_journal(directory: Path, background: Background) -> tuple[Journal, NodeMachine, str | None]:
    """Open and replay the node journal. A damaged one is moved aside (Ray lists the nodes anyway); returns where to."""
    try:
        journal = Journal(directory, kinds=NODE_EVENTS, owner="nodes", background=background)
        return journal, _replay(journal), None
    except DamagedError as fault:
        aside = directory.with_name(f"{directory.name}.damaged-{time.time_ns()}")
        directory.rename(aside)
        note = f"{fault.what} ({fault.where}): set aside as {aside}; requested drains and the history of nodes are lost"
        log.error(note)
        journal = Journal(directory, kinds=NODE_EVENTS, owner="nodes", background=background)
        return journal, _replay(journal), note


def _replay(journal: Journal) -> NodeMachine:
    found = journal.take_contents()
    machine = NodeMachine.load(found.snapshot) if found.snapshot is not None else NodeMachine()
    for now, event in found.events:
        with contextlib.suppress(TrimtabError):
            machine.handle(event, now)
    return machine


def read_ray_nodes(ray: Any) -> RayNodesView:
    """Read Ray's nodes. Blocks; must not run on the event loop."""
    available = own_free_resources()
    seen, ended = [], {}
    for node in ray_nodes(ray):
        if not node.alive:
            ended[node.node_id] = node.death_reason
            continue
        everything = _own_amounts(node.resources)
        free = among(_own_amounts(available.get(node.node_id, node.resources)), everything)
        kind = next(filter(None, (*node.kinds, node.kind_label)), "")
        facts = NodeFacts(everything, node.labels, kind, node.address, node.given_name, node.head)
        seen.append(NodeFigures(node.node_id, facts, free, (node.address, node.port)))
    return RayNodesView(tuple(seen), ended, draining.draining(ray))


def _own_amounts(ray_amounts: Mapping[str, float]) -> Resources:
    return amounts({name: value for name, value in ray_amounts.items() if not name.startswith("node:")})
