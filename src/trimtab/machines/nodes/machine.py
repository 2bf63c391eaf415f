"""The node machine: which nodes are up, which may be used, and when changes are announced to elastic groups.

`handle(event)` is the only entry point; it reads no clock, and the same events give the same instructions.

The transition that must not exist is lost to ready because Ray still lists the node. Ray lists a killed node for 15 s
and a frozen one for 60 s; if that brought it back, everything that was just moved away would be placed there again, and
be lost again. A lost node returns when its own connection has a heartbeat, or when Ray dropped it and lists it anew.
Nor is a node ever lost by a NodeTick: only a HeartbeatMissed event tells how long a connection was silent, or a machine
that was itself suspended would lose every node on waking.

What must never happen besides: an announcement per flap of a node (nodes that were lost too often are held, longer each
time); a late announcement of a drain; memory that grows with the nodes of the past.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.errors import InputError, meant
from trimtab.core.machine import Machine, Timers, earliest, on
from trimtab.core.reasons import STORY_KEPT, Reason, ReasonCode, StoryEntry, add_story_entry
from trimtab.machines.nodes import events as e
from trimtab.machines.nodes.explain import change_reason, departure_text, duration_text, gpu_text, resources_text
from trimtab.machines.nodes.state import (
    Announced,
    NodeDrain,
    NodeShape,
    NodesState,
    TrackedNode,
    is_sooner,
    name_of,
    node_order,
    to_announce,
)
from trimtab.model.nodes import NodeChange, NodePolicy, NodeState, NodeView

SAME_S = 1.0  # deadlines closer than this are the same, read from two clocks


class NodeMachine(Machine[NodesState, e.NodeEvent, e.NodeInstruction]):
    """Nodes as they join and leave."""

    EVENTS = e.NodeEvent

    def __init__(self, policy: NodePolicy = NodePolicy(), state: NodesState | None = None) -> None:  # noqa: B008
        """`state` is that of a dump, to be continued by this policy."""
        state = NodesState(policy, 0.0, 0, 0, {}) if state is None else state
        super().__init__(state, state, [])
        state.policy = self.policy = policy
        self.nodes: Mapping[str, TrackedNode] = state.nodes  # for drivers, to read
        # Derived from the state.
        self._kinds: Counter[NodeShape] = Counter()  # of nodes that are up; no zero counts
        self._timers = Timers[str](self._due)
        self._by_name: dict[str, str] = {}  # by given name: the node that had it last
        self._order: list[TrackedNode] = []  # all, in node order
        self._unannounced: dict[str, TrackedNode] = {}  # that have a `announce_by`
        self._common: NodeShape | None = None
        self._common_known = False
        self._views: dict[str, NodeView] = {}  # up-to-date ones
        self._seen: tuple[int, tuple[NodeView, ...]] = (-1, ())  # by version
        self._announce_due = False  # since the current event
        for node in state.nodes.values():
            self._remember(node)
            self._count(node, 1)
            self._timers.arm(node.id)
            if node.announce_by is not None:
                self._unannounced[node.id] = node

    @classmethod
    def load(cls, data: dict[str, Any], policy: NodePolicy | None = None) -> NodeMachine:
        state = decode(NodesState, {**data, "nodes": {node["id"]: node for node in data["nodes"]}})
        return cls(policy or state.policy, state)

    def dump(self) -> dict[str, Any]:
        data = super().dump()
        return {**data, "nodes": list(data["nodes"].values())}

    def settle(self) -> None:
        if self._announce_due:
            self._announce()

    def next_deadline(self) -> float | None:
        return self._timers.next()

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def last_change(self) -> int:
        return self.state.last_change

    # ---- events of Ray ----------------------------------------------------------------------------------------------

    @on(e.NodeSeen)
    def _on_node_seen(self, event: e.NodeSeen) -> None:
        node = self.nodes.get(event.node)
        if node is None:
            self._new_to_there(event)
            return
        changed = node.facts != event.facts or node.outside != event.outside
        if changed:
            self._update_facts(node, event)
        if not node.listed:
            node.listed = True
            self._gone_to_there(node, Reason(ReasonCode.returned, "Ray lists it again"))
        elif changed and node.state is NodeState.ready:
            self._use(node, Reason(ReasonCode.changed, resources_text(node.facts, node.outside)))
        if changed:
            self._changed(node)

    @on(e.NodeGone)
    def _on_node_gone(self, event: e.NodeGone) -> None:
        node = self.nodes.get(event.node)
        if node is None or not node.listed:
            return
        announced = event.expected or node.drain is not None
        node.listed = False
        if node.there and announced:
            self._there_to_left(node, Reason(ReasonCode.left, departure_text(node, "Ray reports an orderly end")))
        elif node.there:
            self._there_to_lost(node, Reason(ReasonCode.ray_lost, "Ray no longer lists it"))
        elif event.expected and node.state is NodeState.lost:
            self._lost_to_left(node, Reason(ReasonCode.left, "its connection broke because it ended in order"))
        node.drain = None  # a node that returns under this id is not draining
        self._changed(node)
        self._timers.arm(node.id)

    # ---- events of connections --------------------------------------------------------------------------------------

    @on(e.HeartbeatReceived)
    def _on_heartbeat_received(self, event: e.HeartbeatReceived) -> None:
        node = self.nodes.get(event.node)
        if node is None:
            return
        node.silent = False
        if node.state is NodeState.suspect:
            self._to_ready(node, Reason(ReasonCode.returned, "its heartbeats are back"))
        elif not node.there and node.listed:
            self._gone_to_there(node, Reason(ReasonCode.returned, "its heartbeats are back"))

    @on(e.HeartbeatMissed)
    def _on_heartbeat_missed(self, event: e.HeartbeatMissed) -> None:
        node = self.nodes.get(event.node)
        if node is None or not node.there or event.silent_s < self.policy.suspect_s:
            return
        node.silent = True
        reason = Reason(ReasonCode.link_silent, f"no heartbeat for {event.silent_s:.3g} s")
        if event.silent_s >= self.policy.lost_s:
            self._there_to_lost(node, reason)
        elif node.state is NodeState.ready:
            self._ready_to_suspect(node, reason)
        elif node.state is NodeState.held:
            self._hold_longer(node)

    @on(e.ConnectionBroken)
    def _on_connection_broken(self, event: e.ConnectionBroken) -> None:
        node = self.nodes.get(event.node)
        if node is None or not node.there:
            return
        if node.state is NodeState.draining:
            self._there_to_left(node, Reason(ReasonCode.left, departure_text(node, event.why)))
        else:
            self._there_to_lost(node, Reason(ReasonCode.link_broken, event.why))

    # ---- drains ----------------------------------------------------------------------------------------------------

    @on(e.DrainRequested)
    def _on_drain_requested(self, event: e.DrainRequested) -> None:
        node = self._node_to_drain(event)
        if not node.there:
            return
        before = node.drain
        code = ReasonCode.drain_seen if event.by_ray else ReasonCode.drain_asked
        deadline = None if event.deadline is None else max(float(event.deadline), self.now)
        reason = Reason(code, event.cause + duration_text("given", deadline, self.now))
        drain = NodeDrain(deadline, event.deadline, reason)
        if before is None:
            node.drain = drain
            self._to_draining(node)
        elif (before.requested, before.reason.code) == (drain.requested, code):
            return
        elif is_sooner(deadline, before.deadline, SAME_S) or code is before.reason.code is ReasonCode.drain_asked:
            # Ray repeats its drains and ours, by another clock; and no request postpones a drain by Ray.
            node.drain = drain
            self._record(node, node.state, drain.reason)
            self._drain(node)
            self._update_announcement(node)

    def _node_to_drain(self, event: e.DrainRequested) -> TrackedNode:
        node = self.nodes.get(event.node)
        if node is None:
            known = sorted(name for name, node in self.nodes.items() if node.there)
            hint = meant(event.node, known, f"nodes: {', '.join(known[:8]) or 'none'}")
            raise InputError(f"there is no node {event.node}", hint=hint)
        if node.facts.head:
            raise InputError(
                f"node {node.display_name} is the head: the cluster ends with it",
                hint="drain workers, or stop the cluster",
            )
        if not node.there and not event.by_ray:
            raise InputError(f"node {node.display_name} is gone already", hint=str(node.reason))
        return node

    @on(e.DrainCancelled)
    def _on_drain_cancelled(self, event: e.DrainCancelled) -> None:
        node = self.nodes.get(event.node)
        if node is None or node.drain is None:
            return
        node.drain = None
        if node.state is NodeState.draining:
            self._draining_to_there(node, Reason(ReasonCode.drain_over, "it stays after all"))

    # ---- time ------------------------------------------------------------------------------------------------------

    @on(e.NodeTick)
    def _on_node_tick(self, event: e.NodeTick) -> None:
        while (due := self._timers.pop_due(self.now)) is not None:
            node = self.nodes[due]
            if node.announce_by is not None and node.announce_by <= self.now:
                self._announce()
            if not node.there and not node.listed and node.since + self.policy.forget_s <= self.now:
                self._gone_to_forgotten(node)
                continue
            if node.state is NodeState.held and node.hold_until is not None and node.hold_until <= self.now:
                self._held_to_ready(node)
            if node.losses and node.losses[0] + self.policy.forget_s <= self.now:
                self._forget_losses(node)
                self._changed(node)
            self._timers.arm(node.id)

    def _due(self, name: str) -> float | None:
        """When time alone changes something about the node."""
        node = self.nodes.get(name)
        if node is None:
            return None
        forget_s = self.policy.forget_s
        return earliest(
            node.announce_by,
            node.losses[0] + forget_s if node.losses else None,
            node.hold_until if node.state is NodeState.held else None,
            node.since + forget_s if not node.listed and not node.there else None,
        )

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _new_to_there(self, event: e.NodeSeen) -> None:
        reason = Reason(ReasonCode.joined, "Ray lists it for the first time")
        place = name_of(event.facts)
        node = TrackedNode(event.node, event.facts, event.outside, self.now, NodeState.lost, reason, self.now, place)
        before = self.nodes.get(self._by_name.get(place, ""))
        if before is not None and not before.there:
            # The same node, restarted: its losses under the other id still count.
            node.losses = list(before.losses)
        self._remember(node)
        self._gone_to_there(node, reason)

    def _gone_to_there(self, node: TrackedNode, reason: Reason) -> None:
        node.silent = False
        self._forget_losses(node)
        over = len(node.losses) - self.policy.free_losses
        node.hold_until = None
        if over > 0:
            node.hold_until = self.now + min(self.policy.max_hold_s, self.policy.hold_s * 2.0 ** min(over - 1, 64))
        if node.drain is not None:
            self._to_draining(node)
        elif node.hold_until is not None:
            self._to_held(node)
        else:
            self._to_ready(node, self._with_gpus(node, reason))

    def _to_ready(self, node: TrackedNode, reason: Reason) -> None:
        self._to(node, NodeState.ready, reason)
        self._use(node, reason)

    def _to_held(self, node: TrackedNode) -> None:
        sentence = f"it was lost {len(node.losses)} times within {self.policy.forget_s:g} s"
        sentence += duration_text("held for", node.hold_until, self.now)
        self._to(node, NodeState.held, Reason(ReasonCode.flapping, sentence))

    def _held_to_ready(self, node: TrackedNode) -> None:
        node.hold_until = None
        self._to_ready(node, Reason(ReasonCode.steady, f"it has been steady for {self.now - node.since:.3g} s"))

    def _hold_longer(self, node: TrackedNode) -> None:
        """It fell silent while held: the hold starts again."""
        hold_until = max(node.hold_until or 0.0, self.now + self.policy.hold_s)
        if hold_until != node.hold_until:
            node.hold_until = hold_until
            self._changed(node)
            self._timers.arm(node.id)

    def _ready_to_suspect(self, node: TrackedNode, reason: Reason) -> None:
        self._to(node, NodeState.suspect, reason)
        if node.in_use:
            self._out.append(e.CordonNode(node.id, reason))

    def _to_draining(self, node: TrackedNode) -> None:
        assert node.drain is not None
        self._to(node, NodeState.draining, node.drain.reason)
        self._drain(node)

    def _draining_to_there(self, node: TrackedNode, reason: Reason) -> None:
        if node.hold_until is not None and node.hold_until > self.now and not node.in_use:
            self._to_held(node)
        elif node.silent:
            self._ready_to_suspect(node, Reason(ReasonCode.link_silent, "it stays, but sends no heartbeat"))
        else:
            self._to_ready(node, reason)

    def _there_to_lost(self, node: TrackedNode, reason: Reason) -> None:
        self._forget_losses(node)
        node.losses.append(self.now)
        self._to(node, NodeState.lost, reason)
        self._remove(node)

    def _there_to_left(self, node: TrackedNode, reason: Reason) -> None:
        self._to(node, NodeState.left, reason)
        self._remove(node)

    def _lost_to_left(self, node: TrackedNode, reason: Reason) -> None:
        """It was no loss: the connection broke before the orderly end was reported."""
        if node.losses and node.losses[-1] == node.since:
            node.losses.pop()
        self._to(node, NodeState.left, reason)

    def _gone_to_forgotten(self, node: TrackedNode) -> None:
        del self.state.nodes[node.id]
        self._order.remove(node)
        self._changed(node)
        if node.place and self._by_name.get(node.place) == node.id:
            del self._by_name[node.place]

    # ---- common to all transitions ----------------------------------------------------------------------------------

    def _to(self, node: TrackedNode, state: NodeState, reason: Reason) -> None:
        self._count(node, -1)
        if state is not node.state or not node.story:
            node.since = self.now
        self._record(node, state, reason)
        node.state = state
        self._count(node, 1)
        self._update_announcement(node)

    def _record(self, node: TrackedNode, state: NodeState, reason: Reason) -> None:
        node.reason = reason
        add_story_entry(node.story, StoryEntry(self.now, state.value, reason))
        self._changed(node)

    def _remember(self, node: TrackedNode) -> None:
        self.state.nodes[node.id] = node
        insort(self._order, node, key=node_order)
        if node.place:
            self._by_name[node.place] = node.id

    def _changed(self, node: TrackedNode) -> None:
        self._views.pop(node.id, None)
        self.state.version += 1

    def _update_facts(self, node: TrackedNode, event: e.NodeSeen) -> None:
        self._count(node, -1)
        head = node.facts.head
        node.facts, node.outside = event.facts, event.outside
        if head != node.facts.head:
            self._order.sort(key=node_order)
        self._count(node, 1)

    def _count(self, node: TrackedNode, sign: int) -> None:
        if node.kind is not None:
            self._kinds[node.kind] += sign
            if not self._kinds[node.kind]:
                del self._kinds[node.kind]
            self._common_known = False

    def _forget_losses(self, node: TrackedNode) -> None:
        node.losses = [at for at in node.losses if at + self.policy.forget_s > self.now]

    # ---- instructions: only nodes in use are cordoned, drained and removed ----

    def _use(self, node: TrackedNode, reason: Reason) -> None:
        node.in_use = True
        self._out.append(e.UseNode(node.id, node.facts, node.outside, reason))

    def _drain(self, node: TrackedNode) -> None:
        if node.in_use and node.drain is not None:
            self._out.append(e.DrainNode(node.id, node.drain.deadline, node.drain.reason))

    def _remove(self, node: TrackedNode) -> None:
        if node.in_use:
            node.in_use = False
            self._out.append(e.RemoveNode(node.id, node.reason))

    # ---- announcements ----------------------------------------------------------------------------------------------

    def _update_announcement(self, node: TrackedNode) -> None:
        """Schedule an announcement of the node, or cancel it if what was announced is true again."""
        if node.state is NodeState.left and node.announced is Announced.draining:
            node.announced = Announced.absent  # its departure was announced by the drain
        what = to_announce(node)
        if what is node.announced:
            node.announce_by = None
            self._unannounced.pop(node.id, None)
        else:
            by = self.now + self._window_s(node, what)
            node.announce_by = by if node.announce_by is None else min(by, node.announce_by)
            self._unannounced[node.id] = node
            self._announce_due = self._announce_due or node.announce_by <= self.now
        self._timers.arm(node.id)

    def _window_s(self, node: TrackedNode, what: Announced) -> float:
        """How long the announcement may wait for more changes."""
        if what is Announced.used:
            return self.policy.join_window_s
        deadline = node.drain.deadline if node.drain is not None else None
        if what is Announced.absent or (deadline is not None and deadline - self.now < self.policy.urgent_drain_s):
            return 0.0
        return self.policy.drain_window_s

    def _announce(self) -> None:
        """Announce all pending changes as one; due joins leave pending drains their longer window."""
        pending = list(self._unannounced.values())
        if all(to_announce(node) is Announced.used for node in pending if (node.announce_by or 0.0) <= self.now):
            pending = [node for node in pending if to_announce(node) is Announced.used]
        announced: dict[Announced, list[TrackedNode]] = {what: [] for what in Announced}
        for node in sorted(pending, key=node_order):
            node.announced, node.announce_by = to_announce(node), None
            del self._unannounced[node.id]
            announced[node.announced].append(node)
            self._changed(node)
            self._timers.arm(node.id)
        self._announce_due = False
        if not pending:
            return
        changes = announced[Announced.used], announced[Announced.draining], announced[Announced.absent]
        joined, draining, lost = (tuple(node.id for node in nodes) for nodes in changes)
        self.state.last_change += 1
        change = NodeChange(self.last_change, self.now, joined, draining, lost, change_reason(*changes))
        self._out.append(e.AnnounceNodeChange(change))

    # ---- queries ----------------------------------------------------------------------------------------------------

    def views(self, gone: bool = False) -> tuple[NodeView, ...]:
        """Nodes that are up, in node order (head first, then by join time); with `gone` all remembered ones.

        As of the last event: changes by time alone are visible after the next NodeTick.
        """
        if self._seen[0] != self.version:
            self._seen = (self.version, tuple(self._view(node) for node in self._order if node.there))
        return tuple(self._view(node) for node in self._order) if gone else self._seen[1]

    def story(self, node: str) -> tuple[StoryEntry, ...]:
        return tuple(self.nodes[node].story) if node in self.nodes else ()

    def _view(self, node: TrackedNode) -> NodeView:
        common = self._most_common()  # clears all views where it changed
        view = self._views.get(node.id)
        if view is None:
            view = self._views[node.id] = node.view(common)
        return view

    def _most_common(self) -> NodeShape | None:
        """The accelerators of most nodes; among equals, those of the first in node order."""
        if not self._common_known:
            most = max(self._kinds.values(), default=0)
            kinds = [kind for kind, count in self._kinds.items() if count == most]
            first = kinds if len(kinds) == 1 else (node.kind for node in self._order if node.kind in kinds)
            common = next(iter(first), None)
            if common != self._common:
                self._views.clear()
            self._common, self._common_known = common, True
        return self._common

    def _with_gpus(self, node: TrackedNode, reason: Reason) -> Reason:
        """The reason, with the GPUs of the node. The node itself is not counted yet."""
        mine, common = (node.facts.kind, node.facts.total.get("gpu")), self._most_common()
        if not mine[1]:
            return Reason(reason.code, f"{reason.sentence}; it has no GPU")
        if common is not None and mine != common:
            sentence = f"{reason.sentence}; it has {gpu_text(mine)}, most have {gpu_text(common)}"
            return Reason(ReasonCode.unlike, sentence)
        return Reason(reason.code, f"{reason.sentence}; it has {gpu_text(mine)}")

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self._timers.missing(self.nodes), f"nothing wakes {self._timers.missing(self.nodes)}"
        for name, node in self.nodes.items():
            assert name == node.id
            assert node.story[-1].state == node.state.value, f"{name}: story"
            assert node.reason.sentence, f"{name} has no reason"
            assert node.there or not node.in_use, f"{name} is gone, and used"
            held = node.hold_until is not None and not node.in_use
            assert node.state is not NodeState.held or held, f"{name}: held"
            assert node.state is not NodeState.ready or (node.in_use and node.drain is None), f"{name}: ready"
            assert (node.state is NodeState.draining) == (node.there and node.drain is not None), f"{name}: drain"
            assert (node.announce_by is None) == (node.announced is to_announce(node)), f"{name}: announced"
            assert node.there or node.listed or self._due(name) is not None, f"{name} is never forgotten"
            assert (name in self._unannounced) == (node.announce_by is not None), f"{name}: untold"
            assert len(node.story) <= STORY_KEPT, f"{name}: its story grows"
        assert self._kinds == Counter(node.kind for node in self.nodes.values() if node.kind is not None), "kinds"
        assert self._order == sorted(self.nodes.values(), key=node_order), "order"
        assert self._unannounced.keys() <= self.nodes.keys(), "untold"
        assert all(name in self.nodes for name in self._by_name.values()), "a name of a forgotten node"
