"""Schedulers to compare with: first come first served, and by priority without preemption.

They speak the language of the pool machine, so that the same driver carries both out in the same reality. They make a
placement group for every start and remove it at its end. In their order, whoever is first and finds no room either
holds up everybody behind it (strict), or is passed by whoever fits (`fill`). A task that was lost with its node comes
back to its place in the order. Who is never evicted: anybody.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import GRAIN
from trimtab.machines.pool import events as e
from trimtab.model.pool import BundlePlacement, PlacementStrategy, TaskSpec
from trimtab.replay.pool.racks import FreeGpuIndex

ENDS = Reason(ReasonCode.completed, "its work is done")
LOST = Reason(ReasonCode.node_lost, "its node was lost")
MAKE_S = START_S = 1e9  # nothing is late here
TELL_S, SAVE_S = 5.0, 60.0  # as the pool machine's policy has them by default


@dataclass
class BaselineJob:
    """A task as a baseline remembers it."""

    spec: TaskSpec
    sizes: tuple[int, ...]
    seq: int
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    group: str = ""
    state: str = "waiting"  # then making (its group), running, stopping, removing
    over: bool = False  # its work is done
    saved: bool = False


class BaselineScheduler:
    """What all baselines do alike: nodes, groups, starts and ends."""

    def __init__(self, node_gpus: int) -> None:
        self.racks = FreeGpuIndex(node_gpus)
        self.jobs: dict[str, BaselineJob] = {}  # not ended
        self.by_group: dict[str, str] = {}
        self.closed: set[str] = set()  # nodes that drain
        self.out: list[e.PoolInstruction] = []
        self.count = 0
        self.now = 0.0

    # ---- the door ----

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        """What is to be done about an event."""
        self.out, self.now = [], now
        if isinstance(event, e.TaskSubmitted):
            self.count += 1
            sizes = tuple(one.get("gpu") // GRAIN for one in event.spec.bundles)
            job = self.jobs[event.spec.id] = BaselineJob(event.spec, sizes, self.count)
            self.enqueue(job)
            self.look()
        elif isinstance(event, e.PlacementGroupReady):
            self._made(event.group)
        elif isinstance(event, e.TaskEnded):
            self._ends(self.jobs[event.task])
        elif isinstance(event, e.TaskStarted):
            self.started(self.jobs[event.task])
        elif isinstance(event, e.TaskStopped):
            job = self.jobs[event.task]
            job.saved = job.saved or event.saved
            self._remove(job)
        elif isinstance(event, e.PlacementGroupRemoved):
            self._gone(self.jobs[self.by_group[event.group]])
            self.look()
        elif isinstance(event, e.NodeJoined):
            self.closed.discard(event.node)
            self.racks.add(event.node, event.total.get("gpu") // GRAIN)
            self.look()
        elif isinstance(event, e.NodeDrained | e.NodeLost):
            self._closes(event.node, isinstance(event, e.NodeLost))
            self.look()
        elif isinstance(event, e.PoolTick):
            self.look()
        return self.out

    def next_deadline(self) -> float | None:
        """When a Tick is due."""
        return None

    def check(self) -> None:
        """What is free is what nobody has."""
        held: dict[str, int] = {}
        for job in self.jobs.values():
            for node, size in zip(job.nodes, job.sizes, strict=False):
                held[node] = held.get(node, 0) + size
        for node, free in self.racks.rooms():
            assert free >= 0, f"{node} is overfull"
            assert free + held.get(node, 0) + self.kept(node) == self.racks.total[node], f"{node}: what is free is not"

    # ---- what differs ----

    def enqueue(self, job: BaselineJob) -> None:
        """The job waits."""
        raise NotImplementedError

    def look(self) -> None:
        """Start whoever is to start."""
        raise NotImplementedError

    def started(self, job: BaselineJob) -> None:
        """Its work begins."""

    def ended(self, job: BaselineJob) -> None:
        """It is gone for good, or is about to leave."""

    def kept(self, node: str) -> int:
        """GPUs that are neither free nor anybody's yet."""
        return 0

    # ---- lives ----

    def begin(self, job: BaselineJob, nodes: tuple[str, ...]) -> None:
        """The job has its nodes, which are free."""
        for node, size in zip(nodes, job.sizes, strict=True):
            self.racks.take(node, size)
        self.count += 1
        job.nodes, job.group, job.state = nodes, f"g{self.count}", "making"
        job.attempt += 1
        self.by_group[job.group] = job.spec.id
        self.out.append(
            e.CreatePlacementGroup(
                job.group, job.spec.pool, job.spec.bundles, nodes, PlacementStrategy.pack, self.now + MAKE_S
            )
        )

    def _made(self, group: str) -> None:
        job = self.jobs[self.by_group[group]]
        if job.state != "making":
            return  # given up meanwhile
        places = tuple(BundlePlacement(job.group, at, node) for at, node in enumerate(job.nodes))
        job.state = "running"
        self.out.append(e.StartTask(job.spec.id, job.attempt, places, job.saved, self.now + START_S))

    def stop(self, job: BaselineJob, reason: Reason, save_s: float = 0.0) -> None:
        """Its processes are to go."""
        job.state = "stopping"
        grace_s = TELL_S if save_s else 0.0
        self.out.append(e.StopTask(job.spec.id, job.attempt, reason, grace_s, checkpoint_timeout_s=save_s))

    def _ends(self, job: BaselineJob) -> None:
        self.ended(job)
        self.stop(job, ENDS)
        job.over = True

    def _remove(self, job: BaselineJob) -> None:
        job.state = "removing"
        self.out.append(e.RemovePlacementGroup(job.group))

    def _gone(self, job: BaselineJob) -> None:
        self.leave(job)
        if job.over:
            del self.jobs[job.spec.id]
        else:
            self.enqueue(job)

    def leave(self, job: BaselineJob) -> None:
        """Its group is gone, and its nodes are free."""
        for node, size in zip(job.nodes, job.sizes, strict=False):
            self.racks.give(node, size)
        del self.by_group[job.group]
        job.nodes, job.group, job.state = (), "", "waiting"

    def _closes(self, node: str, lost: bool) -> None:
        self.racks.drop(node)
        self.closed.add(node)
        for job in [one for one in self.jobs.values() if node in one.nodes]:
            if lost:
                # A node of that name that comes back owes it nothing.
                job.nodes = tuple("" if one == node else one for one in job.nodes)
            if job.state == "running":
                self.ended(job)
                self.stop(job, LOST, 0.0 if lost else SAVE_S)
            elif job.state == "making":
                self._remove(job)


class OrderedScheduler(BaselineScheduler):
    """By a key: the time of submission, or priority first."""

    def __init__(self, node_gpus: int, *, by_priority: bool = False, fill: bool = False) -> None:
        super().__init__(node_gpus)
        self._by_priority, self._fill = by_priority, fill
        self._lines: dict[tuple[float, tuple[int, ...]], list[tuple[int, str]]] = {}

    def enqueue(self, job: BaselineJob) -> None:
        """It waits at its place."""
        level = -job.spec.priority if self._by_priority else 0.0
        heapq.heappush(self._lines.setdefault((level, job.sizes), []), (job.seq, job.spec.id))

    def look(self) -> None:
        """In order, as far as there is room."""
        heads = [(level, line[0], (level, sizes)) for (level, sizes), line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            level, (_, name), key = heapq.heappop(heads)
            job = self.jobs[name]
            nodes = self.racks.spot(job.sizes)
            if nodes is None:
                if not self._fill:
                    return
                continue  # nor would anybody else of its size and level find any
            line = self._lines[key]
            heapq.heappop(line)
            self.begin(job, nodes)
            if line:
                heapq.heappush(heads, (level, line[0], key))
            else:
                del self._lines[key]
