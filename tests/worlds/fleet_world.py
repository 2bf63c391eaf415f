"""A world in memory around the machines of nodes and of a group: it carries instructions out and puts faults in.

It keeps books of its own of what really is: nodes that live, freeze and die, what Ray lists of them, a small pool that
places members where it was told that it may, processes with the state that they have, worlds and steps. After every
event it asserts what must be true of that. It believes nothing that a machine says of itself.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.elastic import events as g
from trimtab.machines.elastic.machine import ElasticMachine
from trimtab.machines.elastic.members import GRACE_S
from trimtab.machines.nodes import events as n
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.model.nodes import ElasticSpec, NodeChange, NodeFacts, NodePolicy, NodeState, NodeView, World

UNIT = Resources.of(gpu=1)
PLANNED = (ReasonCode.node_draining, ReasonCode.shrink, ReasonCode.priority)
NO_ROOM = Reason(ReasonCode.no_room, "no node has enough free")


def facts(gpus: float = 1, *, kind: str = "H100", head: bool = False, name: str = "") -> NodeFacts:
    return NodeFacts(Resources.of(gpu=gpus, cpu=1), kind=kind if gpus else "", head=head, name=name)


def node_view(
    name: str, state: NodeState = NodeState.ready, *, gpus: float = 1, deadline: float | None = None
) -> NodeView:
    return NodeView(name, state, facts(gpus), Reason(ReasonCode.joined, "it came"), 0.0, deadline=deadline)


@dataclass
class TrueNode:
    """A node as it really is."""

    facts: NodeFacts
    outside: Resources = NOTHING
    alive: bool = True
    frozen_since: float | None = None
    listed: bool = True  # by Ray
    noticed: bool = True  # the link has told of its death

    @property
    def gpus(self) -> int:
        return self.facts.total.minus(self.outside).get("gpu") // UNIT.get("gpu")


@dataclass
class TrueMember:
    """A member as it really is."""

    state: str = "queued"  # queued, starting, running, dead
    node: str = ""
    mind: int | None = None  # steps that are in its state
    ending: bool = False
    said: str = ""  # what was last said of it to the group: waits, runs, gone
    queues: bool = False  # that was said, or is on its way
    born: int = 0  # how often it was constructed
    seen: int = 0  # as which of these it entered its world


class FleetWorld:
    def __init__(self, spec: ElasticSpec, policy: NodePolicy | None = None) -> None:
        self.spec, self.now = spec, 100.0
        self.policy = policy or NodePolicy()
        self.nodes, self.group = NodeMachine(self.policy), ElasticMachine(spec)
        self.journal: list[tuple[str, float, object, tuple[object, ...]]] = []
        self.counts: Counter[str] = Counter()
        # Nodes.
        self.truth: dict[str, TrueNode] = {}
        self.barred: set[str] = set()  # lost, and neither heard nor dropped by Ray since
        self.drains: set[str] = set()  # that were asked and are not over
        self.used: dict[str, NodeFacts] = {}  # the pool's nodes
        self.open: set[str] = set()  # those of them that take something new
        self.believed: dict[str, str] = {}  # what groups were told by changes
        self.changes: list[NodeChange] = []
        self.told_lost: dict[str, list[float]] = {}
        # The group.
        self.members: dict[str, TrueMember] = {}
        self.inbox: list[g.ElasticEvent] = []
        self.told_nodes: tuple[NodeView, ...] = ()
        self.told_version = -1
        self.worlds: dict[int, World] = {}
        self.world: World | None = None  # the last one that was really entered
        self.entering: g.EnterWorld | None = None
        self.step: g.RunStep | None = None
        self.interrupt = False
        self.begun: set[int] = set()
        self.done = 0
        self.health: set[str] = set()
        self.asked_units: int | None = None
        self.waits_for_step = False
        self.ended: g.FailGroup | None = None
        self.closed = False
        self.broken = False  # something was found to be wrong

    # ---- the doors of the machines ---------------------------------------------------------------------------------

    def tell_nodes(self, event: n.NodeEvent) -> list[n.NodeInstruction]:
        self.broken = True
        if isinstance(event, n.HeartbeatReceived):
            self.barred.discard(event.node)
        elif isinstance(event, n.NodeGone):
            self.barred.discard(event.node)
            self.drains.discard(event.node)
        elif isinstance(event, n.DrainCancelled):
            self.drains.discard(event.node)
        version, before = self.nodes.version, self.nodes.views(gone=True)
        there = {one.node for one in self.nodes.views()}
        out = self.nodes.handle(event, self.now)
        self.journal.append(("nodes", self.now, event, tuple(out)))
        self.nodes.check()
        if isinstance(event, n.DrainRequested) and event.node in there:
            self.drains.add(event.node)
        for one in out:
            self._judge_node(one)
        for one in out:
            if isinstance(one, n.RemoveNode):
                assert self.believed.get(one.node) != "used", "a loss is not told at once"
        assert self.nodes.version != version or self.nodes.views(gone=True) == before, "a change unseen"
        self._judge_views()
        if isinstance(event, n.ConnectionBroken) and self.truth[event.node].listed:
            self.barred.add(event.node)
        self.broken = False
        return out

    def tell(self, event: g.ElasticEvent) -> list[g.ElasticInstruction]:
        self.broken = True
        if isinstance(event, g.NodesChanged):
            self.told_nodes = event.nodes
        if self.entering is not None and self.now >= self.entering.deadline + GRACE_S:
            self.entering = None  # whoever was to tell the members is not heard of any more
        out = self.group.handle(event, self.now)
        self.journal.append(("group", self.now, event, tuple(out)))
        self.group.check()
        assert not out or not self.closed, "it goes on after its end"
        for one in out:
            self._judge_group(one, out)
        self._judge_deadlines()
        self.broken = False
        return out

    # ---- what must be true of nodes --------------------------------------------------------------------------------

    def _judge_node(self, one: n.NodeInstruction) -> None:
        if isinstance(one, n.AnnounceNodeChange):
            self._judge_change(one.change)
            return
        assert one.reason.sentence
        if isinstance(one, n.UseNode):
            assert one.node not in self.barred, "a lost node is used because Ray still lists it"
            assert one.node not in self.drains, "a draining node is used"
            self.used[one.node] = one.facts
            self.open.add(one.node)
            self.counts["uses"] += 1
            return
        assert one.node in self.used, f"{one} of a node that the pool does not know"
        self.open.discard(one.node)
        if isinstance(one, n.RemoveNode):
            del self.used[one.node]
            self.barred.add(one.node)
            self.counts["losses"] += 1
            for name, member in self.members.items():
                if member.node == one.node and member.state in ("starting", "running"):
                    self._die(name, f"node {one.node} is gone")
            if not self.truth[one.node].listed:
                self.barred.discard(one.node)

    def _judge_change(self, change: NodeChange) -> None:
        self.changes.append(change)
        assert change.number == len(self.changes)
        assert change.reason is not None
        assert change.reason.sentence
        named = [*change.joined, *change.draining, *change.lost]
        assert named, "a change of nothing"
        assert len(set(named)) == len(named), "a node twice in one change"
        for name in change.joined:
            assert self.believed.get(name) != "used", f"{name} joined twice"
            self.believed[name] = "used"
        for name in change.draining:
            assert self.believed.get(name) == "used"
            self.believed[name] = "draining"
        for name in change.lost:
            assert self.believed.pop(name, None) is not None, f"{name} is lost to groups that never knew it"
            self.told_lost.setdefault(name, []).append(self.now)
            recent = [at for at in self.told_lost[name] if at > self.now - self.policy.forget_s]
            assert len(recent) <= self.flaps_most(), f"{name}: a change per flap"
        self.counts["changes"] += 1

    def flaps_most(self) -> int:
        """How often a node can be used and lost again within the time of memory: each hold is twice as long."""
        policy, held_s, times = self.policy, 0.0, self.policy.free_losses + 1
        hold_s = policy.hold_s
        while held_s <= policy.forget_s and hold_s > 0:
            held_s, hold_s, times = held_s + hold_s, min(policy.max_hold_s, hold_s * 2), times + 1
        return times

    def _judge_views(self) -> None:
        views = self.nodes.views()
        keys = [(not one.facts.head, self.nodes.nodes[one.node].joined, one.node) for one in views]
        assert keys == sorted(keys), "nodes out of order"
        kinds = [(one.facts.kind, one.facts.total.get("gpu")) for one in views if one.facts.total.get("gpu")]
        most = max(kinds, key=lambda kind: (kinds.count(kind), -kinds.index(kind)), default=None)
        for one in views:
            kind = (one.facts.kind, one.facts.total.get("gpu"))
            assert one.unlike == (kind[1] > 0 and kind != most), f"{one.node}: {kind}, most have {most}"
            assert one.state is not NodeState.held or one.node not in self.used, "a held node is used"
            assert (one.state is NodeState.draining) == (one.node in self.drains), f"{one.node} is {one.state}"

    def settled(self) -> None:
        """With every window over, groups know exactly what is there."""
        for _ in range(50):
            due = self.nodes.next_deadline()
            if due is None or due > self.now + self.policy.drain_window_s:
                break
            self.now = max(self.now, due)
            self.tell_nodes(n.NodeTick())
        for one in self.nodes.views(gone=True):
            gone = one.state in (NodeState.lost, NodeState.left) and not self.truth[one.node].listed
            assert not gone or one.since > self.now - self.policy.forget_s - 10, f"{one.node} is never forgotten"
        there = {one.node: one.state for one in self.nodes.views()}
        for name, what in self.believed.items():
            states = (NodeState.draining,) if what == "draining" else (NodeState.ready, NodeState.suspect)
            gone = name not in there and what == "draining"
            assert gone or there.get(name) in states, f"{name} is {there.get(name)}, but groups believe {what}"
        for name, state in there.items():
            if state is NodeState.ready:
                assert self.believed.get(name) == "used", f"nobody was told of {name}"

    def node_state(self, name: str) -> NodeState | None:
        return next((one.state for one in self.nodes.views(gone=True) if one.node == name), None)

    # ---- what happens to nodes -------------------------------------------------------------------------------------

    def join(self, name: str, what: NodeFacts, outside: Resources = NOTHING) -> None:
        """A node of this id comes, or comes back once Ray has dropped it, or has other figures."""
        known = self.truth.get(name)
        if known is not None and known.listed and not known.alive:
            return
        if known is None or not known.alive:
            self.counts["joins"] += 1
            self.truth[name] = TrueNode(what, outside)
        else:
            known.facts, known.outside = what, outside
        self.tell_nodes(n.NodeSeen(name, what, outside))

    def kill(self, name: str, *, noticed: bool) -> None:
        node = self.truth[name]
        if not node.alive:
            return
        node.alive, node.frozen_since, node.noticed = False, None, False
        self.counts["kills"] += 1
        for member in self.members.values():
            if member.node == name and member.state in ("starting", "running"):
                member.state = "dead"  # nobody knows yet
        if noticed:
            self.notice(name)

    def notice(self, name: str) -> None:
        node = self.truth[name]
        if not node.alive and not node.noticed:
            node.noticed = True
            self.tell_nodes(n.ConnectionBroken(name, "its link broke and nothing listens"))

    def ray_notices(self, name: str, *, expected: bool = False) -> None:
        node = self.truth[name]
        if not node.alive and node.listed:
            node.listed = False
            self.tell_nodes(n.NodeGone(name, expected))

    def stop(self, name: str) -> None:
        """`ray stop` on the node."""
        self.kill(name, noticed=False)
        self.ray_notices(name, expected=True)

    def freeze(self, name: str) -> None:
        node = self.truth[name]
        if node.alive and node.frozen_since is None:
            node.frozen_since = self.now

    def thaw(self, name: str) -> None:
        node = self.truth[name]
        if node.alive and node.frozen_since is not None:
            node.frozen_since = None
            self.tell_nodes(n.HeartbeatReceived(name))

    def flap(self, name: str) -> None:
        """The link breaks and speaks again."""
        if self.truth[name].alive and self.truth[name].frozen_since is None:
            self.counts["flaps"] += 1
            self.tell_nodes(n.ConnectionBroken(name, "reset"))
            self.tell_nodes(n.HeartbeatReceived(name))

    def links(self) -> None:
        """What Ray lists and the links say at this moment; Ray lags behind."""
        for name, node in self.truth.items():
            if node.listed:
                self.tell_nodes(n.NodeSeen(name, node.facts, node.outside))
            if node.frozen_since is not None:
                self.tell_nodes(n.HeartbeatMissed(name, self.now - node.frozen_since))

    def drain(self, name: str, deadline: float | None, *, by_ray: bool) -> None:
        refused = name not in self.nodes.nodes or self.truth[name].facts.head or self.node_state(name) in (
            NodeState.lost, NodeState.left)  # fmt: skip
        before = json.dumps(self.nodes.dump())
        try:
            self.tell_nodes(n.DrainRequested(name, deadline, "spot termination", by_ray))
            self.counts["drains"] += not refused
        except InputError:
            self.broken = False
            assert refused
            assert json.dumps(self.nodes.dump()) == before, "a refused drain changed something"

    # ---- the pool --------------------------------------------------------------------------------------------------

    def _die(self, name: str, why: str, *, fatal: bool = False) -> None:
        member = self.members[name]
        member.state, member.mind = "dead", None
        self.inbox.append(g.MemberLost(name, why, fatal))

    def place(self) -> None:
        """Queued members get their room, first come first served, where the pool may place something."""
        for name, member in self.members.items():
            if member.state != "queued" or member.ending:
                continue
            for node in sorted(self.open):
                held = sum(one.node == node and one.state in ("starting", "running") for one in self.members.values())
                if self.truth[node].alive and held < self.truth[node].gpus:
                    member.state, member.node = "starting", node
                    break
            else:
                if not member.queues:
                    member.queues = True
                    self.inbox.append(g.MemberPending(name, NO_ROOM))

    def construct(self, name: str, how: str = "well") -> None:
        member = self.members[name]
        if member.state != "starting" or member.ending:
            return
        if how != "well":
            self._die(name, "the constructor raised", fatal=how == "fatal")
            return
        member.state, member.born, member.queues = "running", member.born + 1, False
        self.inbox.append(g.MemberStarted(name, member.node))

    def crash(self, name: str) -> None:
        if self.members[name].state == "running":
            self._die(name, "signal 9")

    def evict(self, name: str) -> None:
        """The pool takes its room; its state is kept for it."""
        member = self.members[name]
        if member.state == "running" and not member.ending:
            member.state, member.node, member.queues = "queued", "", True
            self.counts["evictions"] += 1
            self.inbox.append(g.MemberPending(name, Reason(ReasonCode.priority, "somebody more important came")))

    def take(self, name: str, within_s: float) -> None:
        if self.members[name].state == "running":
            self.inbox.append(
                g.MemberPreempted(name, within_s, Reason(ReasonCode.priority, "somebody more important comes"))
            )

    def end(self, name: str) -> None:
        member = self.members[name]
        if member.ending:
            member.ending, member.state, member.mind = False, "dead", None
            self.inbox.append(g.MemberLeft(name))

    # ---- news reach the group --------------------------------------------------------------------------------------

    def look(self) -> None:
        """News of nodes are on their way."""
        if self.nodes.version != self.told_version:
            self.told_version = self.nodes.version
            self.inbox.append(g.NodesChanged(self.nodes.views(), self.nodes.last_change))

    def deliver(self, count: int = 10_000) -> None:
        while self.inbox and count:
            count -= 1
            event = self.inbox.pop(0)
            said = {g.MemberLost: "gone", g.MemberLeft: "gone", g.MemberPending: "waits", g.MemberStarted: "runs"}
            if type(event) in said:
                self.members[event.member].said = said[type(event)]
                self.health.discard(event.member)
            self.tell(event)

    def told_alive(self, name: str) -> bool:
        return self.members[name].said == "runs"

    # ---- worlds and steps ------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        if self.step is None:
            self.waits_for_step = True
            self.tell(g.StepBoundary(self.done))

    def withdraw(self) -> None:
        """The step is not wanted any more (the user's code raised); nobody has committed it."""
        self.step, self.interrupt, self.waits_for_step = None, False, False
        self.begun.discard(self.done + 1)
        self.tell(g.StepBoundary(self.done, wanted=False))

    def finish_entering(self, how: str = "well") -> None:
        if self.entering is None:
            return
        enter, self.entering = self.entering, None
        minds = {name: self.members[name].mind for name in self.members}
        fresh = {name for name, _ in enter.newcomers}
        dead = tuple(name for name in enter.world.members if not self._answers(name, fresh))
        broken = [source for _, source in enter.newcomers if source and not self._answers(source, fresh)]
        if how == "badly" and not dead:
            dead = enter.world.members[-1:]
            self.members[dead[0]].state = "dead"
        if dead or broken or how == "nobody":
            self.counts["failed worlds"] += 1
            self.tell(g.WorldFailed(enter.world.epoch, dead if how != "nobody" else (), "no answer"))
            return
        for name, source in enter.newcomers:
            self.members[name].mind = (
                minds[source] if source else (minds[name] if minds[name] is not None else self.done)
            )
        for name in enter.world.members:
            assert self.members[name].mind == self.done, f"{name} has the state of step {self.members[name].mind}"
            self.members[name].seen = self.members[name].born
        self.world = enter.world
        self.counts["worlds"] += 1
        self.tell(g.WorldEntered(enter.world.epoch))

    def _answers(self, name: str, fresh: set[str]) -> bool:
        """Whether it is still the process that was meant: one that was started again knows nothing of its rank."""
        member = self.members[name]
        return member.state == "running" and (name in fresh or member.seen == member.born)

    def finish_step(self, how: str = "well") -> None:
        """Compute, then commit: a loss before the commit undoes the step, a loss within it does not."""
        if self.step is None or self.world is None:
            return
        step, names = self.step.step, self.world.members
        whole = all(self.members[one].state == "running" and self.members[one].seen == self.members[one].born
                    for one in names)  # fmt: skip
        interrupted = self.interrupt and how != "commit"
        if whole and not interrupted and how in ("well", "commit", "loss in commit"):
            for name in names:
                assert self.members[name].mind == step - 1, "a step is counted twice, or not at all"
                self.members[name].mind = step
            if how == "loss in commit" and len(names) > 1:
                self._die(names[-1], "died in the commit")
                self.deliver()
            self.step, self.done, self.interrupt = None, step, False
            self.waits_for_step = False
            self.counts["steps"] += 1
            self.tell(g.StepDone(step))
            return
        hung: tuple[str, ...] = ()
        if how == "hung" and self.members[names[0]].state == "running":
            hung = names[:1]
            self.members[names[0]].state = "dead"
        self.step, self.interrupt = None, False
        self.counts["interrupted"] += 1
        self.tell(g.StepInterrupted(step, "a call failed", hung))

    # ---- what must be true of the group ----------------------------------------------------------------------------

    def _judge_group(self, one: g.ElasticInstruction, out: list[g.ElasticInstruction]) -> None:
        if isinstance(one, g.RequestUnits):
            self.asked_units = one.units
        elif isinstance(one, g.CheckHealth):
            assert one.member not in self.health, "asked again before it has answered"
            assert self.told_alive(one.member)
            self.health.add(one.member)
        elif isinstance(one, g.EnterWorld):
            self._judge_world(one)
        elif isinstance(one, g.RunStep):
            self._judge_step(one)
        else:
            assert one.reason.sentence
            getattr(self, "_judge_" + type(one).__name__)(one, out)

    def _judge_StartMember(self, one: g.StartMember, out: list[g.ElasticInstruction]) -> None:  # noqa: N802
        assert one.member not in self.members, "an id is used twice"
        assert self.ended is None
        self.members[one.member] = TrueMember()
        self.counts["starts"] += 1
        self.counts["replacements"] += one.reason.code is ReasonCode.replaced

    def _judge_StopMember(self, one: g.StopMember, out: list[g.ElasticInstruction]) -> None:  # noqa: N802
        member = self.members[one.member]
        closing = self.group.state.phase.value == "closed"
        at_work = self.step is not None and self.world is not None and one.member in self.world.members
        if at_work and not closing and self.told_alive(one.member):
            told = self.interrupt or any(isinstance(other, g.InterruptStep) for other in out)
            assert told, f"{one.member} is ended in the middle of a step: {one.reason}"
        if one.reason.code in PLANNED and member.mind is not None and self.told_alive(one.member) and not closing:
            assert self.world is not None
            kept = [
                name for name in self.members if name != one.member and self.members[name].said in ("runs", "waits")
            ]
            assert any(self.members[name].mind is not None or self.members[name].state == "dead" for name in kept), (
                f"{one.member} is ended, and its state with it"
            )
        member.ending = True
        self.health.discard(one.member)

    def _judge_InterruptStep(self, one: g.InterruptStep, out: list[g.ElasticInstruction]) -> None:  # noqa: N802
        assert self.step is not None
        assert one.step == self.step.step
        self.interrupt = True
        self.counts["interrupts"] += 1

    def _judge_WaitForMembers(self, one: g.WaitForMembers, out: list[g.ElasticInstruction]) -> None:  # noqa: N802
        assert one.reason.code is ReasonCode.below_min
        assert one.deadline > self.now
        assert self.waits_for_step
        self.counts["waits"] += 1

    def _judge_FailGroup(self, one: g.FailGroup, out: list[g.ElasticInstruction]) -> None:  # noqa: N802
        assert self.ended is None
        assert one.reason.code in (ReasonCode.too_late, ReasonCode.start_failed, ReasonCode.cap), one
        self.ended = one
        self.counts["given up"] += 1

    def _judge_world(self, enter: g.EnterWorld) -> None:
        world = enter.world
        assert self.step is None, "the world changes in the middle of a step"
        assert self.entering is None, "two worlds at once"
        assert world.epoch == len(self.worlds) + 1
        assert enter.deadline > self.now
        assert world.size >= self.spec.min_members, "below the least"
        limit = max(self.spec.min_members, self.group.state.requested or self.spec.max_members or 10**9)
        assert world.size <= limit, "more than the most"
        assert world.reason.sentence
        assert len(world.nodes) == world.size == len(set(world.members))
        order = [one.node for one in self.told_nodes]
        ranks = [(order.index(node), name) for node, name in zip(world.nodes, world.members, strict=True)]
        assert ranks == sorted(ranks), "ranks are not in node order"
        newcomers = dict(enter.newcomers)
        for name, node in zip(world.members, world.nodes, strict=True):
            assert self.told_alive(name), f"{name} is known to be gone"
            assert not self.members[name].ending, f"{name} is being ended"
            member = self.members[name]
            unheard = any(getattr(event, "member", "") == name for event in self.inbox)
            assert member.node == node or unheard or member.state != "running", f"{name} is on {member.node}"
            ranked = self.world is not None and name in self.world.members and member.seen == member.born
            assert name in newcomers or ranked or unheard or member.state != "running", f"{name} gets no state"
        for name, source in enter.newcomers:
            assert name in world.members
            if source is not None:
                assert self.told_alive(source), "the state of one who is gone"
            else:
                others = [one for one in self.members if one != name and self.told_alive(one)]
                ranked = [one for one in others if self.world is not None and one in self.world.members]
                assert not any(
                    self.members[one].mind == self.done and self.members[one].seen == self.members[one].born
                    and self.members[one].state == "running" and not self.members[one].ending
                    for one in ranked
                ), f"{name} starts afresh beside members that have come far"  # fmt: skip
        assert not set(enter.leavers) & set(world.members)
        self.worlds[world.epoch] = world
        self.entering = enter

    def _judge_step(self, run: g.RunStep) -> None:
        assert self.step is None, "two steps at once"
        assert self.entering is None, "a step while the world changes"
        assert self.waits_for_step, "a step that nobody asked for"
        assert self.world is not None
        assert run.epoch == self.world.epoch, "a step in a world that was not entered"
        assert self.world.size >= self.spec.min_members, "below the least, silently"
        assert run.step == self.done + 1, "a step is left out, or counted twice"
        assert run.redo == (run.step in self.begun)
        for name in self.world.members:
            assert self.told_alive(name), f"a step with {name}, which is known to be gone"
        self.begun.add(run.step)
        self.counts["redone"] += run.redo
        self.step = run

    def _judge_deadlines(self) -> None:
        """Whatever is under way, something is done about it one day."""
        due = self.group.next_deadline()
        over = self.closed or self.ended is not None
        if not over and (self.step is not None or self.entering is not None or self.health or self.waits_for_step):
            assert due is not None, "nothing would ever happen again"

    # ---- time, and what changes nothing ----------------------------------------------------------------------------

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.links()
        self.tell_nodes(n.NodeTick())
        self.look()
        self.tell(g.ElasticTick())

    def answer_health(self, name: str, fault: str | None = None) -> None:
        if name in self.health:
            self.health.discard(name)
            if fault and self.members[name].state == "running":
                self.members[name].state = "dead"  # as good as
            self.tell(g.HealthChecked(name, fault))

    def reload(self) -> None:
        nodes = NodeMachine.load(json.loads(json.dumps(self.nodes.dump())))
        group = ElasticMachine.load(json.loads(json.dumps(self.group.dump())))
        assert nodes.dump() == self.nodes.dump()
        assert group.dump() == self.group.dump()
        assert nodes.next_deadline() == self.nodes.next_deadline()
        assert group.next_deadline() == self.group.next_deadline()
        assert nodes.views(gone=True) == self.nodes.views(gone=True)
        assert nodes.views() == self.nodes.views()
        assert [nodes.story(name) for name in self.nodes.nodes] == [self.nodes.story(name) for name in self.nodes.nodes]
        assert group.view() == self.group.view()
        assert (group.size, group.wanted) == (self.group.size, self.group.wanted)
        assert [group.story(name) for name in group.state.stories] == [
            self.group.story(name) for name in self.group.state.stories
        ]
        self.nodes, self.group = nodes, group
        self.counts["reloads"] += 1

    def echo(self) -> None:
        """The last news again: nothing changes. (A redone step may be interrupted again: that is other news.)"""
        who, _, event, _ = self.journal[-1]
        other = (n.NodeTick, g.ElasticTick, g.MemberPreempted, g.HealthChecked, g.MemberPending, g.StepInterrupted)
        if not isinstance(event, other):
            machine = self.nodes if who == "nodes" else self.group
            before = json.dumps(machine.dump())
            self.broken = True
            assert machine.handle(event, self.now) == [], f"{event} twice"
            assert json.dumps(machine.dump()) == before, f"{event} twice"
            self.broken = False
            self.counts["echoes"] += 1

    def replay(self) -> None:
        """The journal alone leads to the same instructions and the same state."""
        nodes, group = NodeMachine(self.policy), ElasticMachine(self.spec)
        for who, now, event, out in self.journal:
            machine = nodes if who == "nodes" else group
            assert tuple(machine.handle(event, now)) == out
        assert nodes.dump() == self.nodes.dump()
        assert group.dump() == self.group.dump()

    # ---- all goes well from now on ---------------------------------------------------------------------------------

    def carry_all(self) -> None:
        for _ in range(20):
            self.place()
            for name in list(self.members):
                self.construct(name)
                self.end(name)
            self.look()
            self.deliver()
            for name in sorted(self.health):
                self.answer_health(name, None if self.members[name].state == "running" else "no answer")
            self.finish_entering()
            if not self.inbox and self.entering is None:
                return

    def quiet(self) -> None:
        """Nothing happens any more but good: the group makes a step, or has said that it gave up."""
        for name, node in list(self.truth.items()):
            self.notice(name)
            self.ray_notices(name)
            if node.alive:
                self.thaw(name)
                self.tell_nodes(n.DrainCancelled(name))
        for at in range(self.spec.min_members):
            self.join(f"fresh{at}", facts(1))
        before = self.done
        for turn in range(300):
            for name, member in self.members.items():
                if member.state == "dead" and member.said != "gone":
                    self.inbox.append(g.MemberLost(name, "found dead"))
            self.carry_all()
            self.boundary()
            self.carry_all()
            self.finish_step()
            if self.done > before + 1 or self.ended is not None:
                break
            due = [at for at in (self.nodes.next_deadline(), self.group.next_deadline()) if at is not None]
            self.tick(max(0.1 if turn < 200 else 100.0, min([at - self.now for at in due], default=1.0)))
        assert self.done > before or self.ended is not None, self.group.view()
        self.settled()

    def close(self) -> None:
        self.tell(g.GroupClosed())
        self.closed = True
        self.step = self.entering = None
        for name in list(self.members):
            self.end(name)
        self.deliver()
        alive = [name for name, member in self.members.items() if member.state in ("starting", "running")]
        assert not alive, f"left behind: {alive}"
        assert self.tell(g.ElasticTick()) == []
