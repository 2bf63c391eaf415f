"""Requests through a storm: real engines are killed, frozen, slowed, drained and replaced while 2,000 requests run.

Half of them come from this process, half over HTTP through the gateway; as streams, in segments and whole. Every
request is answered exactly once, and a greedy answer is the one that an undisturbed engine gives, also where it was
resumed half-way: up to the first place where the two best tokens are so near that rounding chooses.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_answers import NEAR_TIE, prompts, run
from engine_servers import LlamaServer, again, come_up, servers, start
from faults import Faults
from trimtab.core.errors import TrimtabError
from trimtab.machines.rollout import events as e
from trimtab.rollout import RolloutPool, RolloutRules, Sample, SamplingParams, WorkerState
from trimtab.runtime.engines.engine import PieceSupport
from trimtab.runtime.engines.llamacpp import LlamaCppEngine
from trimtab.runtime.gateway.server import Gateway
from trimtab.runtime.gateway.settings import GatewaySettings

SLOTS, TOKENS, ASKED = 6, 60, 2_000
RULES = RolloutRules(
    min_workers=1, max_workers=16, drain_s=0.6, abort_s=2.0, stall_s=6.0, suspect_s=0.6, lost_s=3.0, retries=40,
    back_off_s=0.2,
    probe_s=2.0, load_fresh_s=2.0, resume_every=20,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0)


@dataclass
class Storm:
    """Engines that are hurt at random, and what was done to them."""

    pool: RolloutPool
    folder: Path
    engines: list[LlamaServer]
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    names: dict[int, str] = field(default_factory=dict)
    hurt: set[int] = field(default_factory=set)  # ports of those to whom something is being done

    async def join(self, server: LlamaServer) -> None:
        self.names[server.port] = await self.pool.attach(server.url, limit=SLOTS)

    async def rage(self, over: asyncio.Event) -> None:
        deeds = [self.kill, self.freeze, self.slow, self.drain, self.replace]
        while not over.is_set():
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            deed = self.chance.choice([one for one in deeds if not self.done[one.__name__]] or deeds)
            left_alone = [one for one in self.engines if one.port not in self.hurt]
            server = self.chance.choice(left_alone)
            self.hurt.add(server.port)
            try:
                await deed(server)
            except TrimtabError:
                self.done["refused"] += 1  # too few would be left, or it is not there now
            else:
                self.done[deed.__name__] += 1
            finally:
                self.hurt.discard(server.port)

    async def kill(self, server: LlamaServer) -> None:
        """As by hand: no farewell; a supervisor starts it again, and whoever did vouches for its weights."""
        server.kill()
        await asyncio.sleep(self.chance.uniform(0.0, 0.5))
        back = await come_up(again(server))
        self.engines[self.engines.index(server)] = back  # where it is by now: others come and go meanwhile
        await self.back(self.names[server.port])

    async def freeze(self, server: LlamaServer) -> None:
        server.freeze()
        await asyncio.sleep(self.chance.choice((0.3, 1.5)))
        server.thaw()
        await self.back(self.names[server.port])

    async def slow(self, server: LlamaServer) -> None:
        async with server.slowed():
            await asyncio.sleep(0.6)

    async def drain(self, server: LlamaServer) -> None:
        name = self.names[server.port]
        self.pool.drain(name, deadline_s=self.chance.choice((2.0, 2.4)), why="the storm")
        await asyncio.sleep(self.chance.uniform(0.2, 1.0))
        self.pool.resume(name)

    async def replace(self, server: LlamaServer) -> None:
        """One more comes, and an old one goes for good."""
        fresh = start(self.folder, slots=SLOTS)
        await come_up(fresh)
        self.hurt.add(fresh.port)
        self.engines.append(fresh)
        await self.join(fresh)
        self.hurt.discard(fresh.port)
        await self.pool.remove(self.names[server.port], deadline_s=self.chance.choice((0.0, 0.5)))
        self.engines.remove(server)
        server.stop()

    async def back(self, name: str) -> None:
        """Until it serves again; the weights of a process that was lost are vouched for, as the storm knows them."""

        def settled() -> bool:
            return self.state(name) in (WorkerState.active, WorkerState.draining, WorkerState.stale, None)

        await self.pool.until(settled, 2.0)
        if self.state(name) is WorkerState.stale:
            self.pool.vouch(name)

    async def vouch_for_all(self, over: asyncio.Event) -> None:
        """The trainer's own round: whoever came back with the right weights is told so."""
        while not over.is_set():
            for view in self.pool.workers():
                if view.state is WorkerState.stale:
                    self.pool.vouch(view.worker)
                if view.state is WorkerState.inactive:
                    self.pool.resume(view.worker)
            await asyncio.sleep(0.2)

    def state(self, name: str) -> WorkerState | None:
        return next((one.state for one in self.pool.workers() if one.worker == name), None)


@dataclass
class Ledger:
    """Counts what the machine was told and said."""

    arrived: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)

    def __call__(self, what: Any, now: float) -> None:
        if isinstance(what, e.RequestArrived):
            self.arrived[what.spec.id] += 1
        elif isinstance(what, e.AnswerRequest):
            self.answered[what.request] += 1


def sure(sample: Sample) -> int:
    """How many of its first tokens won by more than a near tie."""
    assert sample.best is not None
    margins = (best[0][1] - best[1][1] for best in sample.best)
    return next((place for place, margin in enumerate(margins) if margin < NEAR_TIE), len(sample.best))


