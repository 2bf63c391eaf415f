"""Policies that can be compared: the pool machine with its settings, baselines, and the clairvoyant bound, by name.

Baselines take the events and give the instructions of the pool machine, so the same driver runs both on the same
reality. They create a placement group for every start and remove it at the end. A job at the head that does not fit
blocks the jobs behind it (strict), or jobs that fit pass it (`fill`). A task lost with its node returns to its place in
the order. They never evict a task, except from a draining node; only least attained service preempts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.core.errors import InputError, check_known
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import GRAIN, Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import BundlePlacement, PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec
from trimtab.replay.pool.driver import POOL, PoolScheduler

ENDS = Reason(ReasonCode.completed, "its work is done")
LOST = Reason(ReasonCode.node_lost, "its node was lost")
CREATE_S = START_S = 1e9  # no time limits
CANCEL_GRACE_S, CHECKPOINT_TIMEOUT_S = 5.0, 60.0  # the pool machine's defaults


class FreeGpuIndex:
    """Free GPUs by node, best fit first, without scanning all nodes.

    A job goes to the node with the fewest free GPUs that can hold it; a gang takes a node for each of its bundles.
    """

    def __init__(self, node_gpus: int) -> None:
        self.node_gpus = node_gpus
        self.free: dict[str, int] = {}  # by schedulable node
        self.total: dict[str, int] = {}  # by node: its GPUs when it joined
        self._order: dict[str, int] = {}
        self._by_free: list[list[tuple[int, str]]] = [[] for _ in range(node_gpus + 1)]  # heaps; entries may be stale

    def add(self, node: str, free: int) -> None:
        """The node becomes schedulable."""
        self._order.setdefault(node, len(self._order))
        self.free[node] = self.total[node] = free
        self._push(node)

    def drop(self, node: str) -> None:
        """The node is draining or lost."""
        self.free.pop(node, None)

    def take(self, node: str, gpus: int) -> None:
        self.free[node] -= gpus
        self._push(node)

    def give(self, node: str, gpus: int) -> None:
        """Frees GPUs if the node still exists."""
        if node in self.free:
            self.free[node] += gpus
            self._push(node)

    def find_nodes(self, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
        """Nodes for all bundles of a job, or None."""
        if len(sizes) == 1:
            node = self._best_fit(sizes[0])
            return None if node is None else (node,)
        taken: list[str] = []
        for size in sizes:
            node = self._best_fit(size)
            if node is None:
                break
            taken.append(node)
            self.take(node, size)
        for node, size in zip(taken, sizes, strict=False):
            self.give(node, size)
        return tuple(taken) if len(taken) == len(sizes) else None

    def _best_fit(self, gpus: int) -> str | None:
        for free in range(gpus, self.node_gpus + 1):
            heap = self._by_free[free]
            while heap:
                node = heap[0][1]
                if self.free.get(node) == free:
                    return node
                heapq.heappop(heap)
        return None

    def _push(self, node: str) -> None:
        heapq.heappush(self._by_free[self.free[node]], (self._order[node], node))


@dataclass
class BaselineJob:
    """A task's state in a baseline."""

    spec: TaskSpec
    sizes: tuple[int, ...]  # GPUs of its bundles
    seq: int
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    group: str = ""
    state: str = "waiting"  # then creating (its group), running, stopping, removing
    over: bool = False  # its work is done
    saved: bool = False


