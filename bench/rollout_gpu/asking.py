"""The same orders asked in two ways: directly, a whole answer for each POST, and through a pool."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.rollout_gpu.servers import Fleet
from trimtab.machines.rollout import events as e
from trimtab.rollout import End, RolloutPool, RolloutRules, SamplingParams, WorkerSpec
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.engines.engine import EngineDeadlines

LONGEST_S = 3_600.0
FIRST_ID, IDS = 1, 256  # ids of prompts: every vocabulary of this bench has them


@dataclass(frozen=True)
class Order:
    """One prompt, and what is asked for it."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    logprobs: int | None = None
    stop_ids: tuple[int, ...] = ()
    exact: bool = True  # max_tokens whatever comes: the end token is ignored

    def body(self, model: str) -> dict[str, Any]:
        """As the pool's adapter asks vLLM, but for a whole answer."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "n": self.n,
            "return_token_ids": True,
        }
        if self.exact:
            body["ignore_eos"] = True
        if self.stop_ids:
            body["stop_token_ids"] = list(self.stop_ids)
        if self.logprobs is not None:
            body |= {"logprobs": self.logprobs, "return_tokens_as_token_ids": True}
        return body

    def params(self) -> SamplingParams:
        """Fields of `extra` are unknown to the pool, so it is told that this one does no harm to a continuation."""
        extra = {"ignore_eos": True} if self.exact else {}
        return SamplingParams(
            self.max_tokens, temperature=self.temperature, n=self.n, stop_ids=self.stop_ids, logprobs=self.logprobs,
            extra=extra, resume=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One sample, whichever way it came."""

    token_ids: Sequence[int]
    stopped: bool
    logprobs: Sequence[float | None] | None = None
    best: Sequence[Sequence[tuple[int, float]]] | None = None  # the two best at each place, where asked for
    moves: int = 0
    restarts: int = 0
    versions: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()


