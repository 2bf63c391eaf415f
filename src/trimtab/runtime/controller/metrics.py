"""Metrics for Ray's exporter, which prefixes every name with `ray_` (and appends `_total` to counters).

Of pools, and of nodes and elastic groups. They only read. After a failure they stop and `fault` says why; scheduling
must never be affected. Latencies are computed from task stories, so they survive a restart of the controller; counters
restart at 0, as Prometheus expects. `observe` is called after every event and takes microseconds, `sample` about once a
second. An outside autoscaler reads `trimtab_desired_workers`: nodes that could be used, including the present ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import ReasonCode, StoryEntry
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import PoolEvent, TaskStarted, TaskStopped
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.records import PgState, PlacementGroup, PlacementGroupKind, PoolTask
from trimtab.model.nodes import THERE, NodeState, NodeView
from trimtab.model.pool import IN_QUEUE, TaskState
from trimtab.runtime.controller.clients import ClientRegistry

log = logging.getLogger("trimtab.controller")

SAMPLE_EVERY_S = 0.9  # at least; longer with many tasks
SAMPLE_SHARE = 0.01  # maximum share of the controller's time spent on sampling
CHUNK = 500  # records per iteration of the event loop: less than 1 ms
BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 10e3, 20e3, 30e3, 60e3, 120e3, 300e3, 600e3)
_IN_QUEUE = frozenset(state.value for state in IN_QUEUE)


class MetricSpec(Frozen):
    """Definition of a metric; the label `controller` is added to all."""

    name: str
    kind: str  # counter, histogram or gauge
    labels: tuple[str, ...]
    meaning: str

    @property
    def exported(self) -> str:
        """The Prometheus name; histograms add _bucket, _sum and _count."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


PREEMPTIONS = MetricSpec(
    "trimtab_preemption_count", "counter", ("pool", "reason"), "Tasks that were evicted from a pool."
)
PREEMPTION_MS = MetricSpec(
    "trimtab_preemption_execution_latency_ms",
    "histogram",
    ("pool",),
    "From the eviction until the task it was made for has started (evicted by a user: until it has stopped).",
)
SCHEDULE_MS = MetricSpec(
    "trimtab_task_schedule_latency_ms",
    "histogram",
    ("pool",),
    "From submission, or the return to the queue, until the task has started.",
)
QUEUE = MetricSpec("trimtab_queue_length", "gauge", ("pool",), "Tasks in the queue, evicted ones included.")
OLDEST_S = MetricSpec("trimtab_queue_oldest_wait_s", "gauge", ("pool",), "Longest wait of the tasks in the queue.")
SLOTS = MetricSpec("trimtab_slots", "gauge", ("pool", "state"), "Slots: idle, taken, making, removing, wanted.")
TASKS = MetricSpec("trimtab_tasks", "gauge", ("pool", "state"), "Known tasks, by state.")
WARM = MetricSpec("trimtab_warm_hosts", "gauge", ("node", "state"), "Warm hosts, by state: ready, starting.")
WARM_TARGET = MetricSpec("trimtab_warm_hosts_target", "gauge", ("pool",), "Warm hosts configured for the pool.")
METRICS = (PREEMPTIONS, PREEMPTION_MS, SCHEDULE_MS, QUEUE, OLDEST_S, SLOTS, TASKS, WARM, WARM_TARGET)

NODES = MetricSpec("trimtab_nodes", "gauge", ("state",), "Present and recently lost nodes, by state.")
DESIRED = MetricSpec("trimtab_desired_workers", "gauge", (), "Nodes that could be used, present ones included.")
WANTED = MetricSpec("trimtab_group_members_wanted", "gauge", ("group",), "Members that an elastic group could use.")
SIZE = MetricSpec("trimtab_group_members", "gauge", ("group",), "Members of an elastic group.")
REDONE = MetricSpec("trimtab_group_steps_redone", "counter", ("group",), "Steps that were interrupted and repeated.")
RESTARTS = MetricSpec("trimtab_group_restarts", "counter", ("group",), "Members that were lost, unhealthy or hung.")
JOIN_MS = MetricSpec(
    "trimtab_node_join_to_step_ms", "histogram", ("group",), "From the join of a node to the first step with it."
)
LEAD_MS = MetricSpec(
    "trimtab_drain_lead_ms", "histogram", ("group",), "How long before a node's deadline its last member was gone."
)
NODE_METRICS = (NODES, DESIRED, WANTED, SIZE, REDONE, RESTARTS, JOIN_MS, LEAD_MS)

