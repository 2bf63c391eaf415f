"""The rollout pool on real vLLM and SGLang servers: requests while engines drain, sleep, wake, are refitted and die.

Every request is answered once. Greedy answers are those of an undisturbed engine, also where they were carried on
elsewhere: up to the first place where the two best tokens are so near that rounding chooses.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from engine_processes import MODELS, RELEASES, START_S, Process, come_up, engine

from engine_answers import NEAR_TIE, prompts, run
from trimtab.core.errors import InputError
from trimtab.machines.rollout import events as e
from trimtab.rollout import Completion, RolloutPool, RolloutRules, Sample, SamplingParams, WorkerState
from trimtab.runtime.engines.engine import EngineDeadlines

pytestmark = pytest.mark.engines
S = WorkerState
TOKENS, LIMIT, BEGUN, PROMPTS = 500, 8, 5, 12
PIECE = 50  # tokens that come at once
ASKED = prompts(PROMPTS, seed=3, longest=40) * 2
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0)
MEASURED = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=2)
DEADLINES = EngineDeadlines(call_s=10.0, silence_s=20.0, abort_s=5.0)


@dataclass
class Fleet:
    """Servers of one release. What a test has ended is replaced before the next one."""

    release: str
    folder: Path
    stack: ExitStack
    servers: list[Process] = field(default_factory=list)
    version: int = 0  # of the weights that all of them have: those of v1
    right: list[Sample] = field(default_factory=list)  # undisturbed answers of v1

    def up(self, count: int) -> list[Process]:
        self.servers = [one for one in self.servers if one.alive]
        fresh = [self.stack.enter_context(engine(self.release, self.folder)) for _ in range(count - len(self.servers))]
        run(_all(come_up(one) for one in fresh), within_s=START_S)
        self.servers += fresh
        if not self.right:
            self.right = run(self.undisturbed(ASKED[:PROMPTS]), within_s=START_S)
        return self.servers[:count]

    def end(self) -> None:
        for one in self.servers:
            one.signal(signal.SIGKILL)
            assert one.gone()
        self.version = 0

    async def undisturbed(self, asked: Sequence[Sequence[int]], version: int | None = None) -> list[Sample]:
        """From one engine that nobody touches."""
        version = self.version if version is None else version
        async with RolloutPool(RolloutRules(version=version), deadlines=DEADLINES) as pool:
            await pool.attach(self.servers[0].url, limit=LIMIT, version=version)
            return [one.samples[0] for one in await pool.generate(asked, MEASURED)]

    async def whole(self, asked: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        """From one engine, each answer in one request."""
        async with RolloutPool(RolloutRules(version=self.version, resume_every=math.inf), deadlines=DEADLINES) as pool:
            await pool.attach(self.servers[0].url, limit=LIMIT, version=self.version)
            return await pool.generate(asked, params)


@dataclass
class Scene:
    """A pool on these servers, and its books."""

    pool: RolloutPool
    servers: list[Process]
    names: list[str] = field(default_factory=list)
    arrived: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    begun: dict[str, str] = field(default_factory=dict)  # requests under way with some tokens, and their workers
    _sent: dict[tuple[str, int], str] = field(default_factory=dict)

    def __call__(self, what: Any, now: float) -> None:
        if isinstance(what, e.RequestArrived):
            self.arrived[what.spec.id] += 1
        elif isinstance(what, e.AnswerRequest):
            self.answered[what.request] += 1
            self.begun.pop(what.request, None)
        elif isinstance(what, e.SendRequest):
            self.begun.pop(what.request, None)
            self._sent[what.request, what.attempt] = what.worker
        elif isinstance(what, e.TokensStreamed) and what.tokens >= BEGUN:
            self.begun[what.request] = self._sent[what.request, what.attempt]

    def state(self, name: str) -> WorkerState | None:
        return next((one.state for one in self.pool.workers() if one.worker == name), None)

    def served(self, name: str) -> int:
        return next(one.served for one in self.pool.workers() if one.worker == name)

    async def becomes(self, name: str, *states: WorkerState) -> None:
        reached = await self.pool.until(lambda: self.state(name) in states, 300.0)
        assert reached, f"{name} is {self.state(name)}: {self.pool.story(name)[-3:]}"

    @asynccontextmanager
    async def asked(self, asked: Sequence[Sequence[int]] = ASKED, **how: Any) -> AsyncIterator[asyncio.Task[Any]]:
        """Requests of which every engine has begun some; they are answered within the block.

        More are asked whenever an engine has nothing left to do: another one may be slow to begin.
        """
        works: list[asyncio.Task[list[Completion]]] = []

        def begun() -> bool:
            return {*self.begun.values()} >= {*self.names}

        def idle() -> bool:
            all_sent = len(self.arrived) >= len(works) * len(asked)
            return all_sent and not all(one.running for one in self.pool.workers())

        async def answers() -> list[Completion]:
            return [completion for work in works for completion in await work]

        while not begun():
            works.append(asyncio.create_task(self.pool.generate(asked, GREEDY, **how)))
            assert await self.pool.until(lambda: begun() or idle(), 300.0)
        task = asyncio.create_task(answers())
        yield task
        await task

    def settled(self, samples: Sequence[Sample]) -> None:
        """Everything that was asked is answered, and once."""
        assert [(one.reason, one.workers) for one in samples if not one.ok] == []
        assert set(self.arrived) == set(self.answered)
        assert set(self.answered.values()) == {1}


@pytest.fixture(scope="module", params=RELEASES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(request.param, tmp_path_factory.mktemp("fleet"), stack)


def play(fleet: Fleet, count: int, act: Callable[[Scene], Awaitable[None]], **rules: Any) -> None:
    """With a pool on so many servers."""
    servers = fleet.up(count)

    async def whole() -> None:
        judged = RolloutRules(**{"min_workers": 1, "version": fleet.version, "resume_every": PIECE, **rules})
        async with RolloutPool(judged, deadlines=DEADLINES) as pool:
            scene = Scene(pool, servers)
            pool.add_listener(scene)
            for server in servers:
                scene.names.append(await pool.attach(server.url, limit=LIMIT, version=fleet.version))
            await act(scene)

    try:
        run(whole(), within_s=600)
    except BaseException:
        fleet.end()  # nobody knows what is in them now
        raise


async def _all(works: Iterator[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*works))


def only(completions: Sequence[Any]) -> list[Sample]:
    return [one.samples[0] for one in completions]


def sure(sample: Sample) -> int:
    """How many of its first tokens won by more than a near tie."""
    assert sample.best is not None
    margins = (best[0][1] - best[1][1] for best in sample.best)
    return next((place for place, margin in enumerate(margins) if margin < NEAR_TIE), len(sample.best))


def alike(sample: Sample, right: Sample) -> None:
    """Up to the first near tie, and to the end where there is none."""
    certain = sure(right)
    assert sample.token_ids[:certain] == right.token_ids[:certain], (sample, certain)
    if certain == len(right.token_ids):
        assert (sample.token_ids, sample.end) == (right.token_ids, right.end)


def same(samples: Sequence[Sample], right: Sequence[Sample]) -> None:
    """Each is like the undisturbed answer to its prompt, and enough of them were sure ones."""
    for at, sample in enumerate(samples):
        alike(sample, right[at % len(right)])
    assert sum(sure(one) == len(one.token_ids) for one in right) >= len(right) / 4, "too few were compared to the end"


@pytest.mark.parametrize("form", ["segments", "interval", "tokens"])
def test_an_answer_in_pieces_is_the_whole_answer(fleet: Fleet, form: str) -> None:
    """Also its log-probabilities: the cache of a segment is that of the whole answer, at float32."""
    every = {"segments": 37, "interval": 37, "tokens": 1}[form]
    takes_interval = fleet.release in ("vllm", "sglang")
    if form == "interval" and not takes_interval:
        pytest.skip(f"{fleet.release} takes no interval with a request")

    async def act(scene: Scene) -> None:
        adapter: Any = scene.pool.engine(scene.names[0])
        assert adapter.pieces.interval == takes_interval, adapter.pieces
        adapter.pieces = replace(adapter.pieces, interval=form == "interval")
        params = replace(MEASURED, n=2, min_tokens=40)
        got = [sample for row in await scene.pool.generate(ASKED[:PROMPTS], params) for sample in row.samples]
        right = [sample for row in await fleet.whole(ASKED[:PROMPTS], params) for sample in row.samples]
        scene.settled(got)
        for sample, whole in zip(got, right, strict=True):
            alike(sample, whole)
            certain = min(sure(whole), len(sample.token_ids))
            assert sample.logprobs is not None
            assert whole.logprobs is not None
            for mine, its in zip(sample.logprobs[:certain], whole.logprobs[:certain], strict=True):
                assert mine == pytest.approx(its, abs=1e-3)

    play(fleet, 1, act, resume_every=every)


def test_a_drained_engine_finishes_what_it_has_sleeps_and_serves_again_after_it_was_woken(fleet: Fleet) -> None:
    async def act(scene: Scene) -> None:
        one = scene.names[0]
        async with scene.asked() as task:
            scene.pool.drain(one, deadline_s=300.0)
            await scene.becomes(one, S.inactive)
            served = scene.served(one)
            adapter = scene.pool.engine(one)
            assert adapter is not None
            assert (await adapter.ready()).asleep
            got = only(await task)
            assert scene.served(one) == served, "nothing was sent to it any more"
        assert [scene.pool.story(sample.request) for sample in got if sample.moves or sample.restarts] == []
        scene.settled(got)
        same(got, fleet.right)
        scene.pool.resume(one)
        await scene.becomes(one, S.active)
        again = only(await scene.pool.generate(ASKED, GREEDY))
        assert scene.served(one) > served
        scene.settled(again)
        same(again, fleet.right)

    play(fleet, 2, act, drain_s=300.0)


def test_what_a_drain_cuts_off_goes_on_elsewhere_with_the_tokens_that_it_had(fleet: Fleet) -> None:
    async def act(scene: Scene) -> None:
        one = scene.names[0]
        async with scene.asked() as task:
            scene.pool.drain(one, deadline_s=0.0)
            await scene.becomes(one, S.inactive)
            scene.pool.resume(one)
            got = only(await task)
        await scene.becomes(one, S.active)
        moved = [sample for sample in got if sample.moves]
        assert moved
        assert all(len(sample.workers) > 1 for sample in moved)
        scene.settled(got)
        same(got, fleet.right)

    play(fleet, 2, act)


def test_new_weights_are_in_the_answers_of_every_engine_and_no_answer_mixes_them_where_it_may_not(fleet: Fleet) -> None:
    async def act(scene: Scene) -> None:
        old, new, back = fleet.version, fleet.version + 1, fleet.version + 2
        async with scene.asked(spans=False) as task:
            async with scene.pool.refit(new) as refit:
                await refit.load(str(MODELS / "v2"))
            got = only(await task)
        fleet.version = new
        assert refit.outcome is not None
        assert set(refit.outcome.current) == set(scene.names)
        scene.settled(got)
        changed = only(await scene.pool.generate(ASKED[:PROMPTS], MEASURED))
        assert all(
            sample.token_ids[: sure(wanted) + 1] != wanted.token_ids[: sure(wanted) + 1]
            for sample, wanted in zip(changed, fleet.right, strict=True)
        ), "the changed weights are seen in the answers"
        for at, sample in enumerate(got):
            (span,) = sample.spans
            assert span.version in (old, new)
            alike(sample, (fleet.right if span.version == old else changed)[at % PROMPTS])
        assert any(sample.spans[0].version == new for sample in got)
        everywhere = only(await scene.pool.generate(ASKED, GREEDY))
        assert {sample.workers[0] for sample in everywhere} == set(scene.names)
        same(everywhere, changed)
        async with scene.pool.refit(back) as refit:
            await refit.load(str(MODELS / "v1"))
        fleet.version = back
        same(only(await scene.pool.generate(ASKED, GREEDY)), fleet.right)

    play(fleet, 2, act)


def test_answers_that_stood_still_during_a_refit_go_on_as_if_the_new_weights_had_read_them(fleet: Fleet) -> None:
    async def act(scene: Scene) -> None:
        new, back = fleet.version + 1, fleet.version + 2
        async with scene.asked() as task:
            async with scene.pool.refit(new, in_flight="keep") as refit:
                await refit.load(str(MODELS / "v2"))
            got = only(await task)
        fleet.version = new
        scene.settled(got)
        mixed = [(at, sample) for at, sample in enumerate(got) if len(sample.spans) > 1]
        assert mixed, "none of them was made by two versions"
        first = [sample.spans[0].tokens for _, sample in mixed]
        for (at, sample), tokens in zip(mixed, first, strict=True):
            wanted = fleet.right[at % PROMPTS]
            certain = min(tokens, sure(wanted))
            assert sample.token_ids[:certain] == wanted.token_ids[:certain]
        begun = [(*ASKED[at], *sample.token_ids[:tokens]) for (at, sample), tokens in zip(mixed, first, strict=True)]
        rest = await fleet.undisturbed(begun, new)
        for (_, sample), tokens, wanted in zip(mixed, first, rest, strict=True):
            certain = min(sure(wanted), len(sample.token_ids) - tokens)
            assert sample.token_ids[tokens:][:certain] == wanted.token_ids[:certain], "its cache is of the old weights"
        async with scene.pool.refit(back) as refit:
            await refit.load(str(MODELS / "v1"))
        fleet.version = back
        same(only(await scene.pool.generate(ASKED, GREEDY)), fleet.right)

    play(fleet, 2, act)


def test_an_engine_that_is_ended_in_flight_loses_no_request(fleet: Fleet) -> None:
    async def act(scene: Scene) -> None:
        one, server = scene.names[0], scene.servers[0]
        async with scene.asked() as task:
            server.signal(signal.SIGTERM)
            got = only(await task)
        scene.settled(got)
        same(got, fleet.right)
        # It answers what it has before it goes, so this may come a moment after the last answer.
        assert await scene.pool.until(lambda: scene.state(one) is not S.active or not server.alive, 60.0)

    play(fleet, 2, act, lost_s=10.0)
    fleet.servers[0].signal(signal.SIGKILL)
    assert fleet.servers[0].gone()


def test_a_chat_with_tools_goes_to_an_engine_as_it_is_and_restarts_on_another_when_that_is_killed(fleet: Fleet) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    chat = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [tool],
        "tool_choice": "none",
        "temperature": 0,
    }

    async def act(scene: Scene) -> None:
        with pytest.raises(InputError, match="400"):
            await scene.pool.forward("/v1/chat/completions", {"messages": "hello"})
        asked = {**chat, "max_tokens": 1_500, "ignore_eos": True}
        tasks = [asyncio.create_task(scene.pool.forward("/v1/chat/completions", asked)) for _ in range(4)]
        running = lambda: all(one.running for one in scene.pool.workers())  # noqa: E731
        assert await scene.pool.until(running, 120.0)
        assert not any(task.done() for task in tasks)
        scene.servers[0].signal(signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert {one.body["usage"]["completion_tokens"] for one in answers} == {1_500}
        assert len({one.body["choices"][0]["message"]["content"] for one in answers}) == 1
        assert sum(one.restarts for one in answers) == sum(len(one.workers) > 1 for one in answers) > 0

    play(fleet, 2, act, lost_s=10.0)


def test_an_engine_that_is_killed_in_flight_loses_no_request(fleet: Fleet) -> None:
    async def act(scene: Scene) -> None:
        one, server = scene.names[0], scene.servers[0]
        async with scene.asked() as task:
            server.signal(signal.SIGKILL)
            got = only(await task)
        scene.settled(got)
        same(got, fleet.right)
        assert any(sample.moves for sample in got)
        await scene.becomes(one, S.suspect, S.lost)

    play(fleet, 2, act, lost_s=10.0)
