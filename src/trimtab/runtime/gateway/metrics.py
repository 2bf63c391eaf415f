"""Prometheus metrics of a gateway and its pool, reset with every process.

The pool's figures are read on collection; the gateway counts as requests pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trimtab.model.rollout import WorkerState
from trimtab.runtime.rollout.sampling import Sample

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
PREFIX = "trimtab_rollout_"


class GatewayMetrics:
    """Counters and their exposition."""

    def __init__(self, pool: RolloutPool) -> None:
        self._pool = pool
        self._registry = prometheus_client.CollectorRegistry()
        self._answers = prometheus_client.Counter(
            f"{PREFIX}http_answers", "Generation requests by endpoint and status.", ("door", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = prometheus_client.Histogram(
            f"{PREFIX}http_answer_seconds", "From the head of a request to the last byte of its response.", ("door",),
            buckets=BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._tokens = prometheus_client.Counter(f"{PREFIX}tokens", "Tokens sent to clients.", registry=self._registry)
        self._moves = prometheus_client.Counter(
            f"{PREFIX}moves", "Times that an answer continued on another worker.", registry=self._registry
        )
        self._restarts = prometheus_client.Counter(
            f"{PREFIX}restarts", "Times that an answer was restarted.", registry=self._registry
        )
        self._registry.register(_PoolCollector(pool))
        self._children: dict[tuple[str, int], prometheus_client.Counter] = {}
        self._latencies: dict[str, prometheus_client.Histogram] = {}

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        """An answered request."""
        child = self._children.get((endpoint, status))
        if child is None:
            child = self._children[endpoint, status] = self._answers.labels(endpoint, str(status))
            self._latencies.setdefault(endpoint, self._seconds.labels(endpoint))
        child.inc()
        self._latencies[endpoint].observe(seconds)

    def made(self, samples: Sequence[Sample]) -> None:
        self._tokens.inc(sum(len(sample.token_ids) + sample.missing for sample in samples))
        for sample in samples:
            if sample.moves:
                self._moves.inc(sample.moves)
            if sample.restarts:
                self._restarts.inc(sample.restarts)

    def text(self) -> bytes:
        return bytes(prometheus_client.generate_latest(self._registry))


class _PoolCollector:
    """Reads the pool on collection."""

    def __init__(self, pool: RolloutPool) -> None:
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        """Empty: the pool may not run yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        views = self._pool.workers()
        states = Counter(view.state for view in views)
        family = GaugeMetricFamily(f"{PREFIX}workers", "Workers by state.", labels=("state",))
        for state in WorkerState:
            family.add_metric((state.value,), states[state])
        yield family
        running = GaugeMetricFamily(f"{PREFIX}worker_requests", "Requests on a worker.", labels=("worker",))
        tokens = GaugeMetricFamily(
            f"{PREFIX}worker_outstanding_tokens",
            "Tokens that a worker is still expected to generate.",
            labels=("worker",),
        )
        served = CounterMetricFamily(f"{PREFIX}worker_served", "Requests finished by a worker.", labels=("worker",))
        version = GaugeMetricFamily(
            f"{PREFIX}worker_version", "Weight version of a worker, if known.", labels=("worker",)
        )
        for view in views:
            running.add_metric((view.worker,), view.running)
            tokens.add_metric((view.worker,), view.outstanding_tokens)
            served.add_metric((view.worker,), view.served)
            if view.version is not None:
                version.add_metric((view.worker,), view.version)
        yield from (running, tokens, served, version)
        yield GaugeMetricFamily(f"{PREFIX}version", "Version of the trainer's weights.", value=self._pool.version)
        counted = CounterMetricFamily(f"{PREFIX}requests", "Outcomes of requests in the pool.", labels=("what",))
        for name, count in sorted(self._pool.counters.items()):
            counted.add_metric((name,), count)
        yield counted
        for name, value in sorted(self._pool.metrics().items()):
            yield GaugeMetricFamily(f"{PREFIX}{_legal(name)}", "A figure of the pool; see the docs.", value=value)


def _legal(name: str) -> str:
    return "".join(sign if sign.isalnum() else "_" for sign in name).lower()
