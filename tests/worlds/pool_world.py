"""A world in memory around a pool machine: it carries instructions out, in any order, and puts faults in.

It keeps books of its own of what really exists (placement groups on nodes, processes of tasks) and, after every event,
asserts what must be true of them. It believes nothing that the machine says of itself: a group exists from the moment
it is asked for until its end is told, and so does a process.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from obvious_pool import Amounts, Facts, SlotFacts, added, amounts, can_lie, fits, has_room, may_evict
from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.pool import events as news
from trimtab.machines.pool.events import (
    CreatePlacementGroup,
    ParkTask,
    PoolEvent,
    PoolInstruction,
    RemovePlacementGroup,
    StartTask,
    StopTask,
    UnparkTask,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import (
    ENDED,
    HOLDS_SLOTS,
    IN_QUEUE,
    BundlePlacement,
    Labels,
    PlacementStrategy,
    PoolSpec,
    PreemptionPolicy,
    TaskSpec,
    TaskState,
    label_matches,
    labels_of,
    rules_of,
)

KINDS = {kind.__name__: kind for kind in PoolEvent.__subclasses__()}
BY_POLICY = (ReasonCode.priority, ReasonCode.label_rule, ReasonCode.cross_pool)
WAITS = (
    ReasonCode.queued,
    ReasonCode.quota,
    ReasonCode.no_room,
    ReasonCode.slot_limit,
    ReasonCode.turn,
    ReasonCode.evicting,
    ReasonCode.behind,
    ReasonCode.drained,
    ReasonCode.no_node,
    ReasonCode.back_off,
)
# Until it is looked at again, whoever lost its place says how it lost it.
LOSSES = (
    *BY_POLICY,
    ReasonCode.owner_returned,
    ReasonCode.by_hand,
    ReasonCode.node_lost,
    ReasonCode.node_draining,
    ReasonCode.slot_lost,
    ReasonCode.gang_broken,
    ReasonCode.process_died,
    ReasonCode.start_failed,
    ReasonCode.start_timeout,
)
STARTS = (
    ReasonCode.placed,
    ReasonCode.reserved,
    ReasonCode.borrowed,
    ReasonCode.reused,
    ReasonCode.preempted,
    ReasonCode.turn,
)


def gpus(count: float, **more: float) -> Resources:
    return Resources.of(gpu=count, **more)


def pool(name: str = "p", quota: Resources | None = None, **more: Any) -> PoolSpec:
    return PoolSpec(name, quota if quota is not None else Resources.of(gpu=1000, cpu=1000), **more)


def task(id: str, ask: Resources | float = 1.0, pool: str = "p", labels: dict[str, str] | None = None, **more: Any):
    bundle = ask if isinstance(ask, Resources) else gpus(ask)
    return TaskSpec(id, pool, (bundle,), labels=labels_of(labels, id), **more)


def gang(id: str, count: int, ask: Resources | float = 1.0, pool: str = "p", **more: Any) -> TaskSpec:
    bundle = ask if isinstance(ask, Resources) else gpus(ask)
    return TaskSpec(id, pool, (bundle,) * count, **more)


def policy(rules: dict[str, dict[str, list[str]]] | None = None, **more: Any) -> PreemptionPolicy:
    return PreemptionPolicy(label_rules=rules_of(rules), **more)


@dataclass
class Node:
    """A node that is alive."""

    total: Resources
    outside: Resources
    cordoned: bool = False
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Group:
    """A placement group that exists, or may exist."""

    made: CreatePlacementGroup
    phase: str = "asked"  # then standing, then removing
    since: float = 0.0  # when it was told to go
    trusted: bool = True  # no bundle of it was lost
    vanished: bool = False  # nobody knows where its bundles are, if anywhere
    lost: set[int] = field(default_factory=set)  # bundles that went with their node

    def on(self, node: str) -> list[int]:
        return [at for at, where in enumerate(self.made.nodes) if where == node and at not in self.lost]


@dataclass
class Run:
    """The processes of one start of a task that exist, or may exist."""

    start: StartTask
    alive: set[int]  # ranks
    mode: str = "starting"  # then active; parking, parked, unparking
    began: float = 0.0
    stop: StopTask | None = None
    told_at: float = 0.0  # to stop
    entry: bool = True  # its entry method has not returned yet

    @property
    def active(self) -> bool:
        return self.mode != "parked"


class World:
    """Nodes, groups and processes in memory, and a machine that decides about them."""

    def __init__(self) -> None:
        self.machine = PoolMachine()
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, Group] = {}
        self.runs: dict[str, Run] = {}
        self.pending: list[PoolInstruction] = []
        self.pools: dict[str, PoolSpec] = {}
        self.drained: set[str] = set()
        self.dropped: set[str] = set()
        self.specs: dict[str, TaskSpec] = {}
        self.policy: PreemptionPolicy | None = None
        self.causes: dict[str, set[ReasonCode]] = {}  # why a task may be stopped, besides a policy
        self.ends: dict[str, TaskState] = {}
        self.group_names: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.evictions: list[tuple[float, str, ReasonCode]] = []  # stops by policy
        self.stopped: set[tuple[str, int]] = set()  # attempts that were told to stop
        self.overdue: set[str] = set()  # tasks whose start or turn took longer than it may
        self.journal: list[tuple[float, str, str, list[PoolInstruction]]] = []
        self.told: list[PoolEvent] = []  # news, for saying it again later
        self.checked_choices = 0
        self.broken = False  # something that must be true was not

    # ---- the door ----

    def tell(self, event: PoolEvent) -> list[PoolInstruction]:
        """The machine hears of it; what it wants done is noted, and what must be true is looked at."""
        try:
            return self._tell(event)
        except InputError:
            raise
        except Exception:
            self.broken = True
            raise

    def _tell(self, event: PoolEvent) -> list[PoolInstruction]:
        asked = isinstance(
            event,
            news.PoolEnsured | news.TaskSubmitted | news.CompleteRequested | news.CancelRequested | news.EvictRequested
            | news.TurnRequested | news.QuotaSet | news.PoolDrained | news.PoolDropped | news.PolicySet,
        )  # fmt: skip
        if not asked:
            self._happens(event)
        before = {name: (one.state, one.reason) for name, one in self.machine.tasks.items()}
        try:
            instructions = self.machine.handle(event, self.now)
        except InputError:
            assert asked, f"news is refused: {event}"
            raise
        self.journal.append((self.now, type(event).__name__, json.dumps(encode(event)), instructions))
        if asked:
            self._happens(event)
        for instruction in instructions:
            self._book(instruction)
        removed = [one.group for one in instructions if isinstance(one, RemovePlacementGroup)]
        facts = self._facts(removed) if any(isinstance(one, StopTask) for one in instructions) else None
        # A stop that is said again has been explained the first time.
        stops = [
            one for one in instructions if isinstance(one, StopTask) and (one.task, one.attempt) not in self.stopped
        ]
        self.stopped.update((one.task, one.attempt) for one in stops)
        self._check_stops(stops, before, facts)
        self.truths(before)
        return instructions

    def refused(self, event: PoolEvent) -> InputError:
        """The event is refused, and nothing has changed."""
        before = self.dumped()
        try:
            self.tell(event)
        except InputError as error:
            assert self.dumped() == before, f"{event} was refused, but something changed"
            return error
        raise AssertionError(f"{event} was not refused")

    def dumped(self) -> Any:
        return json.loads(json.dumps(self.machine.dump()))

    def reload(self) -> None:
        """The machine is read from its own snapshot, and goes on."""
        before, was = self.dumped(), self.answers()
        self.machine = PoolMachine.load(before)
        assert self.dumped() == before
        self.machine.check()
        now = self.answers()
        assert {name: now[name] for name in now if now[name] != was[name]} == {}, "other answers after a snapshot"

    def answers(self) -> dict[str, Any]:
        """All that the machine can be asked."""
        machine = self.machine
        return {
            "deadline": machine.next_deadline(),
            "queue": machine.queue(),
            "totals": machine.totals(),
            "pools": [machine.pool_view(name) for name in machine.pools],
            "warm": machine.warm_targets(),
            "outstanding": machine.outstanding(),
            "explained": [machine.explain(name, self.now) for name in machine.tasks],
            "stories": [machine.story(name) for name in (*machine.tasks, *machine.state.node_stories)],
        }

    def replay(self) -> None:
        """A fresh machine that hears the same, from plain data, wants the same done and ends in the same state."""
        fresh = PoolMachine()
        for now, kind, text, instructions in self.journal:
            event = decode(KINDS[kind], json.loads(text))
            assert fresh.handle(event, now) == instructions, f"replay differs at {now}, {event}"
        mine, again = self.dumped(), json.loads(json.dumps(fresh.dump()))
        for key, part in mine.items():
            for one, other in (
                itertools.zip_longest(part, again[key]) if isinstance(part, list) else ((part, again[key]),)
            ):
                assert one == other, f"replay ends in another state, {key}"

    # ---- what happens ----

    def _happens(self, event: PoolEvent) -> None:
        kind = type(event).__name__
        known = getattr(self, f"_on_{kind}", None)
        if known:
            known(event)
        if hasattr(event, "attempt") or hasattr(event, "group"):
            self.told.append(event)
        self._look_at_clock()

    def _look_at_clock(self) -> None:
        for one in self.pending:
            if isinstance(one, StartTask | ParkTask | UnparkTask) and self.now >= one.deadline:
                self.overdue.add(one.task)

    def _on_PoolEnsured(self, event: news.PoolEnsured) -> None:  # noqa: N802
        self.pools.setdefault(event.spec.name, event.spec)

    def _on_QuotaSet(self, event: news.QuotaSet) -> None:  # noqa: N802
        self.pools[event.pool] = replace(self.pools[event.pool], quota=event.quota)

    def _on_PoolDrained(self, event: news.PoolDrained) -> None:  # noqa: N802
        (self.drained.add if event.on else self.drained.discard)(event.pool)

    def _on_PoolDropped(self, event: news.PoolDropped) -> None:  # noqa: N802
        for name, spec in self.specs.items():
            if spec.pool == event.pool:
                self._cause(name, ReasonCode.pool_dropped)
        self.dropped.add(event.pool)

    def _on_PolicySet(self, event: news.PolicySet) -> None:  # noqa: N802
        self.policy = event.policy

    def _on_TaskSubmitted(self, event: news.TaskSubmitted) -> None:  # noqa: N802
        self.specs[event.spec.id] = event.spec
        self.ends.pop(event.spec.id, None)  # an id may be used again after its task has ended

    def _on_CompleteRequested(self, event: news.CompleteRequested) -> None:  # noqa: N802
        self._cause(event.task, ReasonCode.completed, ReasonCode.by_hand)

    def _on_CancelRequested(self, event: news.CancelRequested) -> None:  # noqa: N802
        self._cause(event.task, event.code)

    def _on_EvictRequested(self, event: news.EvictRequested) -> None:  # noqa: N802
        self._cause(event.task, ReasonCode.by_hand)

    def _on_NodeJoined(self, event: news.NodeJoined) -> None:  # noqa: N802
        cordoned = event.node in self.nodes and self.nodes[event.node].cordoned
        self.nodes[event.node] = Node(event.total, event.outside, cordoned, dict(event.labels))

    def _on_NodeCordoned(self, event: news.NodeCordoned) -> None:  # noqa: N802
        if event.node in self.nodes:
            self.nodes[event.node].cordoned = event.on

    def _on_NodeDrained(self, event: news.NodeDrained) -> None:  # noqa: N802
        if event.node not in self.nodes:
            return
        self.nodes[event.node].cordoned = True
        for group in self.groups.values():
            if event.node in group.made.nodes:
                group.trusted = False  # nothing is to start there any more
        for name, run in self.runs.items():
            if any(place.node == event.node for place in run.start.places):
                self._cause(name, ReasonCode.node_draining)

    def _on_NodeLost(self, event: news.NodeLost) -> None:  # noqa: N802
        self.nodes.pop(event.node, None)
        for group in self.groups.values():
            if event.node in group.made.nodes:
                group.trusted = False
                group.lost.update(group.on(event.node))
        for name, run in self.runs.items():
            lost = {rank for rank, place in enumerate(run.start.places) if place.node == event.node}
            if lost:
                run.alive -= lost
                self._cause(name, ReasonCode.node_lost, ReasonCode.gang_broken, ReasonCode.slot_lost)
        self._bury()

    def _on_PlacementGroupReady(self, event: news.PlacementGroupReady) -> None:  # noqa: N802
        if event.group in self.groups and self.groups[event.group].phase == "asked":
            self.groups[event.group].phase = "standing"

    def _on_PlacementGroupFailed(self, event: news.PlacementGroupFailed) -> None:  # noqa: N802
        self._forget_group(event.group, ("asked",))

    def _on_PlacementGroupRemoved(self, event: news.PlacementGroupRemoved) -> None:  # noqa: N802
        self._forget_group(event.group, ("removing",))

    def _on_PlacementGroupLost(self, event: news.PlacementGroupLost) -> None:  # noqa: N802
        if event.group in self.groups:
            self.groups[event.group].trusted = False
            self.groups[event.group].vanished = True
        for name, run in self.runs.items():
            if any(place.group == event.group for place in run.start.places):
                self._cause(name, ReasonCode.slot_lost)

    def _forget_group(self, group: str, phases: Iterable[str]) -> None:
        if group in self.groups and self.groups[group].phase in phases:
            del self.groups[group]

    def _mine(self, event: Any) -> Run | None:
        run = self.runs.get(event.task)
        return run if run and run.start.attempt == event.attempt else None

    def _on_TaskStarted(self, event: news.TaskStarted) -> None:  # noqa: N802
        if (run := self._mine(event)) and run.mode == "starting":
            run.mode = "active"

    def _on_TaskStartFailed(self, event: news.TaskStartFailed) -> None:  # noqa: N802
        if (run := self._mine(event)) and run.mode == "starting":
            run.alive.clear()
            self._bury()

    def _on_TaskEnded(self, event: news.TaskEnded) -> None:  # noqa: N802
        if run := self._mine(event):
            run.entry = False
            self._cause(event.task, ReasonCode.completed if event.error is None else ReasonCode.raised)

    def _on_TaskDied(self, event: news.TaskDied) -> None:  # noqa: N802
        if run := self._mine(event):
            run.alive.discard(min(run.alive, default=0))
            self._cause(event.task, ReasonCode.process_died, ReasonCode.gang_broken)
            self._bury()

    def _on_TaskStopped(self, event: news.TaskStopped) -> None:  # noqa: N802
        if run := self._mine(event):
            run.alive.clear()
            self._bury()

    def _on_TaskParked(self, event: news.TaskParked) -> None:  # noqa: N802
        if (run := self._mine(event)) and run.mode == "parking":
            run.mode = "parked"

    def _on_TaskUnparked(self, event: news.TaskUnparked) -> None:  # noqa: N802
        if (run := self._mine(event)) and run.mode == "unparking":
            run.mode = "active"

    def _cause(self, name: str, *codes: ReasonCode) -> None:
        self.causes.setdefault(name, set()).update(codes)

    def _bury(self) -> None:
        for name in [name for name, run in self.runs.items() if not run.alive]:
            del self.runs[name]

    # ---- what is wanted ----

    def _book(self, wanted: PoolInstruction) -> None:
        self.pending.append(wanted)
        known: dict[type, Callable[[Any], None]] = {
            CreatePlacementGroup: self._book_make, RemovePlacementGroup: self._book_remove, StartTask: self._book_start,
            StopTask: self._book_stop, ParkTask: self._book_park, UnparkTask: self._book_unpark,
        }  # fmt: skip
        known[type(wanted)](wanted)

    def _book_make(self, wanted: CreatePlacementGroup) -> None:
        assert wanted.group not in self.group_names, f"the group name {wanted.group} is used again"
        assert wanted.pool in self.pools
        assert wanted.deadline >= self.now
        assert len(wanted.nodes) == len(wanted.bundles) > 0
        self.group_names.add(wanted.group)
        self.groups[wanted.group] = Group(wanted)
        different = len(set(wanted.nodes))
        if wanted.strategy is PlacementStrategy.strict_pack:
            assert different == 1, f"STRICT_PACK, but on {wanted.nodes}"
        if wanted.strategy is PlacementStrategy.strict_spread:
            assert different == len(wanted.nodes), f"STRICT_SPREAD, but on {wanted.nodes}"
        for node, bundle in zip(wanted.nodes, wanted.bundles, strict=True):
            assert node in self.nodes, f"{wanted.group} is to be made on {node}, which is gone"
            assert not self.nodes[node].cordoned, f"{wanted.group} is to be made on the cordoned {node}"
            have = amounts(self.nodes[node].total.minus(self.nodes[node].outside))
            held = self.held(node)
            for name in bundle.floats():
                assert held.get(name, 0) <= have.get(name, 0), (
                    f"{wanted.group} brings {node} to {held} of {have}: oversubscribed"
                )
        limit = self.pools[wanted.pool].dynamic_limit
        if not self.pools[wanted.pool].dynamic:
            limit = 0
        if limit is not None:
            there = [g for g in self.groups.values() if g.made.pool == wanted.pool and g.trusted]
            count = sum(len(g.made.bundles) for g in there if g.phase != "removing")
            assert count <= limit + len(self.pools[wanted.pool].reserved), f"{wanted.pool}: {count} bundles"

    def held(self, node: str) -> Amounts:
        """What groups hold of a node; of one that vanished only what living processes sit in."""
        found: Amounts = {}
        for group in self.groups.values():
            for at in group.on(node):
                if not group.vanished or group.phase == "removing" or self.tenants(group.made.group, at):
                    found = added(found, amounts(group.made.bundles[at]))
        return found

    def tenants(self, group: str, bundle: int) -> list[str]:
        return [
            name
            for name, run in self.runs.items()
            for rank in run.alive
            if (run.start.places[rank].group, run.start.places[rank].bundle) == (group, bundle)
        ]

    def _book_remove(self, wanted: RemovePlacementGroup) -> None:
        group = self.groups.get(wanted.group)
        assert group is not None, f"{wanted.group} is to be removed, but is gone"
        if group.phase == "removing":
            assert self.now - group.since >= 30, f"{wanted.group} is to be removed twice"
        for at in range(len(group.made.bundles)):
            inside = self.tenants(wanted.group, at)
            assert not inside, f"{wanted.group} is to be removed with {inside} in it"
        group.phase, group.since = "removing", self.now

    def _book_start(self, wanted: StartTask) -> None:
        spec = self.specs[wanted.task]
        assert wanted.task not in self.runs, f"{wanted.task} is started while a process of it may be alive"
        assert wanted.task not in self.ends, f"{wanted.task} is started after its end"
        assert wanted.attempt > self.attempts.get(wanted.task, 0)
        assert wanted.deadline >= self.now
        self.attempts[wanted.task] = wanted.attempt
        self.causes.pop(wanted.task, None)
        self.overdue.discard(wanted.task)
        self._check_places(spec, wanted.places)
        self.runs[wanted.task] = Run(wanted, set(range(len(wanted.places))), began=self.now)

    def _check_places(self, spec: TaskSpec, places: tuple[BundlePlacement, ...]) -> None:
        assert len(places) == len(spec.bundles), f"{spec.id} is not started whole"
        assert len({(place.group, place.bundle) for place in places}) == len(places)
        assert len({place.group for place in places}) == 1, f"{spec.id} is spread over groups"
        for bundle, place in zip(spec.bundles, places, strict=True):
            group = self.groups.get(place.group)
            assert group is not None, f"{spec.id} is started in {place.group}, which does not exist"
            assert group.phase == "standing", f"{spec.id} is started in {place.group}, which is {group.phase}"
            assert group.trusted, f"{spec.id} is started in {place.group}, which is broken"
            assert place.node in self.nodes
            assert group.made.nodes[place.bundle] == place.node
            assert group.made.pool == spec.pool
            assert bundle.within(group.made.bundles[place.bundle])
            for key, wanted in spec.label_selector:
                there = self.nodes[place.node].labels
                assert label_matches(there, key, wanted), f"{spec.id} is started on {place.node} with {there}"

    def _book_stop(self, wanted: StopTask) -> None:
        run = self.runs.get(wanted.task)
        if run is None:
            # Its processes are gone already, and the machine may want to be sure.
            assert wanted.attempt == self.attempts.get(wanted.task)
            return
        assert run.start.attempt == wanted.attempt, f"{wanted} is for another attempt than {run.start.attempt}"
        if run.stop is not None:
            taken = self.now - run.told_at
            assert taken > run.stop.cancel_grace_s + run.stop.checkpoint_timeout_s, (
                f"{wanted.task} is told to stop twice"
            )
        run.stop, run.told_at = wanted, self.now

    def _book_park(self, wanted: ParkTask) -> None:
        run = self.runs[wanted.task]
        assert (run.start.attempt, run.mode, run.stop) == (wanted.attempt, "active", None), f"{wanted}: {run}"
        run.mode = "parking"

    def _book_unpark(self, wanted: UnparkTask) -> None:
        run = self.runs[wanted.task]
        assert (run.start.attempt, run.mode, run.stop) == (wanted.attempt, "parked", None), f"{wanted}: {run}"
        run.mode = "unparking"

    # ---- why anybody is stopped ----

    def _check_stops(self, stops: list[StopTask], before: dict[str, Any], facts: Facts | None) -> None:
        making = {
            name: one
            for name, one in self.machine.tasks.items()
            if one.state in IN_QUEUE and one.reason.code is ReasonCode.evicting
        }
        by_policy = [stop for stop in stops if stop.reason.code in BY_POLICY]
        for stop in stops:
            assert stop.reason.sentence
            if stop.reason.code in BY_POLICY:
                self._check_policy(stop, making)
            elif stop.reason.code is ReasonCode.owner_returned:
                self._check_borrower(stop, making)
            elif stop.reason.code is ReasonCode.start_timeout:
                assert stop.task in self.overdue, f"{stop} before its deadline"
            elif stop.reason.code is not ReasonCode.process_died or stop.task not in self.overdue:
                assert stop.reason.code in self.causes.get(stop.task, ()), (
                    f"nothing explains {stop}: known are {self.causes.get(stop.task)}"
                )
        if by_policy:
            self.evictions += [(self.now, stop.task, stop.reason.code) for stop in by_policy]
            self._check_budget()
            new = [name for name in making if name not in before or before[name][1].code is not ReasonCode.evicting]
            if len(making) == 1 and len(new) == 1 and facts is not None:
                self._check_needed(making[new[0]].spec, [stop.task for stop in by_policy], stops, facts)

    def _check_policy(self, stop: StopTask, making: dict[str, Any]) -> None:
        victim = self.specs[stop.task]
        assert self.policy is not None, f"{stop} without any policy"
        entitled = [
            name
            for name, one in making.items()
            if stop.reason.code in may_evict(one.spec, victim, self.policy)
            and (one.state is TaskState.waiting or self.pools[one.spec.pool].return_preempts)
            and (not one.evictions or one.spec.priority - victim.priority > 1e-9)  # equals do not evict each other
        ]
        assert entitled, f"no policy lets {sorted(making)} evict {victim}: {stop}"
        ran = self.now - self.runs[stop.task].began
        assert ran >= self.policy.min_runtime_s, f"{stop.task} has run for {ran} s only"
        self._check_manner(stop)

    def _check_manner(self, stop: StopTask) -> None:
        victim = self.specs[stop.task]
        timing = self.policy or PreemptionPolicy()
        if self.runs[stop.task].mode == "starting":
            assert (stop.cancel_grace_s, stop.checkpoint_timeout_s) == (0, 0), (
                "what is not constructed has nothing to say"
            )
        elif victim.notice_s is not None:
            assert stop.notice
            assert stop.cancel_grace_s == victim.notice_s
        else:
            assert not stop.notice
            assert stop.cancel_grace_s == timing.cancel_timeout_s

    def _check_borrower(self, stop: StopTask, making: dict[str, Any]) -> None:
        victim = self.specs[stop.task]
        spec = self.pools[victim.pool]
        assert spec.borrow, f"{stop}, but nobody may borrow in {spec.name}"
        assert victim.evictable, f"{stop}, but it is not preemptible"
        assert any(
            one.spec.pool == victim.pool and one.spec.priority >= spec.reserved_priority for one in making.values()
        ), f"{stop}, but no owner waits"

    def _check_budget(self) -> None:
        assert self.policy is not None
        if self.policy.budget is None:
            return
        window = [one for one in self.evictions if one[0] > self.now - self.policy.budget_window_s]
        if len(window) > self.policy.budget:
            # A budget may have been lowered after evictions that were right at their time.
            assert all(at < self.now for at, _, _ in window), f"{len(window)} evictions in a window of {self.policy}"

    def _check_needed(self, newcomer: TaskSpec, victims: list[str], stops: list[StopTask], facts: Facts) -> None:
        """Nobody could be spared: without any one of them there is no room yet."""
        if newcomer.gang or newcomer.shares or len(victims) != len(stops) or self._others_keep_room(newcomer):
            return
        self.checked_choices += 1
        for spared in victims:
            left = [name for name in victims if name != spared]
            assert not has_room(facts.without(left), newcomer), f"{newcomer.id} has room without evicting {spared}"

    def _others_keep_room(self, newcomer: TaskSpec) -> bool:
        """Whether room may rightly be kept for somebody else."""
        return any(
            one.state in IN_QUEUE
            and name != newcomer.id
            and self.now - one.since >= self.pools[one.spec.pool].starvation_timeout_s
            for name, one in self.machine.tasks.items()
        )

    def _facts(self, idle: Iterable[str] = ()) -> Facts:
        """What the books say; groups that are removed at this very moment count as idle, as they were."""
        free = {}
        for node, one in self.nodes.items():
            if not one.cordoned:
                free[node] = added(self.capacity(node), self.held(node), -1)
        left = {name: amounts(spec.quota) for name, spec in self.pools.items()}
        inside: dict[str, list[str]] = {}
        for name, task_now in self.machine.tasks.items():
            if task_now.state in HOLDS_SLOTS:  # also those whose processes are gone, as long as nobody has said so
                inside.setdefault(task_now.places[0].group, []).append(name)
                for bundle in task_now.spec.bundles:
                    left[task_now.spec.pool] = added(left[task_now.spec.pool], amounts(bundle), -1)
        slots, dynamic = [], Counter[str]()
        for name, group in self.groups.items():
            made, reserved = group.made, self.is_reserved(name)
            dynamic[made.pool] += 0 if reserved else len(made.bundles)
            stands = group.phase == "standing" or name in idle
            if stands and group.trusted and len(made.bundles) == 1 and made.nodes[0] in free:  # not cordoned
                tenants = tuple(inside.get(name, ()))
                slots.append(SlotFacts(made.pool, made.bundles[0], made.nodes[0], reserved, tenants))
        return Facts(free, slots, left, dict(self.pools), dict(self.specs), dict(dynamic))

    def is_reserved(self, group: str) -> bool:
        """As the machine says; that it does not say so too often is one of the truths."""
        known = self.machine.groups.get(group)
        return known is not None and known.kind.value == "reserved"

    # ---- truths ----

    def used(self, pool: str) -> Amounts:
        """What living processes hold of a pool's quota."""
        found: Amounts = {}
        for name, run in self.runs.items():
            spec = self.specs[name]
            if spec.pool == pool:
                for rank in run.alive:
                    found = added(found, amounts(self.holds(spec, rank, run.active)))
        return found

    @staticmethod
    def holds(spec: TaskSpec, rank: int, active: bool) -> Resources:
        if active:
            return spec.bundles[rank]
        return spec.residual[rank] if spec.residual else NOTHING

    def truths(self, before: dict[str, Any]) -> None:
        """What must be true after every event."""
        self.machine.check()
        for name, spec in self.pools.items():
            assert fits(self.used(name), amounts(spec.quota)), f"{name} uses {self.used(name)} of {spec.quota}"
            kept = Counter(g.made.bundles[0] for i, g in self.groups.items() if g.made.pool == name
                           and g.phase != "removing" and g.trusted and self.is_reserved(i))  # fmt: skip
            assert kept <= Counter(spec.reserved), f"{name} reserves {kept}, more than {spec.reserved}"
        self._check_slots()
        lost = {name for name, spec in self.specs.items() if spec.pool not in self.dropped} - set(self.machine.tasks)
        assert not lost, f"lost: {lost}"
        for name, one in self.machine.tasks.items():
            self._check_task(name, one, before)
        self._check_deadlines()

    def _check_slots(self) -> None:
        inside: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for name, run in self.runs.items():
            for rank in run.alive:
                place = run.start.places[rank]
                inside.setdefault((place.group, place.bundle), []).append((name, rank))
        for (group, bundle), tenants in inside.items():
            assert group in self.groups, f"{group} is gone, but {tenants} are in it"
            active = [name for name, _ in tenants if self.runs[name].active]
            assert len(active) <= 1, f"{active} are active in one slot"
            together = total([self.holds(self.specs[n], rank, self.runs[n].active) for n, rank in tenants])
            assert together.within(self.groups[group].made.bundles[bundle]), f"{tenants} do not fit into {group}"

    def _check_task(self, name: str, one: Any, before: dict[str, Any]) -> None:
        assert one.spec == self.specs[name]
        assert one.reason is not None, f"{name} has no reason"
        assert one.reason.sentence, f"{name} has no reason"
        run = self.runs.get(name)
        if name in self.ends:
            assert one.state is self.ends[name], f"{name} was {self.ends[name]} and is {one.state}"
        elif one.state in ENDED:
            self.ends[name] = one.state
        if one.state in ENDED or one.state in IN_QUEUE:
            assert run is None, f"{name} is {one.state.value}, but processes of it may be alive"
            assert not one.places
        if one.state is TaskState.running:
            assert run is not None
            assert run.mode in ("active", "parking"), f"{name} is running, but {run.mode}"
        if one.state is TaskState.parked:
            assert run is not None
            assert run.mode in ("parked", "unparking"), f"{name} is parked, but {run.mode}"
        if run is not None:
            assert one.state in HOLDS_SLOTS
            assert one.places == run.start.places
            assert one.attempt == run.start.attempt
        if one.state in IN_QUEUE:
            assert one.reason.code in WAITS or (one.attempt and one.reason.code in LOSSES), (
                f"{name} waits because of {one.reason}"
            )
        if one.state is TaskState.starting:
            self._check_start_reason(one)
        if (
            one.state is TaskState.failed
            and one.reason.code is ReasonCode.never_fits
            and before.get(name, (None,))[0] is None
        ):
            assert not self.could_fit(one.spec), f"{name} could fit: {one.reason}"

    def _check_start_reason(self, one: Any) -> None:
        spec = self.pools[one.spec.pool]
        assert one.reason.code in STARTS, f"{one.spec.id} starts because of {one.reason}"
        if one.reason.code is ReasonCode.reserved:
            assert one.spec.priority >= spec.reserved_priority
        if one.reason.code is ReasonCode.borrowed:
            assert spec.borrow
        for place in one.places:
            if self.is_reserved(place.group) and not one.spec.shares:
                assert one.spec.priority >= spec.reserved_priority or spec.borrow, f"{one.spec.id} took a reserved slot"

    def _check_deadlines(self) -> None:
        nearest = self.machine.next_deadline()
        for name, one in self.machine.tasks.items():
            if one.state in IN_QUEUE:
                assert one.deadline is not None, f"{name} waits without a deadline"
                assert nearest is not None
                assert nearest <= one.deadline, f"next deadline {nearest}, but {name} has {one.deadline}"

    def explain_all(self) -> None:
        """Whoever waits can say why, until when, and after whom; asking changes nothing."""
        before = self.dumped()
        for name, one in self.machine.tasks.items():
            told = self.machine.explain(name, self.now)
            assert told.reason.sentence
            assert self.machine.story(name)
            if one.state in IN_QUEUE:
                assert told.deadline == one.deadline
                queued = one.reason.code not in (ReasonCode.evicting, ReasonCode.turn)
                assert told.position is not None or not queued, f"{name} waits without a position"
        assert self.dumped() == before

    def capacity(self, node: str, *, outside: bool = True) -> Amounts:
        """What a node has, and each label that some task asked for, as often as anybody may want it."""
        one = self.nodes[node]
        asked = {(key, wanted) for spec in self.specs.values() for key, wanted in spec.label_selector}
        labels = {f"label {key}={wanted}": 2**30 for key, wanted in asked if label_matches(one.labels, key, wanted)}
        return {**amounts(one.total.minus(one.outside) if outside else one.total), **labels}

    def could_fit(self, spec: TaskSpec) -> bool:
        """Whether the task could run if it were alone."""
        pool = self.pools[spec.pool]
        asks = spec.size
        if not fits(amounts(total(spec.bundles)), amounts(pool.quota)):
            return False
        entitled = spec.priority >= pool.reserved_priority or (pool.borrow and spec.evictable)
        if not spec.gang and entitled and any(asks[0].within(slot) for slot in pool.reserved):
            return True
        if not pool.dynamic or (pool.dynamic_limit is not None and len(asks) > pool.dynamic_limit):
            return False
        if not self.nodes:
            return True
        return can_lie(asks, spec.strategy or pool.strategy, {n: self.capacity(n, outside=False) for n in self.nodes})

    # ---- carrying out ----

    def ready(self) -> list[PoolInstruction]:
        """What may be carried out now: groups in the order of what was said of them; a stop overtakes a start."""
        found, groups = [], set()
        for one in self.pending:
            if isinstance(one, CreatePlacementGroup | RemovePlacementGroup):
                if one.group in groups:
                    continue
                groups.add(one.group)
            found.append(one)
        return found

    def carry(self, wanted: PoolInstruction, how: str = "well") -> list[PoolInstruction]:
        """Carry an instruction out, well or badly, and tell of it."""
        self.pending.remove(wanted)
        if isinstance(wanted, CreatePlacementGroup):
            group = self.groups.get(wanted.group)
            if how != "well" or group is None or not group.trusted:
                return self.tell(news.PlacementGroupFailed(wanted.group, "it could not be made"))
            return self.tell(news.PlacementGroupReady(wanted.group))
        if isinstance(wanted, RemovePlacementGroup):
            return self.tell(news.PlacementGroupRemoved(wanted.group))
        run = self.runs.get(wanted.task)
        here = run is not None and run.start.attempt == wanted.attempt
        if isinstance(wanted, StopTask):
            self.pending = [
                one
                for one in self.pending
                if not (
                    isinstance(one, StartTask | ParkTask | UnparkTask)
                    and (one.task, one.attempt) == (wanted.task, wanted.attempt)
                )
            ]
            cancel = "not called" if wanted.cancel_grace_s == 0 else "returned" if how == "well" else "timed out"
            return self.tell(
                news.TaskStopped(wanted.task, wanted.attempt, cancel, how == "well" and wanted.checkpoint_timeout_s > 0)
            )
        if isinstance(wanted, StartTask):
            whole = here and run is not None and len(run.alive) == len(wanted.places)
            if how == "well" and whole and self._places_stand(wanted):
                return self.tell(news.TaskStarted(wanted.task, wanted.attempt, "a warm host"))
            return self.tell(news.TaskStartFailed(wanted.task, wanted.attempt, "it could not be made", how == "fatal"))
        if how != "well" or not here:
            return self.tell(news.TaskDied(wanted.task, wanted.attempt, "it did not give way"))
        kind = news.TaskParked if isinstance(wanted, ParkTask) else news.TaskUnparked
        return self.tell(kind(wanted.task, wanted.attempt))

    def _places_stand(self, wanted: StartTask) -> bool:
        return all(place.group in self.groups and self.groups[place.group].trusted for place in wanted.places)

    def carry_all(self, *kinds: type) -> None:
        """Carry everything out well, and what follows from it."""
        for _ in range(10_000):
            waiting = [one for one in self.ready() if not kinds or isinstance(one, kinds)]
            if not waiting:
                return
            self.carry(waiting[0])
        raise AssertionError(f"it never comes to rest: {self.pending[:5]}")

    def echoes(self) -> list[PoolEvent]:
        """News of what is over: of earlier attempts, and of groups that are gone."""

        def stale(event: Any) -> bool:
            if hasattr(event, "group"):
                return event.group not in self.groups
            return self.attempts.get(event.task, 0) > event.attempt or (
                event.task in self.ends and self._mine(event) is None
            )

        return [event for event in self.told if stale(event)]

    def echo(self, event: PoolEvent) -> None:
        """Say stale news again: it changes nothing."""
        before = self.dumped()
        assert self.machine.handle(event, self.now) == [], f"stale {event} is acted on"
        assert self.dumped() == before, f"stale {event} changes something"

    # ---- plain deeds for tests ----

    def node(
        self, name: str, count: float = 8, outside: Resources = NOTHING, labels: Labels = (), **more: float
    ) -> None:
        self.tell(news.NodeJoined(name, Resources.of(gpu=count, cpu=64, **more), outside, labels))

    def submit(self, *specs: TaskSpec) -> list[PoolInstruction]:
        """Submit, and carry out nothing."""
        return [one for spec in specs for one in self.tell(news.TaskSubmitted(spec))]

    def run(self, *specs: TaskSpec) -> None:
        """Submit, and carry everything out: they run, where there is room."""
        for spec in specs:
            self.tell(news.TaskSubmitted(spec))
            self.carry_all()

    def end(self, name: str, error: str | None = None) -> None:
        """The entry method returns, and all that follows is carried out."""
        self.tell(news.TaskEnded(name, self.runs[name].start.attempt, error))
        self.carry_all()

    def tick(self, seconds: float = 0.0) -> list[PoolInstruction]:
        self.now += seconds
        said = self.tell(news.PoolTick())
        nearest = self.machine.next_deadline()
        assert nearest is None or nearest > self.now, f"the deadline {nearest} has passed, and is still ahead"
        return said

    def state(self, name: str) -> TaskState:
        return self.machine.tasks[name].state

    def why(self, name: str) -> ReasonCode:
        return self.machine.tasks[name].reason.code

    def states(self, *names: str) -> list[str]:
        return [self.state(name).value for name in names]

    def running(self) -> set[str]:
        return {name for name, one in self.machine.tasks.items() if one.state is TaskState.running}

    def stops(self) -> dict[str, ReasonCode]:
        """Whom the machine wants stopped now, and why."""
        return {one.task: one.reason.code for one in self.pending if isinstance(one, StopTask)}

    # ---- the end ----

    def quiet(self, patience_s: float = 100.0) -> None:
        """No fault any more, and everything that runs ends in turn: nobody who could run is left waiting."""
        for node in [name for name, one in self.nodes.items() if one.cordoned]:
            self.tell(news.NodeCordoned(node, False))
        for name in sorted(self.drained):
            self.tell(news.PoolDrained(name, False))
        moved_at = self.now
        while self.now - moved_at < patience_s:
            self.carry_all()
            ready = [n for n, run in self.runs.items() if run.mode == "active" and run.stop is None and run.entry]
            parked = [n for n, run in self.runs.items() if run.mode == "parked" and run.stop is None]
            if ready:
                self.tell(news.TaskEnded(ready[0], self.runs[ready[0]].start.attempt))
            elif parked:
                self.tell(news.TurnRequested(parked[0]))
            elif all(one.state in ENDED for one in self.machine.tasks.values()):
                break
            if ready or parked:
                moved_at = self.now
            self.tick(1.0 if ready or parked else 7.0)
        self.carry_all()
        assert not self.runs, f"never ended: {sorted(self.runs)}"
        for name, one in self.machine.tasks.items():
            if one.state in IN_QUEUE:
                assert not self.fits_alone(one.spec), f"{name} starves: {one.reason}"

    def fits_alone(self, spec: TaskSpec) -> bool:
        """Whether nothing but reserved slots stands in its way, now that nobody runs."""
        free = {name: self.capacity(name) for name in self.nodes}
        for name, group in self.groups.items():
            for at, node in enumerate(group.made.nodes):
                if node in free and self.is_reserved(name):
                    free[node] = added(free[node], amounts(group.made.bundles[at]), -1)
        pool = self.pools[spec.pool]
        if not self.could_fit(spec) or spec.shares or not pool.dynamic:
            return False
        return can_lie(spec.size, spec.strategy or pool.strategy, free)

    def close(self) -> None:
        """Deadlines pass and pools are dropped: nobody waits any more, and nothing is left behind."""
        for _ in range(200):
            nearest = self.machine.next_deadline()
            if nearest is None or all(one.state in ENDED for one in self.machine.tasks.values()):
                break
            self.tick(max(0.0, nearest - self.now))
            self.carry_all()
        late = {name: one.reason for name, one in self.machine.tasks.items() if one.state in IN_QUEUE}
        assert not late, f"they wait for ever: {late}"
        for name in sorted(self.pools):
            self.tell(news.PoolDropped(name))
        self.carry_all()
        assert not self.runs
        assert not self.groups, f"left behind: {sorted(self.groups)}"
