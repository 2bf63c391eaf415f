"""Which nodes there are, and what others than trimtab hold of them: drives the machine of nodes.

Looks at Ray twice a second, keeps a link to every node, and tells the pool's machine what the machine of nodes decides:
who may be used, who is spared, who has to be emptied, who is lost. What others hold is what Ray calls taken less what
our groups hold; Ray's figures lag behind its own deeds, so a change counts only when it is seen twice while no group of
ours on that node is being made or removed, or when a group could not be made there. On the controller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import GRAIN, NOTHING, Resources, total
from trimtab.machines.nodes import events as events
from trimtab.machines.nodes.drain import evict_after_s
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.machines.nodes.state import TrackedNode
from trimtab.machines.pool.events import NodeCordoned, NodeDrained, NodeJoined, NodeLost, PoolEvent
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.records import PgState
from trimtab.model.nodes import NodeFacts, NodeState, NodeView
from trimtab.model.pool import Labels, PreemptionPolicy
from trimtab.runtime.controller.heartbeats import AgentAddress, NodeHeartbeats
from trimtab.runtime.procs.background import Background, describe
from trimtab.runtime.rayapi import draining
from trimtab.runtime.store.journal import NODE_EVENTS, DamagedError, Journal
from trimtab.runtime.workers.environments import RuntimeEnvironments, WarmWorkerKind
from trimtab.runtime.workers.task_workers import TaskWorkerManager

log = logging.getLogger("trimtab.controller")

LOOK_EVERY_S = 0.3
ANSWER_S = 30.0
SNAPSHOT_EVERY = 5_000  # events
MIN_TICK_S = 0.01
TICK_RETRY_S = 1.0  # after an event on which the machine failed
OUR_NAMES = {"CPU": "cpu", "GPU": "gpu"}
KIND_LABELS = ("ray.io/accelerator-type",)
EXPECTED_DEATHS = (1, 3, 4)  # Ray's reasons for the end of a node that somebody meant: SIGTERM, drained


@dataclass(frozen=True)
class RayNodeFigures:
    """A living node, in Ray's figures."""

    node: str
    total: Resources
    available: Resources
    labels: Labels
    head: bool = False
    kind: str = ""
    address: str = ""
    name: str = ""
    raylet: AgentAddress = ("", 0)

    @property
    def facts(self) -> NodeFacts:
        """What it has."""
        return NodeFacts(self.total, self.labels, self.kind, self.address, self.name, self.head)


@dataclass(frozen=True)
class RayNodesView:
    """What Ray says of its nodes at one time."""

    nodes: tuple[RayNodeFigures, ...]
    ended: Mapping[str, int] = field(default_factory=dict)  # by node that is dead: Ray's number for the reason
    draining: Mapping[str, float | None] = field(default_factory=dict)  # by node: deadline, in epoch seconds


@dataclass(frozen=True)
class NodeHoldings:
    """Our groups on one node, and what they hold of it."""

    groups: tuple[tuple[str, PgState], ...]
    amounts: Resources

    def outside(self, seen: RayNodeFigures) -> Resources:
        """What others hold of the node."""
        return seen.total.minus(seen.available).minus(self.amounts)


_NOTHING_HELD = NodeHoldings((), NOTHING)


class NodeMonitorContext(Protocol):
    """What the watch needs of the controller."""

    machine: PoolMachine
    environments: RuntimeEnvironments

    def feed(self, event: PoolEvent) -> None:
        """Tell the machine; never raises."""

    def now(self) -> float:
        """The time of all machines."""