class BaselineScheduler:
    """Common part of the baselines: queues, nodes, placement groups, starts and ends."""

    fill = True  # jobs that fit pass those that do not

    def __init__(self, node_gpus: int) -> None:
        self._queues: dict[tuple[float, tuple[int, ...]], list[tuple[int, str]]] = {}  # by level and size
        self.free_gpus = FreeGpuIndex(node_gpus)
        self.jobs: dict[str, BaselineJob] = {}  # not ended
        self.by_group: dict[str, str] = {}
        self.closed: set[str] = set()  # draining nodes
        self.out: list[e.PoolInstruction] = []
        self.count = 0
        self.now = 0.0

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        """Processes an event and returns instructions."""
        self.out, self.now = [], now
        if isinstance(event, e.TaskSubmitted):
            self.count += 1
            sizes = tuple(bundle.get("gpu") // GRAIN for bundle in event.spec.bundles)
            job = self.jobs[event.spec.id] = BaselineJob(event.spec, sizes, self.count)
            self.enqueue(job)
            self.schedule()
        elif isinstance(event, e.PlacementGroupReady):
            self._group_ready(event.group)
        elif isinstance(event, e.TaskEnded):
            self._work_done(self.jobs[event.task])
        elif isinstance(event, e.TaskStarted):
            self.started(self.jobs[event.task])
        elif isinstance(event, e.TaskStopped):
            job = self.jobs[event.task]
            job.saved = job.saved or event.saved
            self._remove(job)
        elif isinstance(event, e.PlacementGroupRemoved):
            self._group_removed(self.jobs[self.by_group[event.group]])
            self.schedule()
        elif isinstance(event, e.NodeJoined):
            self.closed.discard(event.node)
            self.free_gpus.add(event.node, event.total.get("gpu") // GRAIN)
            self.schedule()
        elif isinstance(event, e.NodeDrained | e.NodeLost):
            self._node_unavailable(event.node, isinstance(event, e.NodeLost))
            self.schedule()
        elif isinstance(event, e.PoolTick):
            self.schedule()
        return self.out

    def next_deadline(self) -> float | None:
        return None

    def check(self) -> None:
        """Asserts that free, held and reserved GPUs of every node add up."""
        held: dict[str, int] = {}
        for job in self.jobs.values():
            for node, size in zip(job.nodes, job.sizes, strict=False):
                held[node] = held.get(node, 0) + size
        for node, free in self.free_gpus.free.items():
            assert free >= 0, f"{node} is overcommitted"
            assert free + held.get(node, 0) + self.reserved(node) == self.free_gpus.total[node], (
                f"{node}: free GPUs do not add up"
            )

    def level(self, job: BaselineJob) -> float:
        """Jobs of a lower level start first; within a level, by submission."""
        return 0.0

    def enqueue(self, job: BaselineJob) -> None:
        heapq.heappush(self._queues.setdefault((self.level(job), job.sizes), []), (job.seq, job.spec.id))

    def schedule(self) -> None:
        """Starts the jobs that may start."""
        heads = [(level, queue[0], (level, sizes)) for (level, sizes), queue in self._queues.items()]
        heapq.heapify(heads)
        while heads:
            level, (_, name), key = heapq.heappop(heads)
            if not self.place(self.jobs[name], level):
                if not self.fill:
                    return
                continue  # neither could another job of its size and level be placed
            queue = self._queues[key]
            heapq.heappop(queue)
            if queue:
                heapq.heappush(heads, (level, queue[0], key))
            else:
                del self._queues[key]

    def place(self, job: BaselineJob, level: float) -> bool:
        nodes = self.free_gpus.find_nodes(job.sizes)
        if nodes is not None:
            self.assign(job, nodes)
        return nodes is not None

    def started(self, job: BaselineJob) -> None:
        """Its work begins."""

    def ended(self, job: BaselineJob) -> None:
        """Its work ended or is being stopped."""

    def reserved(self, node: str) -> int:
        """GPUs that are neither free nor held by a job."""
        return 0

    def assign(self, job: BaselineJob, nodes: tuple[str, ...]) -> None:
        """Assigns free nodes to the job and creates its placement group."""
        for node, size in zip(nodes, job.sizes, strict=True):
            self.free_gpus.take(node, size)
        self.count += 1
        job.nodes, job.group, job.state = nodes, f"g{self.count}", "creating"
        job.attempt += 1
        self.by_group[job.group] = job.spec.id
        self.out.append(
            e.CreatePlacementGroup(
                job.group, job.spec.pool, job.spec.bundles, nodes, PlacementStrategy.pack, self.now + CREATE_S
            )
        )

    def _group_ready(self, group: str) -> None:
        job = self.jobs[self.by_group[group]]
        if job.state != "creating":
            return  # cancelled in the meantime
        places = tuple(BundlePlacement(job.group, at, node) for at, node in enumerate(job.nodes))
        job.state = "running"
        self.out.append(e.StartTask(job.spec.id, job.attempt, places, job.saved, self.now + START_S))

    def stop(self, job: BaselineJob, reason: Reason, checkpoint_timeout_s: float = 0.0) -> None:
        job.state = "stopping"
        grace_s = CANCEL_GRACE_S if checkpoint_timeout_s else 0.0
        self.out.append(
            e.StopTask(job.spec.id, job.attempt, reason, grace_s, checkpoint_timeout_s=checkpoint_timeout_s)
        )

    def _work_done(self, job: BaselineJob) -> None:
        self.ended(job)
        self.stop(job, ENDS)
        job.over = True

    def _remove(self, job: BaselineJob) -> None:
        job.state = "removing"
        self.out.append(e.RemovePlacementGroup(job.group))

    def _group_removed(self, job: BaselineJob) -> None:
        self.release(job)
        if job.over:
            del self.jobs[job.spec.id]
        else:
            self.enqueue(job)

    def release(self, job: BaselineJob) -> None:
        """Its placement group is removed: frees its nodes."""
        for node, size in zip(job.nodes, job.sizes, strict=False):
            self.free_gpus.give(node, size)
        del self.by_group[job.group]
        job.nodes, job.group, job.state = (), "", "waiting"

    def _node_unavailable(self, node: str, lost: bool) -> None:
        self.free_gpus.drop(node)
        self.closed.add(node)
        for job in [job for job in self.jobs.values() if node in job.nodes]:
            if lost:
                # A later node of that name holds nothing of it.
                job.nodes = tuple("" if name == node else name for name in job.nodes)
            if job.state == "running":
                self.ended(job)
                self.stop(job, LOST, 0.0 if lost else CHECKPOINT_TIMEOUT_S)
            elif job.state == "creating":
                self._remove(job)


class OrderedScheduler(BaselineScheduler):
    """Orders jobs by submission time, or by priority first."""

    def __init__(self, node_gpus: int, *, by_priority: bool = False, fill: bool = False) -> None:
        super().__init__(node_gpus)
        self._by_priority, self.fill = by_priority, fill

    def level(self, job: BaselineJob) -> float:
        return -job.spec.priority if self._by_priority else 0.0


THRESHOLD_GPU_S = 3_600.0


@dataclass
class _PendingClaim:
    """GPUs that are being freed for a job by preemption."""

    job: BaselineJob
    nodes: tuple[str, ...]
    leaving: set[str]
    reserved: dict[str, int] = field(default_factory=dict)


class LeastAttained(BaselineScheduler):
    """Least attained service first, similar to Tiresias: jobs with the fewest GPU-seconds run first.

    Two levels: jobs below `threshold_gpu_s` are in the first, others in the second; within a level the order is by
    submission. A first-level job that does not fit preempts second-level jobs, most service first, on the nodes where
    the fewest have to go. Priorities and lengths are unknown to it. Jobs that wait long are not promoted. GPUs freed by
    preemption are reserved for the job they were freed for.
    """

    def __init__(self, node_gpus: int, threshold_gpu_s: float = THRESHOLD_GPU_S) -> None:
        super().__init__(node_gpus)
        self._threshold = threshold_gpu_s
        self._service: dict[str, float] = {}  # GPU-seconds of earlier attempts
        self._since: dict[str, float] = {}  # by running job: start of its work
        self._second: dict[str, dict[str, int]] = {}  # by node: running second-level jobs and their GPUs there
        self._demotions: list[tuple[float, str, int]] = []
        self._claims: dict[str, _PendingClaim] = {}  # by preempted job
        self._reserved: dict[str, int] = {}

    def next_deadline(self) -> float | None:
        """Time of the next demotion to the second level."""
        while self._demotions:
            at, name, attempt = self._demotions[0]
            job = self.jobs.get(name)
            if job is not None and job.state == "running" and job.attempt == attempt:
                return at
            heapq.heappop(self._demotions)
        return None

    def level(self, job: BaselineJob) -> float:
        return float(self._service.get(job.spec.id, 0.0) >= self._threshold)

    def started(self, job: BaselineJob) -> None:
        if job.state != "running":
            return
        name = job.spec.id
        self._since[name] = self.now
        left = self._threshold - self._service.get(name, 0.0)
        if left > 0:
            heapq.heappush(self._demotions, (self.now + left / sum(job.sizes), name, job.attempt))
        else:
            self._set_second_level(job, True)

    def ended(self, job: BaselineJob) -> None:
        """Adds up its service so far."""
        name = job.spec.id
        since = self._since.pop(name, None)
        if since is not None:
            self._service[name] = self._service.get(name, 0.0) + (self.now - since) * sum(job.sizes)
        self._set_second_level(job, False)

    def reserved(self, node: str) -> int:
        """GPUs reserved for jobs that preempted others."""
        return self._reserved.get(node, 0)

    def schedule(self) -> None:
        """Demotes jobs that are due, starts jobs that fit, preempts for the first level."""
        while (due := self.next_deadline()) is not None and due <= self.now:
            _, name, _ = heapq.heappop(self._demotions)
            self._set_second_level(self.jobs[name], True)
        super().schedule()

    def place(self, job: BaselineJob, level: float) -> bool:
        return super().place(job, level) or (level == 0 and self._preempt_for(job))

    def _set_second_level(self, job: BaselineJob, second: bool) -> None:
        for node, size in zip(job.nodes, job.sizes, strict=False):
            here = self._second.setdefault(node, {})
            if second:
                here[job.spec.id] = here.get(job.spec.id, 0) + size
            else:
                here.pop(job.spec.id, None)

    def _attained(self, name: str) -> float:
        return self._service.get(name, 0.0) + (self.now - self._since[name]) * sum(self.jobs[name].sizes)

    def _preempt_for(self, job: BaselineJob) -> bool:
        """Preempts on the nodes with the fewest victims; False if that is impossible."""
        wanted = list(job.sizes)
        candidates = []
        for node, free in self.free_gpus.free.items():
            second_level = self._second.get(node, {})
            if free + sum(second_level.values()) >= wanted[0]:
                leaving, available = [], free
                for name in sorted(second_level, key=lambda name: -self._attained(name)):
                    if available >= wanted[0]:
                        break
                    leaving.append(name)
                    available += second_level[name]
                candidates.append((len(leaving), node, leaving))
        if len(candidates) < len(wanted):
            return False
        candidates.sort(key=lambda candidate: candidate[:2])
        chosen = candidates[: len(wanted)]  # the other bundles of a gang are not larger than its first
        nodes = tuple(node for _, node, _ in chosen)
        together = dict.fromkeys(name for _, _, names in chosen for name in names)
        self._claim(job, nodes, list(together))
        return True

    def _claim(self, job: BaselineJob, nodes: tuple[str, ...], leaving: list[str]) -> None:
        claim = _PendingClaim(job, nodes, set(leaving))
        for node, size in zip(nodes, job.sizes, strict=True):
            self._reserve(claim, node, min(size, self.free_gpus.free[node]))
        reason = Reason(ReasonCode.priority, f"{job.spec.id} has had less service")
        for name in leaving:
            self._claims[name] = claim
            victim = self.jobs[name]
            self.ended(victim)
            self.stop(victim, reason, CHECKPOINT_TIMEOUT_S)

    def _reserve(self, claim: _PendingClaim, node: str, gpus: int) -> None:
        self.free_gpus.take(node, gpus)
        claim.reserved[node] = claim.reserved.get(node, 0) + gpus
        self._reserved[node] = self._reserved.get(node, 0) + gpus

    def _unreserve(self, claim: _PendingClaim) -> None:
        for node, gpus in claim.reserved.items():
            self._reserved[node] -= gpus
            self.free_gpus.give(node, gpus)
        claim.reserved = {}

    def release(self, job: BaselineJob) -> None:
        """Gives the GPUs to the preempting job once all its victims are gone."""
        super().release(job)
        claim = self._claims.pop(job.spec.id, None)
        if claim is None:
            return
        claim.leaving.discard(job.spec.id)
        if not all(node in self.free_gpus.free for node in claim.nodes):
            self._cancel_claim(claim)
            return
        for node, size in zip(claim.nodes, claim.job.sizes, strict=True):
            self._reserve(claim, node, min(size - claim.reserved.get(node, 0), self.free_gpus.free[node]))
        if not claim.leaving:
            self._unreserve(claim)
            self.assign(claim.job, claim.nodes)

    def _cancel_claim(self, claim: _PendingClaim) -> None:
        """A node of the claim is gone: the job waits again."""
        self._unreserve(claim)
        for name in [name for name, other in self._claims.items() if other is claim]:
            del self._claims[name]
        self.enqueue(claim.job)

    def _node_unavailable(self, node: str, lost: bool) -> None:
        self._reserved.pop(node, None)
        for claim in {id(claim): claim for claim in self._claims.values() if node in claim.nodes}.values():
            claim.reserved.pop(node, None)
            self._cancel_claim(claim)
        self._second.pop(node, None)
        super()._node_unavailable(node, lost)


UNLIMITED_S = 1e9
PREEMPTION_KEYS = tuple(
    item.name for item in fields(PreemptionPolicy) if item.name not in ("label_rules", "protected_pools", "cross_pool")
)
POOL_KEYS = ("starvation_timeout_s", "starvation_runs", "reuse", "return_preempts")
SWITCHES = ("same_pool", "reuse", "return_preempts")  # booleans; the others are numbers

KNOWN = {
    "trimtab": "the pool machine, with preemption",
    "trimtab_no_preemption": "the pool machine, without preemption",
    "fifo": "first come first served; a job that does not fit blocks all behind it",
    "fifo_fill": "first come first served; jobs that fit pass those that do not",
    "priority": "by priority, no preemption; a job that does not fit blocks all behind it",
    "priority_fill": "by priority, no preemption; jobs that fit pass those that do not",
    "las": "least attained service first, two levels (Tiresias-like)",
    "clairvoyant": "knows all lengths; preempts and moves at no cost, no fragmentation: a bound",
}


class PoolPolicy(Frozen):
    """A policy of a scenario."""

    name: str  # as shown in tables
    use: str  # a key of KNOWN
    preemption: dict[str, Any] = field(default_factory=dict)  # overrides of PreemptionPolicy
    pool: dict[str, Any] = field(default_factory=dict)  # overrides of PoolSpec
    threshold_gpu_s: float = THRESHOLD_GPU_S  # of least attained service

    def __post_init__(self) -> None:
        where = f"policy {self.name}"
        check_known([self.use], KNOWN, where, "unknown policy {}")
        check_known(self.preemption, PREEMPTION_KEYS, where)
        check_known(self.pool, POOL_KEYS, where)
        if (self.preemption and self.use != "trimtab") or (self.pool and not self.use.startswith("trimtab")):
            raise InputError(f"{self.use} takes no such settings", where=where, hint="they go with use: trimtab")
        PreemptionPolicy(**self.preemption)  # raises where a value is wrong
        PoolSpec(POOL, Resources(), **self.pool)

    def text(self) -> str:
        more = {**self.preemption, **self.pool}
        if self.use == "las":
            more["threshold_gpu_s"] = self.threshold_gpu_s
        changes = ", ".join(f"{key} {value}" for key, value in more.items())
        return KNOWN[self.use] + (f" ({changes})" if changes else "")


def scheduler(policy: PoolPolicy, node_gpus: int, quota_gpus: int) -> tuple[PoolScheduler, list[e.PoolEvent]]:
    """A new scheduler, and the events that configure it."""
    made: dict[str, Callable[[], PoolScheduler]] = {
        "fifo": lambda: OrderedScheduler(node_gpus),
        "fifo_fill": lambda: OrderedScheduler(node_gpus, fill=True),
        "priority": lambda: OrderedScheduler(node_gpus, by_priority=True),
        "priority_fill": lambda: OrderedScheduler(node_gpus, by_priority=True, fill=True),
        "las": lambda: LeastAttained(node_gpus, policy.threshold_gpu_s),
    }
    if policy.use in made:
        return made[policy.use](), []
    spec = PoolSpec(POOL, Resources.of(gpu=quota_gpus), **{"wait_s": UNLIMITED_S, **policy.pool})
    first: list[e.PoolEvent] = [e.PoolEnsured(spec)]
    if policy.use == "trimtab":
        first.append(e.PolicySet(PreemptionPolicy(**policy.preemption)))
    return PoolMachine(), first
