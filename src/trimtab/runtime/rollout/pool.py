"""A pool of rollout engines: prompts in, answers out, and the right number of engines at work.

    async with RolloutPool() as pool:
        await pool.attach("http://127.0.0.1:8000")
        answers = await pool.generate(prompts, SamplingParams(max_tokens=512, n=8))

Who serves what, who drains, wakes and starts, and that every request is answered exactly once, is decided by
`trimtab.fleet.rollout`; here it meets engines and clients. One pool belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import aiohttp

from trimtab.fleet import rollout_events as e
from trimtab.fleet.rollout import STATIC, RolloutMachine
from trimtab.fleet.scaling import Taker
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.errors import InputError, UnreachableError
from trimtab.model.reason import Chapter
from trimtab.model.rollout import (
    DEFAULT_CLASS,
    InFlight,
    Membership,
    RefitWay,
    RequestSpec,
    RolloutRules,
    ScaleStep,
    WorkerSpec,
    WorkerState,
    WorkerView,
)
from trimtab.runtime.engines.detect import attach as attach_engine
from trimtab.runtime.engines.engine import Deadlines, Engine
from trimtab.runtime.engines.engine import Verb as Offers
from trimtab.runtime.engines.texts import texts_of
from trimtab.runtime.engines.wire import open_session
from trimtab.runtime.journal import ROLLOUT_EVENTS, Journal
from trimtab.runtime.rollout.asked import Asked
from trimtab.runtime.rollout.core import Core, Hand, Listener
from trimtab.runtime.rollout.deeds import Deeds
from trimtab.runtime.rollout.flights import Flights, number_of
from trimtab.runtime.rollout.launcher import Launcher
from trimtab.runtime.rollout.leases import Lease, Leases
from trimtab.runtime.rollout.refits import Refits, RefitSession
from trimtab.runtime.rollout.sampling import Chunk, Completion, RefusedError, Sample, SamplingParams, checked_prompt
from trimtab.runtime.rollout.showing import status
from trimtab.runtime.rollout.watch import Watch

NO_PARAMS = SamplingParams()
STOP_S = 30.0


class RolloutPool:
    """Engines and requests. Use it as an async context manager, or `start` and `stop` it."""

    def __init__(
        self,
        rules: RolloutRules = RolloutRules(),  # noqa: B008
        elastic: ElasticConfig = STATIC,
        *,
        journal: str | Path | None = None,
        look_s: float = 1.0,
        deadlines: Deadlines | None = None,
        gpus_of: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self.elastic = elastic
        self._core = core = Core(RolloutMachine(rules, elastic))
        Flights(core)
        self._leases = Leases(core)
        self._deeds = Deeds(core, gpus_of)
        self._deeds.on_engine = self._has_engine
        self._refits = Refits(core)
        self._watch = Watch(core, look_s)
        core.handlers |= {e.TellStep: lambda told: None, e.Warn: self._warned}
        self._deadlines = deadlines
        self._journal_at = None if journal is None else Path(journal)
        self._journal: Journal | None = None
        self._session: aiohttp.ClientSession | None = None
        self._numbers = itertools.count(1)
        self._running = False

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin. Engines are attached or added afterwards."""
        if self._running:
            return
        self._session = open_session()
        if self._journal_at is not None:
            self._journal = Journal(self._journal_at, kinds=ROLLOUT_EVENTS, owner="rollout pool")
            self._journal.snapshot(self._core.clock(), self._core.machine.dump())
            self._core.listeners.append(self._write_down)
        self._running = True
        self._core.closing = False
        self._core.tell(e.Tick())

    async def stop(self, drain_s: float = 0.0) -> None:
        """End: what runs has so long to finish, then it is cancelled; engines that were started here are stopped."""
        if not self._running:
            return
        core = self._core
        if drain_s > 0:
            await core.until(lambda: not core.machine.requests(), drain_s)
        for name in list(core.asked):
            core.tell(e.Cancelled(name, "the pool stops"))
        await core.until(lambda: not core.attempts, core.machine.rules.abort_s)
        self._running = False
        await core.end_tasks()
        launchers = {id(one.launcher): one.launcher for one in core.hands.values() if one.launcher is not None}
        for hand in core.hands.values():
            if hand.engine is not None:
                await hand.engine.close()
        for launcher in launchers.values():
            await launcher.close()
        if self._session is not None:
            await self._session.close()
        if self._journal is not None:
            self._journal.close()

    async def __aenter__(self) -> RolloutPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- workers -----------------------------------------------------------------------------------------------------

    async def attach(
        self,
        url: str,
        *,
        name: str | None = None,
        limit: int = 64,
        version: int | None = None,
        size: int = 1,
        node: str = "",
    ) -> str:
        """Use an engine that somebody else runs; what kind it is, is found out. Its name is given back.

        `version` says which weights it has. Left out, it is what the engine reports, or, where it reports none and
        nobody has trained yet, what engines are started with.
        """
        self._require_running()
        assert self._session is not None
        name = name or url.partition("://")[2].rstrip("/") or url
        if name in self._core.hands:
            raise InputError(f"there is a worker {name} already", hint="remove it first, or give this one another name")
        engine, dialect = await attach_engine(name, url, self._session, self._deadlines)
        spec = WorkerSpec(
            name,
            limit=limit,
            size=size,
            can_sleep=Offers.sleep in engine.verbs,
            can_pause=Offers.pause in engine.verbs,
            node=node,
        )
        return await self.add_engine(engine, spec, version=version, url=url, note=dialect.note)

    async def add_engine(
        self, engine: Engine, spec: WorkerSpec, *, version: int | None = None, url: str = "", note: str = ""
    ) -> str:
        """Use an engine by its adapter, whatever it is."""
        self._require_running()
        if spec.id in self._core.hands:
            raise InputError(f"there is a worker {spec.id} already", hint="remove it first")
        state = await engine.ready()
        if version is None:
            version = number_of(state.version)
        if version is None and self.version == self._core.machine.rules.version:
            version = self.version
        hand = self._core.hands[spec.id] = Hand(spec, engine, url, node=spec.node, note=note, state=state)
        hand.boots = state.boots
        try:
            self._core.tell(e.WorkerAdded(spec, up=True, version=version))
        except BaseException:
            del self._core.hands[spec.id]
            raise
        if note:
            self._core.warn(spec.id, note)
        if state.paused and not state.asleep:
            self._core.tell(e.PausedElsewhere(spec.id))
        if state.asleep:
            self._core.tell(e.WorkerSlept(spec.id, keeps_weights=False))
        self._watch.begin(spec.id)
        return spec.id

    def add_startable(self, spec: WorkerSpec, launcher: Launcher) -> str:
        """A worker whose engine is started when it is needed, and stopped when it is not."""
        self._require_running()
        if not spec.startable:
            raise InputError(f"worker {spec.id} is not startable", hint="WorkerSpec(..., startable=True)")
        if spec.id in self._core.hands:
            raise InputError(f"there is a worker {spec.id} already", hint="remove it first")
        self._core.hands[spec.id] = Hand(spec, launcher=launcher, node=spec.node)
        self._core.tell(e.WorkerAdded(spec))
        self._watch.begin(spec.id)
        return spec.id

    async def remove(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        """It goes for good: routed off, drained or cut, put to sleep, stopped. Returns when it is gone."""
        core = self._core
        core.hand(worker)
        core.tell(e.WorkerRemoved(worker, deadline_s, why))
        rules = core.machine.rules
        allowed_s = (rules.drain_s if deadline_s is None else deadline_s) + rules.abort_s + rules.sleep_s + rules.stop_s
        gone = await core.until(lambda: core.machine.worker(worker) is None, allowed_s)
        if not gone:
            view = core.machine.worker(worker)
            why = "" if view is None else f": {view.reason.sentence}"
            raise UnreachableError(f"worker {worker} has not gone in {allowed_s:g} s{why}")
        await self._forget(worker)

    async def _forget(self, worker: str) -> None:
        hand = self._core.hands.pop(worker, None)
        if hand is None:
            return
        if hand.watch is not None:
            hand.watch.cancel()
        if hand.engine is not None:
            await hand.engine.close()

    def drain(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        """It serves nothing new until `resume`; refused where too few would be left."""
        self.take(worker, self._core.machine.rules.drain_s if deadline_s is None else deadline_s, why or "by hand")

    def take(self, worker: str, deadline_s: float, why: str, *, forced: bool = False) -> None:
        """It is given to others after so long at the latest, until `resume`; `forced`: whatever that leaves."""
        self._core.hand(worker)
        self._core.tell(e.WorkerTaken(worker, self._core.clock() + deadline_s, why, forced))

    def resume(self, worker: str) -> None:
        """It may be used again."""
        self._core.hand(worker)
        self._core.tell(e.WorkerGiven(worker))

    def died(self, worker: str, why: str) -> None:
        """Its process has ended, for certain."""
        if worker in self._core.hands:
            self._core.tell(e.WorkerDied(worker, why))

    def vouch(self, worker: str, version: int | None = None) -> None:
        """It has these weights (left out: the trainer's), says whoever knows: the way back after a restart."""
        self._core.hand(worker)
        self._core.tell(e.RefitConfirmed(worker, self.version if version is None else version))

    def scale(self, workers: int, for_s: float | None = None, why: str = "") -> None:
        """So many are wanted, until `release_scale` or for so long. Wins over the policy."""
        self._core.tell(e.Scaled(workers, None if for_s is None else self._core.clock() + for_s, why))

    def release_scale(self) -> None:
        """The policy decides again."""
        self._core.tell(e.ScaleReleased())

    def set_range(self, least: int, most: int) -> None:
        """The plan's range is another."""
        self._core.tell(e.RangeSet(least, most))

    def takers(self, takers: tuple[Taker, ...]) -> None:
        """Who could use a freed worker now, and has not got it."""
        self._core.tell(e.TakersSeen(takers))

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams = NO_PARAMS,
        *,
        class_: str = DEFAULT_CLASS,
        groups: Sequence[str] | None = None,
        version: int | None = None,
        at_least: int | None = None,
        spans: bool = True,
        keys: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Answers to all prompts, in their order. A sample that failed says so itself; a full queue is waited for.

        `groups` names prompts that begin alike (each prompt is its own otherwise, which its n samples share).
        `spans` False: no answer is made by two versions of the weights. `keys`: the same key gets the same answer.
        """
        self._require_running()
        for name, given in (("groups", groups), ("keys", keys)):
            if given is not None and len(given) != len(prompts):
                raise InputError(f"{len(given)} {name} for {len(prompts)} prompts", hint=f"one of {name} for each")
        ids = [checked_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        call = next(self._numbers)
        tasks: list[list[asyncio.Task[Sample]]] = []
        loop = asyncio.get_running_loop()
        for at, prompt in enumerate(ids):
            group = groups[at] if groups is not None else f"p{call}.{at}"
            row = []
            for index in range(params.n):
                key = "" if keys is None else (keys[at] if params.n == 1 else f"{keys[at]}/{index}")
                asking = self._ask_patiently(
                    prompt, params, index, class_, group, version, at_least, spans, key, deadline_s
                )
                row.append(loop.create_task(asking))
            tasks.append(row)
        flat = [one for row in tasks for one in row]
        try:
            await asyncio.gather(*flat)
        except BaseException:
            for one in flat:
                one.cancel()
            await asyncio.gather(*flat, return_exceptions=True)
            raise
        return [Completion(tuple(one.result() for one in row)) for row in tasks]

    async def _ask_patiently(self, prompt: tuple[int, ...], params: SamplingParams, index: int, *how: Any) -> Sample:
        while True:
            asked = self._ask(prompt, params, index, None, *how)
            try:
                return await asked.answered
            except RefusedError as refused:
                await asyncio.sleep(refused.retry_after_s)
            except asyncio.CancelledError:
                self.cancel(asked.spec.id)
                raise

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams = NO_PARAMS,
        *,
        class_: str = DEFAULT_CLASS,
        group: str = "",
        version: int | None = None,
        at_least: int | None = None,
        spans: bool = True,
        key: str = "",
        deadline_s: float | None = None,
        restarts: Literal["tell", "hold"] = "tell",
    ) -> AsyncGenerator[Chunk, None]:
        """What comes of one prompt's samples, as it comes. Closing the generator cancels them.

        Raises RefusedError or InputError before the first chunk. `restarts="hold"` is for clients that cannot take a
        token back: what may begin again from the prompt comes only when it is whole.
        """
        self._require_running()
        ids, chunks = checked_prompt(prompt, "prompt"), asyncio.Queue[Chunk]()
        asked: list[Asked] = []
        try:
            how = (class_, group, version, at_least, spans, key, deadline_s)
            asked += self._ask_all(ids, params, chunks, *how)
            gate = _Gate(asked) if restarts == "hold" else None
            left = len(asked)
            while left:
                for chunk in joined([await chunks.get(), *_waiting(chunks)]):
                    for each in gate.passes(chunk) if gate is not None else (chunk,):
                        left -= each.sample is not None
                        yield each
        finally:
            for one in asked:
                self.cancel(one.spec.id)

    def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams = NO_PARAMS,
        *,
        class_: str = DEFAULT_CLASS,
        group: str = "",
        version: int | None = None,
        at_least: int | None = None,
        spans: bool = True,
        key: str = "",
        deadline_s: float | None = None,
    ) -> list[Asked]:
        """Ask without waiting: `await one.answered` for each of the n samples, `cancel(one.spec.id)` ends it.

        Raises RefusedError, with none of them asked, where the queue is full.
        """
        self._require_running()
        ids = checked_prompt(prompt, "prompt")
        return self._ask_all(ids, params, None, class_, group, version, at_least, spans, key, deadline_s)

    def _ask_all(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        chunks: asyncio.Queue[Chunk] | None,
        class_: str,
        group: str,
        version: int | None,
        at_least: int | None,
        spans: bool,
        key: str,
        deadline_s: float | None,
    ) -> list[Asked]:
        group = group or (f"p{next(self._numbers)}" if params.n > 1 else "")
        asked: list[Asked] = []
        try:
            for index in range(params.n):
                own = key if params.n == 1 or not key else f"{key}/{index}"
                one = self._ask(prompt, params, index, chunks, class_, group, version, at_least, spans, own, deadline_s)
                asked.append(one)
                if one.answered.done():
                    one.answered.result()  # raises where it was refused
        except BaseException:
            for one in asked:
                self.cancel(one.spec.id)
            raise
        return asked

    def _ask(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        index: int,
        chunks: asyncio.Queue[Chunk] | None,
        class_: str,
        group: str,
        version: int | None,
        at_least: int | None,
        spans: bool,
        key: str,
        deadline_s: float | None,
    ) -> Asked:
        core, own = self._core, params.sample(index)
        spec = RequestSpec(
            f"r{next(self._numbers)}",
            len(prompt),
            own.max_tokens,
            own.min_tokens,
            class_,
            group,
            version,
            at_least,
            own.may_resume(reads_text=self._reads_text()),
            spans,
            key,
            None if deadline_s is None else core.clock() + deadline_s,
        )
        answered: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        asked = core.asked[spec.id] = Asked(spec, prompt, own, index, answered, chunks)
        core.a_token = prompt[0]
        try:
            core.tell(e.Arrived(spec))
        except BaseException:
            core.asked.pop(spec.id, None)
            raise
        return asked

    def _reads_text(self) -> bool:
        """Whether every engine could say what tokens read."""
        engines = [one.engine for one in self._core.hands.values() if one.engine is not None]
        return all(texts_of(engine) is not None for engine in engines)

    def cancel(self, request: str) -> None:
        """It is not wanted any more; harmless where it is answered."""
        if request in self._core.asked and self._running:
            self._core.tell(e.Cancelled(request))

    async def acquire(
        self,
        *,
        class_: str = DEFAULT_CLASS,
        group: str = "",
        prompt_tokens: int = 0,
        tokens: int = 0,
        version: int | None = None,
        at_least: int | None = None,
        for_s: float = 600.0,
        wait_s: float = 60.0,
    ) -> Lease:
        """A place on an engine for a caller that talks to it by itself; about so many tokens, for so long at most."""
        self._require_running()
        spec = RequestSpec(
            f"l{next(self._numbers)}",
            prompt_tokens,
            max(1, tokens),
            class_=class_,
            group=group,
            version=version,
            at_least=at_least,
            resumable=False,
            deadline=self._core.clock() + wait_s + for_s,
            watched=False,
        )
        return await self._leases.acquire(spec, wait_s)

    # ---- weights and readiness ---------------------------------------------------------------------------------------

    def refit(
        self,
        version: int,
        *,
        way: RefitWay | str = RefitWay.disk,
        in_flight: InFlight | str = InFlight.keep,
        wait_s: float = 600.0,
    ) -> RefitSession:
        """New weights: `async with pool.refit(version) as refit: await refit.load(path)`. See `RefitSession`."""
        self._require_running()
        return RefitSession(
            self._refits, self._deeds, version, _choice(RefitWay, way), _choice(InFlight, in_flight), wait_s
        )

    def hold(
        self, workers: int, *, name: str = "hold", for_s: float | None = None, wait_s: float = 600.0
    ) -> AbstractAsyncContextManager[None]:
        """So many serve within the block, before a validation, say: `async with pool.hold(8): ...`."""
        return self._hold(workers, name, for_s, wait_s)

    @asynccontextmanager
    async def _hold(self, workers: int, name: str, for_s: float | None, wait_s: float) -> AsyncIterator[None]:
        core = self._core
        core.tell(e.Held(name, workers, None if for_s is None else core.clock() + for_s))
        try:
            if not await core.until(lambda: self._count(WorkerState.active) >= workers, wait_s):
                raise UnreachableError(
                    f"{self._count(WorkerState.active)} of {workers} workers serve after {wait_s:g} s",
                    hint="see `trimtab rollout status` for what the others wait for",
                )
            yield
        finally:
            if self._running:
                core.tell(e.Unheld(name))

    def _count(self, state: WorkerState) -> int:
        return sum(one.state is state for one in self._core.machine.workers())

    @property
    def version(self) -> int:
        """Of the trainer's weights."""
        return self._core.machine.version

    @property
    def weights(self) -> dict[int, str]:
        """Where versions lie, as `refit.load` has said; engines that start later read them there."""
        return self._core.weights

    def membership(self) -> Membership:
        """Who takes part in the open refit, or would in the next one."""
        return self._core.machine.membership()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerView, ...]:
        """All of them."""
        return self._core.machine.workers()

    def engine(self, worker: str) -> Engine | None:
        """Its adapter; None where it is not started."""
        return self._core.hand(worker).engine

    def url(self, worker: str) -> str:
        """Its address; empty where it has none."""
        return self._core.hand(worker).url

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        """The last changes of the number of workers."""
        return self._core.machine.steps

    def story(self, name: str) -> tuple[Chapter, ...]:
        """What became of a worker or a request, and why."""
        return self._core.machine.story(name)

    def metrics(self) -> dict[str, float]:
        """Workers, requests, load as a share of capacity."""
        return self._core.machine.metrics()

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: answered by end, moved, restarted, refused."""
        return dict(self._core.counters)

    def status(self) -> dict[str, Any]:
        """All that people ask about, as plain data."""
        return status(self._core, self.elastic)

    def add_listener(self, listener: Listener) -> None:
        """Call it with every event and instruction, and the time."""
        self._core.listeners.append(listener)

    async def until(self, true: Callable[[], bool], within_s: float | None = 60.0) -> bool:
        """Wait until it is so, looking whenever something happened here. Whether it came to be."""
        return await self._core.until(true, within_s)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _has_engine(self, worker: str) -> None:
        self._watch.begin(worker)

    def _warned(self, warn: e.Warn) -> None:
        self._core.warn(warn.worker, warn.reason.sentence)

    def _write_down(self, what: Any, now: float) -> None:
        if self._journal is not None and type(what).__name__ in ROLLOUT_EVENTS:
            self._journal.append(now, what)

    def _require_running(self) -> None:
        if not self._running:
            raise InputError("the rollout pool is not running", hint="async with RolloutPool(...) as pool: ...")


def _waiting(chunks: asyncio.Queue[Chunk]) -> list[Chunk]:
    """What lies in the queue already."""
    return [chunks.get_nowait() for _ in range(chunks.qsize())]


def joined(chunks: list[Chunk]) -> list[Chunk]:
    """Neighbours of one sample in one piece: a reader who was busy gets what came meanwhile at once."""
    out = chunks[:1]
    for one in chunks[1:]:
        last = out[-1]
        if one.index != last.index or one.restarted or last.restarted or last.sample is not None:
            out.append(one)
            continue
        out[-1] = Chunk(
            one.index,
            last.token_ids + one.token_ids,
            one.logprobs if last.logprobs is None else last.logprobs + (one.logprobs or ()),
            one.best if last.best is None else last.best + (one.best or ()),
            last.text + one.text,
            sample=one.sample,
        )
    return out


class _Gate:
    """Keeps back what may be taken back: chunks of requests that would begin again from the prompt.

    A request that may resume is passed on as it comes. Should it begin again all the same (its tokens could not be
    named), what comes anew must be what was given out, token by token; else the client is told the truth by an error.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._held: dict[int, list[Chunk]] = {
            one.index: [] for one in asked if not (one.spec.resumable and one.spec.spans and one.spec.version is None)
        }
        self._given: dict[int, list[int]] = {one.index: [] for one in asked}
        self._repeat: dict[int, int] = {}  # tokens that were given out and come again

    def passes(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """What the client sees now."""
        index = chunk.index
        if index in self._held:
            held = self._held[index]
            if chunk.restarted:
                held.clear()
                return ()
            held.append(chunk)
            if chunk.sample is None:
                return ()
            self._held[index] = []
            return tuple(held)
        if chunk.restarted:
            self._repeat[index] = 0
            return ()
        if index in self._repeat and chunk.sample is None:
            return self._again(chunk)
        self._given[index] += chunk.token_ids
        return (chunk,)

    def _again(self, chunk: Chunk) -> tuple[Chunk, ...]:
        given, at = self._given[chunk.index], self._repeat[chunk.index]
        known = given[at : at + len(chunk.token_ids)]
        if list(chunk.token_ids[: len(known)]) != known:
            raise UnreachableError(
                "the answer began again and came out otherwise, after some of it was given out",
                hint="ask again; with log-probabilities it can be carried on instead",
            )
        self._repeat[chunk.index] = at + len(known)
        new = chunk.token_ids[len(known) :]
        if not new:
            return ()
        del self._repeat[chunk.index]
        given += new
        logprobs = None if chunk.logprobs is None else chunk.logprobs[len(known) :]
        best = None if chunk.best is None else chunk.best[len(known) :]
        return (Chunk(chunk.index, new, logprobs, best, chunk.text),)


def _choice(kind: Any, given: Any) -> Any:
    with contextlib.suppress(ValueError):
        return kind(given)
    raise InputError(f"{given!r} is none of {', '.join(one.value for one in kind)}")