async def undisturbed(server: LlamaServer, asked: Sequence[tuple[int, ...]]) -> list[Sample]:
    async with RolloutPool() as pool:
        await pool.attach(server.url, limit=SLOTS)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=2)
        return [one.samples[0] for one in await pool.generate(asked, params)]


@dataclass(frozen=True)
class Got:
    """One answer, whichever way it came."""

    token_ids: tuple[int, ...]
    text: str
    end: str
    moves: int
    why: str = ""


async def over_http(url: str, asked: Sequence[tuple[int, ...]]) -> list[Got]:
    """Each asked once; what is not answered with 200 is an error of the test."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0.0}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:

        async def one(prompt: tuple[int, ...]) -> Got:
            body = {"input_ids": prompt, "sampling_params": sampling}
            async with session.post(f"{url}/generate", json=body) as answer:
                told = await answer.json()
                assert answer.status == 200, told
            meta = told["meta_info"]
            moves = int(answer.headers.get("x-trimtab-moves", 0))
            return Got(tuple(told["output_ids"]), told["text"], meta["finish_reason"]["type"], moves)

        return await asyncio.gather(*(one(prompt) for prompt in asked))


async def in_process(pool: RolloutPool, asked: Sequence[tuple[int, ...]]) -> list[Got]:
    """In turn: in segments, whole (a lost engine costs all of it), and streamed."""

    async def streamed(prompt: tuple[int, ...]) -> Sample:
        ids: list[int] = []
        async for chunk in pool.stream(prompt, GREEDY):
            ids = [] if chunk.restarted else [*ids, *chunk.token_ids]
            if chunk.sample is not None:
                assert tuple(ids) == chunk.sample.token_ids
                return chunk.sample
        raise AssertionError("a stream without an answer")

    segments, whole, streams = await asyncio.gather(
        pool.generate(asked[::3], GREEDY),
        pool.generate(asked[1::3], replace(GREEDY, resume=False)),
        asyncio.gather(*(streamed(prompt) for prompt in asked[2::3])),
    )
    rows = ([one.samples[0] for one in segments], [one.samples[0] for one in whole], streams)
    samples = [rows[at % 3][at // 3] for at in range(len(asked))]
    return [
        Got(one.token_ids, one.text, one.end.value, one.moves, "" if one.ok else str(one.reason)) for one in samples
    ]


async def storm_over(folder: Path, count: int, seed: int) -> tuple[Storm, Ledger, list[Sample], list[Got]]:
    chance = random.Random(seed)
    distinct = prompts(200, seed=seed, longest=30)
    asked = [chance.randrange(len(distinct)) for _ in range(count)]
    with servers(4, folder, slots=SLOTS) as engines:
        reference = await undisturbed(engines[0], distinct)
        ledger = Ledger()
        async with RolloutPool(RULES, look_s=0.15) as pool:
            pool.add_listener(ledger)
            storm = Storm(pool, folder, engines, chance)
            for server in engines:
                await storm.join(server)
            over = asyncio.Event()
            beside = [asyncio.create_task(deed(over)) for deed in (storm.rage, storm.rage, storm.vouch_for_all)]
            try:
                inner, outer = [distinct[one] for one in asked[::2]], [distinct[one] for one in asked[1::2]]
                async with Gateway(pool, GatewaySettings(token="of-the-storm-only")) as gateway:
                    halves = await asyncio.gather(in_process(pool, inner), over_http(gateway.url, outer))
            finally:
                over.set()
                await asyncio.gather(*beside)
    hurt = {"kill": "engine killed", "freeze": "engine frozen", "slow": "engine slowed", "replace": "engine replaced"}
    Faults(f"engines of a pool, seed {seed}").take({word: storm.done[deed] for deed, word in hurt.items()})
    return storm, ledger, [reference[one] for one in (*asked[::2], *asked[1::2])], [*halves[0], *halves[1]]


def check(ledger: Ledger, wanted: Sequence[Sample], got: Sequence[Got]) -> None:
    """Nothing failed, nothing was answered twice, and every answer is the undisturbed one as far as that is certain."""
    assert [one.why for one in got if one.end not in ("stop", "length")] == []
    assert set(ledger.arrived) == set(ledger.answered)
    assert set(ledger.answered.values()) == {1}
    for right, answer in zip(wanted, got, strict=True):
        certain = sure(right)
        assert answer.token_ids[:certain] == right.token_ids[:certain], answer
        if certain == len(right.token_ids):
            assert (answer.token_ids, answer.end, answer.text) == (right.token_ids, right.end.value, right.text)


@pytest.fixture(autouse=True)
def whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of tokens are for callers that stream."""
    monkeypatch.setattr(LlamaCppEngine, "pieces", PieceSupport(whole=True))


def test_every_request_is_answered_once_and_rightly_while_engines_are_killed_frozen_drained_and_replaced(
    tmp_path: Path,
) -> None:
    storm, ledger, wanted, got = run(storm_over(tmp_path, ASKED, seed=5), within_s=300)
    assert len(got) == ASKED
    check(ledger, wanted, got)
    whole = sum(sure(one) == len(one.token_ids) for one in wanted)
    assert whole > ASKED / 2  # so that most answers were compared to their end
    resumed = [one for one in got if one.moves]
    assert len(resumed) >= 10, storm.done
    assert all(storm.done[deed] for deed in ("kill", "freeze", "slow", "drain", "replace")), storm.done


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_storms_of_other_seeds(tmp_path: Path, seed: int) -> None:
    _, ledger, wanted, got = run(storm_over(tmp_path, 2 * ASKED, seed=100 + seed), within_s=900)
    check(ledger, wanted, got)