class NodeMonitor:
    """Follows Ray's nodes. `known` are those that the pool's machine was told of."""

    def __init__(
        self,
        context: NodeMonitorContext,
        workers: TaskWorkerManager,
        ray: Any,
        directory: Path,
        on_lost: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._workers = workers
        self._background = workers.background
        self._ray = ray
        self._on_lost = on_lost
        self._on_change = on_change
        self.journal, self.machine, self.set_aside = _open_journal(directory, workers.background)
        self._heartbeats = NodeHeartbeats(
            self._on_heartbeat, workers.heartbeat_address, self.machine.policy.suspect_s, workers.background
        )
        self.known: dict[str, NodeJoined] = {}
        self._raylets: dict[str, AgentAddress] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._cordoned: dict[str, str] = {}  # nodes that take nothing new, and why
        self._drain_timers: dict[str, asyncio.TimerHandle] = {}
        self._released: set[str] = set()  # drained nodes where nothing of ours is left
        self._was_lost: set[str] = set()  # and may hold what was given up there
        self._leaving: set[asyncio.Task[None]] = set()
        self._last_outside: dict[str, Resources] = {}  # what others held by the last look
        self._groups: dict[str, tuple[tuple[str, PgState], ...]] = {}  # of ours, by the last look
        self._timer: asyncio.TimerHandle | None = None
        self._version = self.machine.version
        self._stopped = False
        self.fault: str | None = None

    # ---- the door of the machine of nodes ---------------------------------------------------------------------

    def handle(self, event: events.NodeEvent) -> None:
        """Tell the machine of nodes, and do what it says. Raises InputError where it refuses, nothing touched."""
        now = self._context.now()
        instructions = self.machine.handle(event, now)
        self.journal.append(now, event)
        if self.journal.since_snapshot >= SNAPSHOT_EVERY:
            self.journal.snapshot(now, self.machine.dump())
        for one in instructions:
            self._execute(one)
        self._set_timer()
        if self.machine.version != self._version:
            self._version = self.machine.version
            self._on_change()

    def views(self, *, gone: bool = False) -> tuple[NodeView, ...]:
        """All nodes that are there, in node order; or all that are remembered."""
        return self.machine.views(self._context.now(), gone)

    async def drain(self, node: str, deadline_s: float | None, cause: str) -> str:
        """Have a node emptied by a deadline (None: when it can), and tell Ray; the node's id."""
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
            log.info("%s was not taken: %s", type(event).__name__, fault.what)
        except Exception:
            log.exception("the machine of nodes failed on %s", event)
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

    # ---- looking ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look, again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.step()

    async def step(self, *, wait: bool = False) -> None:
        """Look once. With `wait`, newcomers are joined on return."""
        try:
            seen = await asyncio.wait_for(asyncio.to_thread(read_ray_nodes, self._ray), ANSWER_S)
            self.fault = None
        except Exception as fault:
            self.fault = f"Ray does not say which nodes there are: {fault or type(fault).__name__}"
            log.warning(self.fault)
            return
        alive = {one.node: one for one in seen.nodes}
        for node in [one.id for one in self.machine.nodes.values() if one.listed and one.id not in alive]:
            self._heartbeats.drop(node)
            self._feed(events.NodeGone(node, seen.ended.get(node, 0) in EXPECTED_DEATHS))
        held = self._held()
        for node, one in alive.items():
            self._raylets[node] = one.raylet
            self._report_node(one, held.get(node, _NOTHING_HELD))
        for node, deadline in seen.draining.items():
            if node in alive:
                self._feed(events.DrainRequested(node, self._from_epoch(deadline), "Ray drains it", by_ray=True))
        self._release_empty(held)
        self._align_machines()
        if wait and self._joining:
            await asyncio.wait(self._joining.values(), timeout=ANSWER_S)

    async def refresh(self, nodes: Collection[str], without: str) -> None:
        """A group could not be made on these nodes: tell at once what others hold there."""
        seen = await asyncio.wait_for(asyncio.to_thread(read_ray_nodes, self._ray), ANSWER_S)
        held = self._held(without)
        for one in seen.nodes:
            if one.node in nodes and one.node in self.known:
                outside = held.get(one.node, _NOTHING_HELD).outside(one)
                self._feed(events.NodeSeen(one.node, one.facts, outside))

    def adopt(self, known: Mapping[str, NodeJoined]) -> None:
        """After a restart: nodes that the pool's machine knows from before, and what was under way with them."""
        self.known.update(known)
        for node, joined in known.items():
            if node not in self.machine.nodes:
                self._feed(events.NodeSeen(node, NodeFacts(joined.total, joined.labels), joined.outside))
        for node in known:
            if node in self.machine.nodes:
                self._restore_cordon(self.machine.nodes[node])
        self._set_timer()

    def _restore_cordon(self, record: TrackedNode) -> None:
        """Have a node spared or emptied that is not, though it is to be."""
        if record.state is NodeState.draining:
            deadline = record.drain.deadline if record.drain is not None else None
            self._drain_node(events.DrainNode(record.id, deadline, record.reason))
        elif record.state is NodeState.suspect:
            self._cordon(record.id, record.reason.sentence)

    def _align_machines(self) -> None:
        """A controller that died between two machines left them apart: what the one of nodes says counts."""
        for node in list(self.known):
            record = self.machine.nodes.get(node)
            if record is None or not record.there:
                reason = (
                    record.reason
                    if record is not None
                    else Reason(ReasonCode.ray_lost, "Ray does not have it any more")
                )
                self._lose_node(events.RemoveNode(node, reason))
        for record in self.machine.nodes.values():
            if record.in_use and record.id not in self.known and record.id not in self._joining:
                self._use_node(events.UseNode(record.id, record.facts, record.outside, record.reason))
            elif record.id in self.known and record.id not in self._cordoned:
                self._restore_cordon(record)

    def close(self) -> None:
        """Stop looking."""
        self._stopped = True
        self._heartbeats.close()
        for handle in (self._timer, *self._drain_timers.values()):
            if handle is not None:
                handle.cancel()
        for task in (*self._joining.values(), *self._leaving):
            task.cancel()
        self.journal.close()

    def _report_node(self, one: RayNodeFigures, held: NodeHoldings) -> None:
        """Tell what is new of a node."""
        told = self.known.get(one.node)
        outside = held.outside(one)
        if told is not None:
            stands = all(stand is PgState.standing for _, stand in held.groups)
            settled = stands and held.groups == self._groups.get(one.node)
            seen_twice = settled and self._last_outside.get(one.node) == outside
            self._groups[one.node], self._last_outside[one.node] = held.groups, outside
            if not seen_twice or (one.total, one.labels) != (told.total, told.labels):
                outside = told.outside
        known = self.machine.nodes.get(one.node)
        if known is None or not known.listed or (known.facts, known.outside) != (one.facts, outside):
            self._feed(events.NodeSeen(one.node, one.facts, outside))
        if one.node in self.known and one.node not in self._released and known is not None and known.there:
            self._heartbeats.open(one.node, one.raylet)

    def _from_epoch(self, at: float | None) -> float | None:
        return None if at is None else self._context.now() + (at - time.time())

    # ---- what the machine of nodes says -----------------------------------------------------------------------

    def _execute(self, one: events.NodeInstruction) -> None:
        if isinstance(one, events.UseNode):
            self._use_node(one)
        elif isinstance(one, events.CordonNode):
            self._cordon(one.node, one.reason.sentence)
        elif isinstance(one, events.DrainNode):
            self._drain_node(one)
        elif isinstance(one, events.RemoveNode):
            self._lose_node(one)
        else:
            change = one.change
            log.info("change %d of nodes: %s", change.number, change.reason.sentence if change.reason else "")

    def _use_node(self, one: events.UseNode) -> None:
        node = one.node
        if self._cordoned.pop(node, None) is not None:
            self._cancel_drain_timer(node)
            if node in self.known:
                self._context.feed(NodeCordoned(node, False))
        if node in self.known:
            self._tell_pool(NodeJoined(node, one.facts.total, one.outside, one.facts.labels))
        elif node not in self._joining:
            self._released.discard(node)
            self._joining[node] = self._background.once(f"join node {node[:12]}", self._join(node))

    def _tell_pool(self, joined: NodeJoined) -> None:
        if self.known.get(joined.node) != joined:
            self.known[joined.node] = joined
            self._context.feed(joined)

    async def _join(self, node: str) -> None:
        try:
            # A warden first: nothing runs where nobody can end it.
            if node in self._was_lost:
                await self._workers.node_returned(node)
                self._was_lost.discard(node)
            else:
                await self._workers.node_joined(node, self._expected())
        except Exception as fault:
            log.warning("node %s is not used yet: %s", node[:12], fault)
            await asyncio.sleep(LOOK_EVERY_S)
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
        """Hosts that a node will need as soon as it is used."""
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

    def _drain_node(self, one: events.DrainNode) -> None:
        """Nothing new goes there; whoever is there yet a while before the deadline is evicted."""
        self._cordon(one.node, one.reason.sentence)
        self._cancel_drain_timer(one.node)
        left_s = None if one.deadline is None else one.deadline - self._context.now()
        wait_s = evict_after_s(left_s, self._context.machine.policy or PreemptionPolicy())
        loop = asyncio.get_running_loop()
        self._drain_timers[one.node] = loop.call_later(wait_s, self._evict_all, one.node, one.reason.sentence)

    def _evict_all(self, node: str, why: str) -> None:
        self._drain_timers.pop(node, None)
        if node in self.known:
            self._context.feed(NodeDrained(node, why))

    def _cancel_drain_timer(self, node: str) -> None:
        handle = self._drain_timers.pop(node, None)
        if handle is not None:
            handle.cancel()

    def _lose_node(self, one: events.RemoveNode) -> None:
        node = one.node
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
        self._context.feed(NodeLost(node, one.reason.sentence))
        self._on_lost(node)
        self._leave_node(node, self._workers.node_lost(node))

    def _release_empty(self, held: Mapping[str, NodeHoldings]) -> None:
        """A drained node goes by itself once nothing is on it: wardens and warm hosts must not hold it up."""
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
                log.warning("node %s could not be left in order: %s", node[:12], describe(fault))
                self._released.discard(node)  # the next look tries again

        task = self._background.once(f"leave node {node[:12]}", done())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _held(self, without: str | None = None) -> dict[str, NodeHoldings]:
        """By node, what our groups hold, other than one that could not be made."""
        groups: dict[str, list[tuple[str, PgState]]] = {}
        bundles: dict[str, list[Resources]] = {}
        for group in self._context.machine.groups.values():
            if group.id != without:
                for bundle, node in zip(group.bundles, group.nodes, strict=True):
                    groups.setdefault(node, []).append((group.id, group.stand))
                    bundles.setdefault(node, []).append(bundle)
        return {node: NodeHoldings(tuple(groups[node]), total(bundles[node])) for node in groups}


def _open_journal(directory: Path, background: Background) -> tuple[Journal, NodeMachine, str | None]:
    """The journal of nodes, what it says, and, where it was damaged, where it was put: Ray knows its nodes as well."""
    try:
        journal = Journal(directory, kinds=NODE_EVENTS, owner="nodes", background=background)
        return journal, _replay(journal), None
    except DamagedError as fault:
        aside = directory.with_name(f"{directory.name}.damaged-{time.time_ns()}")
        directory.rename(aside)
        said = f"{fault.what} ({fault.where}): set aside as {aside}; drains asked for and the history of nodes are lost"
        log.error(said)
        journal = Journal(directory, kinds=NODE_EVENTS, owner="nodes", background=background)
        return journal, _replay(journal), said


def _replay(journal: Journal) -> NodeMachine:
    found = journal.take_contents()
    machine = NodeMachine.load(found.snapshot) if found.snapshot is not None else NodeMachine()
    for now, event in found.events:
        with contextlib.suppress(TrimtabError):
            machine.handle(event, now)
    return machine


def read_ray_nodes(ray: Any) -> RayNodesView:
    """Ray's nodes, now. Blocks; not for the loop."""
    from ray._private import state  # Ray has no public call for what is available on each node

    available = state.available_resources_per_node()
    seen = []
    ended = {}
    for node in ray.nodes():
        if not node.get("Alive"):
            ended[str(node["NodeID"])] = int(node.get("DeathReason") or 0)
            continue
        amounts = node.get("Resources", {})
        labels = tuple(sorted((str(key), str(value)) for key, value in (node.get("Labels") or {}).items()))
        everything = amounts_of(amounts)
        free = amounts_of(available[node["NodeID"]]) if node["NodeID"] in available else everything
        address = str(node.get("NodeManagerAddress") or "")
        name = str(node.get("NodeName") or "")
        seen.append(
            RayNodeFigures(
                str(node["NodeID"]),
                everything,
                _among(free, everything),
                labels,
                head=draining.HEAD in amounts,
                kind=_kind(amounts, labels),
                address=address,
                name="" if name == address else name,
                raylet=(address, int(node.get("NodeManagerPort") or 0)),
            )
        )
    return RayNodesView(tuple(seen), ended, draining.draining(ray))


def _kind(amounts: Mapping[str, float], labels: Labels) -> str:
    """The kind of a node's accelerators, as Ray names it."""
    found = [name.removeprefix("accelerator_type:") for name in amounts if name.startswith("accelerator_type:")]
    said = [value for key, value in labels if key in KIND_LABELS]
    return next(iter((*sorted(found), *said)), "")


def amounts_of(amounts: Mapping[str, float]) -> Resources:
    """Ray's amounts in our words, without what Ray keeps for itself."""
    ours = {OUR_NAMES.get(name, name): amount for name, amount in amounts.items() if _is_ours(name)}
    units = [(name, math.floor(amount * GRAIN + 0.5)) for name, amount in sorted(ours.items())]
    return Resources(tuple((name, amount) for name, amount in units if amount > 0))


def _is_ours(name: str) -> bool:
    kept_by_ray = name.startswith(("node:", "bundle_")) or "_group_" in name
    return not kept_by_ray and name != "object_store_memory"


def _among(amounts: Resources, known: Resources) -> Resources:
    names = {name for name, _ in known}
    return Resources(tuple((name, units) for name, units in amounts if name in names)) if amounts else NOTHING