Record = TypeVar("Record")
MetricRecorder = Callable[[float, dict[str, str]], None]


class MetricRecorders:
    """Records metrics of a controller in Ray's exporter."""

    def __init__(
        self, of: str, metrics: Sequence[MetricSpec], controller: str, make: Callable[[MetricSpec], MetricRecorder]
    ) -> None:
        self._of = of
        self._controller = {"controller": controller}
        self._recorders: dict[str, MetricRecorder] = {}
        self.fault: str | None = None
        try:
            self._recorders = {metric.name: make(metric) for metric in metrics}
        except Exception as fault:
            self._disable(fault)

    def _record(self, metric: MetricSpec, figure: float, *labels: str) -> None:
        tags = {**self._controller, **dict(zip(metric.labels, labels, strict=True))}
        self._recorders[metric.name](max(0.0, float(figure)), tags)

    def _disable(self, fault: Exception) -> None:
        self.fault = f"{self._of} stopped: {type(fault).__name__}: {fault}"
        log.error(self.fault, exc_info=fault)


def aliased(make: Callable[[MetricSpec], MetricRecorder], prefix: str) -> Callable[[MetricSpec], MetricRecorder]:
    """Recorders of counters and histograms that record under a second prefix too."""

    def both(metric: MetricSpec) -> MetricRecorder:
        record = make(metric)
        if metric.kind == "gauge":
            return record
        also = make(replace(metric, name=f"{prefix}_{metric.name.removeprefix('trimtab_')}"))

        def recorder(figure: float, labels: dict[str, str]) -> None:
            record(figure, labels)
            also(figure, labels)

        return recorder

    return both