def tokens_of(answers: Iterable[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


@dataclass(frozen=True)
class Cost:
    """What asking took: tokens, seconds, CPU of this process with all its threads."""

    tokens: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_per_half_million(self) -> float:
        return self.cpu_s * 5e5 / max(self.tokens, 1)

    def row(self) -> dict[str, float]:
        return {
            "tokens": self.tokens, "seconds": round(self.seconds, 3), "tokens_per_s": round(self.rate, 1),
            "cpu_s": round(self.cpu_s, 3), "cpu_s_per_500k": round(self.cpu_per_half_million, 3),
        }  # fmt: skip


class Stopwatch:
    """Wall clock and CPU since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def cost(self, tokens: int) -> Cost:
        return Cost(tokens, time.perf_counter() - self._wall, time.process_time() - self._cpu)


class Direct:
    """Asks engines as a plain client does: one POST for each order, evenly over them."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self.session, self.model = session, model

    async def ask(self, url: str, order: Order) -> list[Answer]:
        reply = await self.post(url, order.body(self.model))
        return [_answer(choice, order) for choice in reply["choices"]]

    async def all(self, urls: Sequence[str], orders: Sequence[Order]) -> list[Answer]:
        """In order, with all samples of a prompt after each other."""
        turns = itertools.cycle(urls)
        rows = await asyncio.gather(*(self.ask(next(turns), order) for order in orders))
        return [answer for row in rows for answer in row]

    async def post(self, url: str, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        async with self.session.post(url + path, json=body) as reply:
            text = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"POST {path} of {url}: {reply.status} {text[:500]!r}")
            return json.loads(text) if text else None

    async def flush(self, urls: Sequence[str]) -> None:
        """Empties the prefix caches."""
        await asyncio.gather(*(self.post(url, {}, "/reset_prefix_cache") for url in urls))

    async def counted(self, url: str, *names: str) -> list[float]:
        """Sums of these metrics, over all their labels."""
        async with self.session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(10)) as reply:
            sums: Counter[str] = Counter()
            for line in (await reply.text()).splitlines():
                name, _, value = line.rpartition(" ")
                if (plain := name.partition("{")[0]) in names:
                    sums[plain] += float(value)  # type: ignore[assignment]
        return [float(sums[name]) for name in names]

    async def generated(self, urls: Sequence[str]) -> list[float]:
        """Tokens that each engine has made since it was started."""
        rows = await asyncio.gather(*(self.counted(url, "vllm:generation_tokens_total") for url in urls))
        return [row[0] for row in rows]


def _answer(choice: dict[str, Any], order: Order) -> Answer:
    logprobs = best = None
    if order.logprobs is not None:
        logprobs = choice["logprobs"]["token_logprobs"]
        if order.logprobs:
            best = [
                sorted(
                    ((int(name.rpartition(":")[2]), value) for name, value in place.items()), key=lambda two: -two[1]
                )
                for place in choice["logprobs"]["top_logprobs"]
            ]
    return Answer(choice["token_ids"], choice["finish_reason"] == "stop", logprobs, best)


async def through(pool: RolloutPool, orders: Sequence[Order]) -> list[Answer]:
    """Through the pool: one call for all prompts that are asked alike."""
    alike: dict[Order, list[int]] = defaultdict(list)
    for at, order in enumerate(orders):
        alike[dataclasses.replace(order, prompt=())].append(at)
    calls = [pool.generate([orders[at].prompt for at in places], how.params()) for how, places in alike.items()]
    rows: list[list[Answer]] = [[] for _ in orders]
    for places, completions in zip(alike.values(), await asyncio.gather(*calls), strict=True):
        for at, completion in zip(places, completions, strict=True):
            for sample in completion.samples:
                if not sample.ok:
                    raise RuntimeError(f"{sample.request} ended as {sample.end.value}: {sample.reason.sentence}")
                rows[at].append(
                    Answer(
                        sample.token_ids,
                        sample.end is End.stop,
                        sample.logprobs,
                        sample.best,
                        sample.moves,
                        sample.restarts,
                        tuple(span.version for span in sample.spans),
                        sample.workers,
                    )
                )
    return [answer for row in rows for answer in row]


@dataclass
class Books:
    """A listener of a pool: what arrived, and what was answered how often."""

    arrived: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    resumed: dict[str, int] = field(default_factory=dict)  # tokens that were kept, by requests that were sent again

    def __call__(self, what: Any, now: float) -> None:
        kind = type(what)
        if kind is e.RequestArrived:
            self.arrived[what.spec.id] += 1
        elif kind is e.AnswerRequest:
            self.answered[what.request] += 1
        elif kind is e.SendRequest and what.attempt > 1:
            self.resumed[what.request] = what.resumed

    @property
    def each_once(self) -> bool:
        return set(self.arrived) == set(self.answered) and set(self.answered.values()) <= {1}


@dataclass
class Bench:
    """What every part needs: servers, settings, and where results go."""

    fleet: Fleet
    direct: Direct
    models: tuple[str, ...]  # folders of checkpoints; the servers were started with the first
    limit: int  # requests that the pool gives to one engine at a time
    answers: int
    tokens: int
    rounds: int
    tail: tuple[int, int, int, int]  # prompts, samples of each, mean length, longest
    sampled: int  # answers whose ends and lengths are compared
    segment: int  # tokens: `resume_every` of the part `segments`
    resume_every: str | None  # tokens, inf, or seconds as `2 s`; None: the pool's default
    curve: tuple[str, ...]
    asked: tuple[int, ...]  # engines of the part `speed`
    affinity: float | None  # `affinity_requests`; None: the pool's default
    gpu: int
    prompt_tokens: int = 64
    results: dict[str, Any] = field(default_factory=dict)
    _seeds: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def urls(self) -> list[str]:
        return self.fleet.urls

    def prompts(self, count: int, seed: int | None = None) -> list[tuple[int, ...]]:
        """Random prompts, other ones at every call unless a seed is given: nothing is found in a prefix cache."""
        chance = random.Random(next(self._seeds) if seed is None else f"fixed {seed}")
        return [tuple(chance.randrange(FIRST_ID, IDS) for _ in range(self.prompt_tokens)) for _ in range(count)]

    def rules(self, resume_every: str | None = None, **others: Any) -> RolloutRules:
        """`resume_every` None: as this bench was told, or the pool's default."""
        every = self.resume_every if resume_every is None else resume_every
        if every is not None:
            others["resume_every"] = every
        if self.affinity is not None:
            others["affinity_requests"] = self.affinity
        return RolloutRules(version=self.fleet.version, **others)

    @asynccontextmanager
    async def pool(
        self,
        urls: Sequence[str],
        *,
        resume_every: str | None = None,
        gpus: bool = False,
        keeps_weights: bool = True,
        **rules: Any,
    ) -> AsyncIterator[RolloutPool]:
        """A pool on these servers.

        `gpus`: it reads the driver when an engine sleeps. `keeps_weights` False: it sleeps at level 2.
        """
        version = self.fleet.version
        async with RolloutPool(
            self.rules(resume_every, **rules),
            deadlines=EngineDeadlines(),
            gpus_of=(lambda worker: (self.gpu,)) if gpus else None,
        ) as pool:
            for url in urls:
                if keeps_weights:
                    await pool.attach(url, limit=self.limit, version=version)
                else:
                    engine, _ = await attach(url, url, self.direct.session)
                    spec = WorkerSpec(url, limit=self.limit, sleep_keeps_weights=False)
                    await pool.add_engine(engine, spec, version=version, url=url)
            yield pool


def tail_lengths(prompts: int, mean: int, longest: int, seed: int = 7) -> list[int]:
    """Lognormal lengths, one for each prompt, cut at `longest` and scaled until their mean is as asked."""
    chance = random.Random(seed)
    raw = [math.exp(chance.gauss(0.0, 1.0)) for _ in range(prompts)]
    scale = mean / (sum(raw) / prompts)
    for _ in range(20):
        lengths = [max(1, min(longest, round(length * scale))) for length in raw]
        scale *= mean / (sum(lengths) / prompts)
    return lengths


def session() -> aiohttp.ClientSession:
    """For direct calls: as many connections as there are requests, and none is kept as long as vLLM keeps it (5 s)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        timeout=aiohttp.ClientTimeout(total=LONGEST_S, connect=30),
    )
