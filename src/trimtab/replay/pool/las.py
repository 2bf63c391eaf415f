"""Least attained service first, similar to Tiresias: jobs with the fewest GPU-seconds run first.

Two levels: jobs below `threshold_gpu_s` are in the first, others in the second; within a level the order is by
submission. A first-level job that does not fit preempts second-level jobs, most service first, on the nodes where the
fewest have to go. Priorities and lengths are unknown to it. Jobs that wait long are not promoted. GPUs freed by
preemption are reserved for the job they were freed for.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.replay.pool.baselines import CHECKPOINT_TIMEOUT_S, BaselineJob, BaselineScheduler

THRESHOLD_GPU_S = 3_600.0


@dataclass
class _PendingClaim:
    """GPUs that are being freed for a job by preemption."""

    job: BaselineJob
    nodes: tuple[str, ...]
    leaving: set[str]
    reserved: dict[str, int] = field(default_factory=dict)


class LeastAttained(BaselineScheduler):
    """Scheduler with two levels of attained service."""

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
        for node, free in self.free_gpus.free_by_node():
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
