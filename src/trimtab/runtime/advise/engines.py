"""Samples rollout engines at `/metrics`: running and waiting requests, cache use, tokens per second.

Read-only. An engine that stops answering is reported with cause and duration and probed again with the next sample; it
never ends the command. All are probed at once, with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from trimtab.core.errors import InputError, TrimtabError

ANSWER_S = 3.0

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
CACHE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
TOKENS = ("vllm:generation_tokens_total", "llamacpp:tokens_predicted_total", "sglang:generation_tokens_total")
SPEED = ("sglang:gen_throughput",)


@dataclass(frozen=True)
class EngineSample:
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
        """Probe all engines."""
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
