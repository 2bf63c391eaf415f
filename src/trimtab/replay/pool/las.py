"""Least attained service first, in the manner of Tiresias: who has had the fewest GPU-seconds runs.

Two levels: whoever has had less than `threshold_gpu_s` is in the first, others in the second; within a level the order
is that of submission. One of the first level that finds no room has jobs of the second leave, those with the most
service first, where the fewest have to. It knows neither priorities nor lengths. There is no promotion of those who
wait long. Room that others are leaving for a job is kept for it, so that nobody else takes it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.replay.pool.baselines import SAVE_S, BaselineJob, BaselineScheduler

THRESHOLD_GPU_S = 3_600.0


@dataclass
class _PendingClaim:
    """Room that is being made."""

    job: BaselineJob
    nodes: tuple[str, ...]
    leaving: set[str]
    kept: dict[str, int] = field(default_factory=dict)


class LeastAttained(BaselineScheduler):
    """Two levels of attained service."""

    def __init__(self, node_gpus: int, threshold_gpu_s: float = THRESHOLD_GPU_S) -> None:
        super().__init__(node_gpus)
        self._threshold = threshold_gpu_s
        self._service: dict[str, float] = {}  # GPU-seconds of earlier attempts
        self._since: dict[str, float] = {}  # when its work began, by job at work
        self._second: dict[str, dict[str, int]] = {}  # by node: running jobs of the second level, and their GPUs there
        self._demotions: list[tuple[float, str, int]] = []
        self._lines: dict[tuple[int, tuple[int, ...]], list[tuple[int, str]]] = {}
        self._claims: dict[str, _PendingClaim] = {}  # by job that leaves
        self._kept: dict[str, int] = {}

    # ---- what a baseline is asked ----

    def next_deadline(self) -> float | None:
        """When the next job comes to the second level."""
        while self._demotions:
            at, name, attempt = self._demotions[0]
            job = self.jobs.get(name)
            if job is not None and job.state == "running" and job.attempt == attempt:
                return at
            heapq.heappop(self._demotions)
        return None

    def enqueue(self, job: BaselineJob) -> None:
        """It waits in its level."""
        level = int(self._service.get(job.spec.id, 0.0) >= self._threshold)
        heapq.heappush(self._lines.setdefault((level, job.sizes), []), (job.seq, job.spec.id))

    def started(self, job: BaselineJob) -> None:
        """Its service counts from now on."""
        if job.state != "running":
            return
        name = job.spec.id
        self._since[name] = self.now
        left = self._threshold - self._service.get(name, 0.0)
        if left > 0:
            heapq.heappush(self._demotions, (self.now + left / sum(job.sizes), name, job.attempt))
        else:
            self._lists(job, True)

    def ended(self, job: BaselineJob) -> None:
        """Its service so far is remembered."""
        name = job.spec.id
        since = self._since.pop(name, None)
        if since is not None:
            self._service[name] = self._service.get(name, 0.0) + (self.now - since) * sum(job.sizes)
        self._lists(job, False)

    def kept(self, node: str) -> int:
        """For those whom others leave for."""
        return self._kept.get(node, 0)

    def look(self) -> None:
        """Demote whoever is due, start whoever fits, have others leave for the first level."""
        while (due := self.next_deadline()) is not None and due <= self.now:
            _, name, _ = heapq.heappop(self._demotions)
            self._lists(self.jobs[name], True)
        heads = [(level, line[0], (level, sizes)) for (level, sizes), line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            level, (_, name), key = heapq.heappop(heads)
            job = self.jobs[name]
            nodes = self.racks.spot(job.sizes)
            if nodes is not None:
                self.begin(job, nodes)
            elif level > 0 or not self._make_room(job):
                continue
            line = self._lines[key]
            heapq.heappop(line)
            if line:
                heapq.heappush(heads, (level, line[0], key))
            else:
                del self._lines[key]

    # ---- preemption ----

    def _lists(self, job: BaselineJob, second: bool) -> None:
        for node, size in zip(job.nodes, job.sizes, strict=False):
            here = self._second.setdefault(node, {})
            if second:
                here[job.spec.id] = here.get(job.spec.id, 0) + size
            else:
                here.pop(job.spec.id, None)

    def _had(self, name: str) -> float:
        return self._service.get(name, 0.0) + (self.now - self._since[name]) * sum(self.jobs[name].sizes)

    def _make_room(self, job: BaselineJob) -> bool:
        """Choose nodes where the fewest leave; False: there is no way."""
        wanted = list(job.sizes)
        ways = []
        for node, free in self.racks.rooms():
            here = self._second.get(node, {})
            if free + sum(here.values()) >= wanted[0]:
                leaving, room = [], free
                for name in sorted(here, key=lambda one: -self._had(one)):
                    if room >= wanted[0]:
                        break
                    leaving.append(name)
                    room += here[name]
                ways.append((len(leaving), node, leaving))
        if len(ways) < len(wanted):
            return False
        ways.sort(key=lambda one: one[:2])
        chosen = ways[: len(wanted)]  # the rest of a gang is not larger than its first
        nodes = tuple(node for _, node, _ in chosen)
        together = dict.fromkeys(name for _, _, names in chosen for name in names)
        self._claim(job, nodes, list(together))
        return True

    def _claim(self, job: BaselineJob, nodes: tuple[str, ...], leaving: list[str]) -> None:
        claim = _PendingClaim(job, nodes, set(leaving))
        for node, size in zip(nodes, job.sizes, strict=True):
            self._keep(claim, node, min(size, self.racks.free[node]))
        reason = Reason(ReasonCode.priority, f"{job.spec.id} has had less service")
        for name in leaving:
            self._claims[name] = claim
            victim = self.jobs[name]
            self.ended(victim)
            self.stop(victim, reason, SAVE_S)

    def _keep(self, claim: _PendingClaim, node: str, gpus: int) -> None:
        self.racks.take(node, gpus)
        claim.kept[node] = claim.kept.get(node, 0) + gpus
        self._kept[node] = self._kept.get(node, 0) + gpus

    def _unkeep(self, claim: _PendingClaim) -> None:
        for node, gpus in claim.kept.items():
            self._kept[node] -= gpus
            self.racks.give(node, gpus)
        claim.kept = {}

    def leave(self, job: BaselineJob) -> None:
        """Whoever it left for has the room, as soon as all are gone."""
        super().leave(job)
        claim = self._claims.pop(job.spec.id, None)
        if claim is None:
            return
        claim.leaving.discard(job.spec.id)
        if not all(node in self.racks.free for node in claim.nodes):
            self._give_up(claim)
            return
        for node, size in zip(claim.nodes, claim.job.sizes, strict=True):
            self._keep(claim, node, min(size - claim.kept.get(node, 0), self.racks.free[node]))
        if not claim.leaving:
            self._unkeep(claim)
            self.begin(claim.job, claim.nodes)

    def _give_up(self, claim: _PendingClaim) -> None:
        """A node of it is gone: the job waits again."""
        self._unkeep(claim)
        for name in [name for name, one in self._claims.items() if one is claim]:
            del self._claims[name]
        self.enqueue(claim.job)

    def _closes(self, node: str, lost: bool) -> None:
        self._kept.pop(node, None)
        for claim in {id(one): one for one in self._claims.values() if node in one.nodes}.values():
            claim.kept.pop(node, None)
            self._give_up(claim)
        self._second.pop(node, None)
        super()._closes(node, lost)
