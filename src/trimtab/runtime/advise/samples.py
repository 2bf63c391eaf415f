"""Samples the run's Ray cluster (nodes, GPUs, their utilization) and its rollout engines, at `/metrics`.

Read-only. Ray is queried in a child process, because Ray's client ends its process when the cluster vanishes; so the
loss of the cluster is reported and does not end the command. Utilization comes from the metrics that every Ray node
exports. What is not known is left out. An engine that stops answering is reported with cause and duration and probed
again with the next sample; it never ends the command. All are probed at once, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.runtime.procs.sampler import ChildSampler, print_samples
from trimtab.runtime.rayapi import auth
from trimtab.runtime.rayapi.node_view import RayView

METRICS_S = 2.0
STALE_S = 60.0  # older samples are not shown
_UTILISATION = "ray_node_gpus_utilization"
ANSWER_S = 3.0

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
CACHE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
TOKENS = ("vllm:generation_tokens_total", "llamacpp:tokens_predicted_total", "sglang:generation_tokens_total")
SPEED = ("sglang:gen_throughput",)


class NodeUtilization(Frozen):
    """One node. `busy` is the recent utilization of its GPUs by index, if it exports that."""

    name: str
    gpus: float
    free: float
    draining: bool = False
    busy: tuple[tuple[int, float], ...] = ()


class ClusterWatch(ChildSampler[tuple[NodeUtilization, ...]]):
    """Samples the cluster in a child process; reading the latest sample never blocks."""

    def __init__(self, address: str, every_s: float, stale_s: float = STALE_S) -> None:
        self.address = address
        self._stale_s = stale_s
        super().__init__(
            "trimtab.runtime.advise.samples",
            address,
            str(every_s),
            parse=lambda rows: tuple(decode(NodeUtilization, row) for row in rows),
        )

    def seen(self) -> tuple[NodeUtilization, ...] | str:
        """The nodes, or why they are not known."""
        sample, age_s = self.latest()
        if not self.is_alive:
            return f"the Ray cluster at {self.address} is not watched any more: it is gone"
        if not isinstance(sample, str) and age_s > self._stale_s:
            return f"the Ray cluster at {self.address} has not answered for {self._stale_s:g} s"
        return sample


class EngineSample(Frozen):
    """One engine at one moment. None: not reported; `silent_s` is how long it has not answered."""

    url: str
    running: float | None = None
    waiting: float | None = None
    cache: float | None = None  # share of the KV cache in use
    tokens_per_s: float | None = None
    fault: str | None = None
    silent_s: float | None = None


class EngineMetricsReader:
    """The engines that were named."""

    def __init__(self, urls: Sequence[str]) -> None:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise InputError(
                    f"{url} is no address of an engine", where="command line: --engine", hint="write http://HOST:PORT"
                )
        self._urls = list(dict.fromkeys(url.rstrip("/").removesuffix("/metrics") for url in urls))
        self._tokens: dict[str, tuple[float, float]] = {}  # total, and when it was read
        self._answered: dict[str, float] = {}

    def sample(self, now: float) -> tuple[EngineSample, ...]:
        if not self._urls:
            return ()
        answers = asyncio.run(_probe_all(self._urls))
        return tuple(self._sample(url, metrics, now) for url, metrics in zip(self._urls, answers, strict=True))

    def _sample(self, url: str, metrics: dict[str, float] | str, now: float) -> EngineSample:
        if isinstance(metrics, str):
            since = self._answered.setdefault(url, now)
            return EngineSample(url, fault=metrics, silent_s=now - since)
        self._answered[url] = now
        speed, total = _first(metrics, SPEED), _first(metrics, TOKENS)
        before = self._tokens.get(url)
        if total is not None:
            self._tokens[url] = total, now
            if before is not None and now > before[1] and total >= before[0]:  # less: it was restarted
                speed = (total - before[0]) / (now - before[1])
        return EngineSample(url, _first(metrics, RUNNING), _first(metrics, WAITING), _first(metrics, CACHE), speed)


async def _probe_all(urls: Sequence[str]) -> list[dict[str, float] | str]:
    from trimtab.runtime.engines.engine import EngineDeadlines
    from trimtab.runtime.engines.http_engine import EngineHttpClient, gauges, open_session

    deadlines = EngineDeadlines(connect_s=ANSWER_S, call_s=ANSWER_S)
    async with open_session() as session:

        async def probe(url: str) -> dict[str, float] | str:
            try:
                found = await gauges(EngineHttpClient(url, url, session, deadlines, keep_alive=False))
            except TrimtabError as fault:
                return fault.what
            return found if _first(found, RUNNING) is not None else "its /metrics are not those of a known engine"

        return list(await asyncio.gather(*(probe(url) for url in urls)))


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


# ---- the child process -----------------------------------------------------------------------------------------------


def busy_in(page: str) -> list[tuple[int, float]]:
    """GPU utilization by index, from a node's metrics page."""
    found: dict[int, float] = {}
    for line in page.splitlines():
        if line.startswith(_UTILISATION):
            labels, _, value = line.rpartition(" ")
            _, _, index = labels.partition('GpuIndex="')
            with contextlib.suppress(ValueError):
                found[int(index.partition('"')[0])] = min(1.0, float(value) / 100)
    return sorted(found.items())


def _metrics_page(url: str | None) -> str:
    """A node's metrics; empty if it exports none or does not answer."""
    if url is None:
        return ""
    try:
        with urllib.request.urlopen(url, timeout=METRICS_S) as answer:
            return str(answer.read(8 << 20).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return ""


def _sample(view: RayView) -> list[NodeUtilization]:
    found = []
    for node in view.nodes():
        busy = tuple(busy_in(_metrics_page(node.metrics_url))) if node.gpus else ()
        found.append(NodeUtilization(node.name, node.gpus, node.free.get("GPU", 0.0), node.draining, busy))
    return found


def _connect(address: str) -> RayView:
    auth.match_cluster(address)
    return RayView(address)


if __name__ == "__main__":
    print_samples(lambda: _connect(sys.argv[1]), lambda view: encode(_sample(view)), float(sys.argv[2]))