class PoolMetrics(MetricRecorders):
    """Reports the pool machine."""

    def __init__(
        self,
        controller: str,
        machine: PoolMachine,
        make: Callable[[MetricSpec], MetricRecorder] | None = None,
        alias: str = "",
    ) -> None:
        self._machine = machine
        self._counted = machine.eviction_count  # evictions before this process are not counted again
        self._seen_labels: dict[str, set[tuple[str, ...]]] = {}  # by gauge; labels that vanish are set to 0
        self._next_sample = 0.0
        make = make or in_ray
        super().__init__("metrics", METRICS, controller, aliased(make, alias) if alias else make)

    def observe(self, event: PoolEvent) -> None:
        """Record a handled event. Never raises."""
        if self.fault is not None:
            return
        try:
            if self._machine.eviction_count != self._counted:
                self._count_evictions()
            if isinstance(event, TaskStarted):
                self._time_start(event)
            elif isinstance(event, TaskStopped):
                self._time_eviction(event)
        except Exception as fault:
            self._disable(fault)

    async def sample(self, warm_counts: Mapping[str, Mapping[str, int]]) -> None:
        """Update the gauges, if it is time to. Never raises."""
        began = time.monotonic()
        if self.fault is not None or began < self._next_sample:
            return
        worked = time.thread_time()
        try:
            await self._sample(warm_counts)
        except Exception as fault:
            self._disable(fault)
        self._next_sample = began + max(SAMPLE_EVERY_S, (time.thread_time() - worked) / SAMPLE_SHARE)

    # ---- counters, histograms -------------------------------------------------------------------------------

    def _count_evictions(self) -> None:
        new = self._machine.eviction_count - self._counted
        self._counted = self._machine.eviction_count
        for eviction in self._machine.evictions[-new:]:
            self._record(PREEMPTIONS, 1, eviction.victim_pool, eviction.reason.code.value)

    def _time_start(self, event: TaskStarted) -> None:
        task = self._machine.tasks.get(event.task)
        if task is None or task.attempt != event.attempt or task.started_at != self._machine.now:
            return  # a late event, which changed nothing
        queued_at, claimed_at = _waited_since(task)
        if queued_at is not None:
            self._record(SCHEDULE_MS, (self._machine.now - queued_at) * 1e3, task.spec.pool)
        if task.reason.code is ReasonCode.preempted and claimed_at is not None:
            self._record(PREEMPTION_MS, (self._machine.now - claimed_at) * 1e3, task.spec.pool)

    def _time_eviction(self, event: TaskStopped) -> None:
        """Record an eviction by a user, which ends when the task has stopped."""
        task = self._machine.tasks.get(event.task)
        ordered_at = _evicted_by_user_at(task.story, self._machine.now) if task is not None else None
        if task is not None and ordered_at is not None:
            self._record(PREEMPTION_MS, (self._machine.now - ordered_at) * 1e3, task.spec.pool)

    # ---- gauges ---------------------------------------------------------------------------------------------

    async def _sample(self, warm_counts: Mapping[str, Mapping[str, int]]) -> None:
        await self._sample_tasks(list(self._machine.pools))
        await self._sample_slots(list(self._machine.pools))
        self._set_gauge(WARM, {(node[:12], state): n for node, by in warm_counts.items() for state, n in by.items()})
        self._set_gauge(WARM_TARGET, {(name,): pool.spec.target_hosts for name, pool in self._machine.pools.items()})

    async def _sample_tasks(self, pools: list[str]) -> None:
        states: dict[str, list[TaskState]] = {pool: [] for pool in pools}
        since: dict[str, list[float]] = {pool: [] for pool in pools}
        async for chunk in _in_chunks(self._machine.tasks.values()):
            for task in chunk:
                state, pool = task.state, task.spec.pool
                if pool in states:
                    states[pool].append(state)
                    if state is TaskState.waiting or state is TaskState.evicted:
                        since[pool].append(task.since)
        now = max(self._machine.now, time.time())
        self._set_gauge(QUEUE, {(pool,): len(since[pool]) for pool in pools})
        self._set_gauge(OLDEST_S, {(pool,): now - min(since[pool], default=now) for pool in pools})
        self._set_gauge(
            TASKS, {(pool, state.value): states[pool].count(state) for pool in pools for state in TaskState}
        )

    async def _sample_slots(self, pools: list[str]) -> None:
        slots = {pool: dict.fromkeys(("idle", "taken", "making", "removing", "wanted"), 0) for pool in pools}
        async for chunk in _in_chunks(self._machine.groups.values()):
            for group in chunk:
                if group.pool in slots:
                    slots[group.pool][_slot_state(group)] += len(group.bundles)
                    slots[group.pool]["wanted"] -= group.kind is PlacementGroupKind.reserved
        for name, pool in self._machine.pools.items():
            if name in slots:
                slots[name]["wanted"] += len(pool.spec.reserved) - len(pool.retired)
        self._set_gauge(SLOTS, {(pool, state): n for pool, by in slots.items() for state, n in by.items()})

    def _set_gauge(self, metric: MetricSpec, figures: Mapping[tuple[str, ...], float]) -> None:
        seen = self._seen_labels.setdefault(metric.name, set())
        for labels in seen.difference(figures):
            self._record(metric, 0, *labels)
        for labels, figure in figures.items():
            self._record(metric, figure, *labels)
        self._seen_labels[metric.name] = set(figures)


async def _in_chunks(records: Collection[Record]) -> AsyncIterator[list[Record]]:
    """In chunks, yielding to the event loop in between."""
    everything = list(records)
    for start in range(0, len(everything), CHUNK):
        yield everything[start : start + CHUNK]
        await asyncio.sleep(0)


def _slot_state(group: PlacementGroup) -> str:
    if group.state is PgState.ready:
        return "taken" if group.tenants else "idle"
    return "making" if group.state is PgState.creating else "removing"


def _waited_since(task: PoolTask) -> tuple[float | None, float | None]:
    """When a task that has just started was queued, and when others were evicted for it."""
    queued_at = claimed_at = None
    left = False
    for entry in reversed(task.story):
        if entry.state in _IN_QUEUE:
            left = True
            queued_at = entry.at
            if claimed_at is None and entry.reason.code is ReasonCode.evicting:
                claimed_at = entry.at
        elif left:
            break
    return queued_at, claimed_at


def _evicted_by_user_at(story: list[StoryEntry], now: float) -> float | None:
    """When a user evicted a task that has stopped just now; None if it was not evicted by a user."""
    gone = False
    for entry in reversed(story):
        if entry.state == TaskState.cancelling.value:
            return entry.at if gone and entry.reason.code is ReasonCode.by_hand else None
        if entry.at < now:
            return None
        gone = gone or entry.state == TaskState.evicted.value
    return None


def in_ray(metric: MetricSpec) -> MetricRecorder:
    """Create the metric in this process, which must be a Ray process."""
    from ray.util import metrics

    common: dict[str, Any] = {"description": metric.meaning, "tag_keys": ("controller", *metric.labels)}
    recorder: MetricRecorder
    if metric.kind == "counter":
        recorder = metrics.Counter(metric.name, **common).inc
    elif metric.kind == "histogram":
        recorder = metrics.Histogram(metric.name, boundaries=list(BUCKETS_MS), **common).observe
    else:
        recorder = metrics.Gauge(metric.name, **common).set
    return recorder


class NodeMetrics(MetricRecorders):
    """Reports nodes and elastic groups. Never raises."""

    def __init__(self, controller: str) -> None:
        self._counted: dict[tuple[str, str], float] = {}  # by metric and group: last value reported by the group
        self._groups: set[str] = set()  # with gauges
        super().__init__("metrics of nodes and groups", NODE_METRICS, controller, in_ray)

    def observe(self, kind: str, id: str, facts: Mapping[str, Any]) -> None:
        """Record facts that a group published."""
        if self.fault is not None or kind != "group":
            return
        try:
            for metric, key in ((REDONE, "redone"), (RESTARTS, "restarts")):
                value = float(facts.get(key) or 0)
                before = self._counted.get((metric.name, id), 0.0)
                self._counted[metric.name, id] = value
                if value > before:
                    self._record(metric, value - before, id)
            for metric, key in ((JOIN_MS, "join_to_step_s"), (LEAD_MS, "drain_lead_s")):
                for seconds in facts.get(key) or ():
                    self._record(metric, seconds * 1e3, id)
        except Exception as fault:
            self._disable(fault)

    def sample(self, nodes: Sequence[NodeView], desired: int, client_registry: ClientRegistry) -> None:
        """Update the gauges."""
        if self.fault is not None:
            return
        try:
            states = Counter(node.state for node in nodes)
            for state in NodeState:
                self._record(NODES, states[state], state.value)
            self._record(DESIRED, desired)
            groups = {notice.id: notice.facts for notice in client_registry.notices("group")}
            for id in self._groups | set(groups):
                facts = groups.get(id, {})
                self._record(WANTED, float(facts.get("wanted") or 0), id)
                self._record(SIZE, float(facts.get("size") or 0), id)
            self._groups = set(groups)
        except Exception as fault:
            self._disable(fault)


def desired_workers(nodes: Sequence[NodeView], busy: Collection[str], wanted: Sequence[Mapping[str, float]]) -> int:
    """Number of worker nodes that could be used: enough of the largest present type for all wanted bundles, at least
    those in use.

    Workers are the nodes with GPUs, or all but the head if no node has one. If nothing is wanted: the present nodes
    that are not draining.
    """
    staying = [node for node in nodes if node.state in THERE and node.state is not NodeState.draining]
    with_gpus = [node for node in staying if node.facts.total.get("gpu")]
    staying = with_gpus or [node for node in staying if not node.facts.head]
    if not wanted:
        return len(staying)
    if not staying:
        return 1  # its type is not known yet; once it has joined, the rest is computed
    totals = [dict(node.facts.total) for node in staying]
    largest = max(totals, key=lambda amounts: (amounts.get("gpu", 0), amounts.get("cpu", 0)))
    wanted_units: Counter[str] = Counter()
    for bundle in wanted:
        wanted_units.update(dict(Resources.of(bundle, where="what is wanted")))
    shares = [units / largest[name] for name, units in wanted_units.items() if largest.get(name)]
    return max(sum(node.node in busy for node in staying), math.ceil(max(shares, default=0.0)))
