"""A pool of rollout engines: prompts in, answers out, and the right number of engines at work.

    async with RolloutPool() as pool:
        await pool.attach("http://127.0.0.1:8000")
        answers = await pool.generate(prompts, SamplingParams(max_tokens=512, n=8))

Who serves what, who drains, wakes and starts, and that every request is answered exactly once, is decided by
`trimtab.machines.rollout.machine`; here it meets engines and clients. One pool belongs to one event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import ReasonCode, StoryEntry
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import STATIC, RolloutMachine
from trimtab.machines.rollout.policies.policy import Taker
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    InFlight,
    Membership,
    RefitWay,
    RolloutRules,
    ScaleStep,
    WorkerSpec,
    WorkerState,
    WorkerView,
)
from trimtab.runtime.engines.detect import attach as attach_engine
from trimtab.runtime.engines.engine import Engine, EngineDeadlines
from trimtab.runtime.engines.engine import EngineCapability as Offers
from trimtab.runtime.engines.wire import addresses, open_session
from trimtab.runtime.procs.background import Background
from trimtab.runtime.rollout.dispatcher import Dispatcher, number_of
from trimtab.runtime.rollout.health import EngineHealthChecker
from trimtab.runtime.rollout.journal import RolloutJournal
from trimtab.runtime.rollout.launch.launcher import Launcher
from trimtab.runtime.rollout.leases import EngineLeases
from trimtab.runtime.rollout.machine_loop import Listener, RolloutCore, WorkerHandle
from trimtab.runtime.rollout.reconcile import RolloutReconciler
from trimtab.runtime.rollout.refits import RefitSession, RefitWaiters
from trimtab.runtime.rollout.request_api import RequestApi
from trimtab.runtime.rollout.status import status
from trimtab.runtime.rollout.worker_actions import WorkerActions


class RolloutPool(RequestApi):
    """Engines and requests. Use it as an async context manager, or `start` and `stop` it."""

    def __init__(
        self,
        rules: RolloutRules = RolloutRules(),  # noqa: B008
        elastic: ElasticConfig = STATIC,
        *,
        journal: str | Path | None = None,
        look_s: float = 1.0,
        reconcile_s: float = 5.0,
        deadlines: EngineDeadlines | None = None,
        gpus_of: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self.elastic = elastic
        core = RolloutCore(RolloutMachine(rules, elastic))
        Dispatcher(core)
        super().__init__(core, EngineLeases(core))
        self._deeds = WorkerActions(core, gpus_of)
        self._deeds.on_engine = self._has_engine
        self._refits = RefitWaiters(core)
        self._watch = EngineHealthChecker(core, look_s)
        self._reconciler = RolloutReconciler(core, reconcile_s, self._deeds.is_doing, self._leases.is_lease)
        core.handlers |= {e.AnnounceScaleStep: lambda told: None, e.Warn: self._warned}
        self._deadlines = deadlines
        self._journal_at = None if journal is None else Path(journal)
        self._journal: RolloutJournal | None = None
        self._session: aiohttp.ClientSession | None = None

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin. Engines are attached or added afterwards."""
        if self._running:
            return
        self._session = open_session()
        if self._journal_at is not None:
            self._journal = await RolloutJournal.begin(self._core, self._journal_at)
        self._running = True
        self._core.closing = False
        self.background.start("reconcile", self._reconciler.run)
        self._core.tell(e.RolloutTick())

    async def stop(self, drain_s: float = 0.0) -> None:
        """End: what runs has so long to finish, then it is cancelled; engines that were started here are stopped."""
        if not self._running:
            return
        core = self._core
        if drain_s > 0:
            await core.until(lambda: not core.machine.requests(), drain_s)
        for name in list(core.asked):
            core.tell(e.RequestCancelled(name, "the pool stops"))
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
        there = await addresses(url)
        self._require_new(url, there)
        engine, dialect = await attach_engine(name, url, self._session, self._deadlines)
        self._require_new(url, there)  # others may have attached it meanwhile
        spec = WorkerSpec(
            name,
            limit=limit,
            size=size,
            can_sleep=Offers.sleep in engine.verbs,
            can_pause=Offers.pause in engine.verbs,
            node=node,
        )
        return await self.add_engine(engine, spec, version=version, url=url, note=dialect.note, addresses=there)

    def worker_at(self, there: frozenset[tuple[str, int]]) -> str | None:
        """The worker that was attached by a URL that leads to one of these addresses (`engines.wire.addresses`)."""
        return next((name for name, hand in self._core.hands.items() if hand.addresses & there), None)

    def _require_new(self, url: str, there: frozenset[tuple[str, int]]) -> None:
        known = self.worker_at(there)
        if known is not None:
            raise InputError(f"{url} is worker {known} already", hint="remove it first")

    async def add_engine(
        self,
        engine: Engine,
        spec: WorkerSpec,
        *,
        version: int | None = None,
        url: str = "",
        note: str = "",
        addresses: frozenset[tuple[str, int]] = frozenset(),
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
        hand = self._core.hands[spec.id] = WorkerHandle(
            spec, engine, url, addresses, node=spec.node, note=note, state=state
        )
        hand.boots = state.boots
        try:
            self._core.tell(e.WorkerAdded(spec, up=True, version=version))
        except BaseException:
            del self._core.hands[spec.id]
            raise
        if note:
            self._core.warn(spec.id, note)
        if state.paused and not state.asleep:
            self._core.tell(e.PausedExternally(spec.id))
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
        self._core.hands[spec.id] = WorkerHandle(spec, launcher=launcher, node=spec.node)
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
        """It serves nothing new until `resume`; what it has goes elsewhere after so long. Refused if too few are left.

        Left out, the deadline is the rules' `drain_s`.
        """
        core = self._core
        core.hand(worker)
        wait_s = core.machine.rules.drain_s + core.machine.rules.abort_s if deadline_s is None else deadline_s
        core.tell(e.WorkerReclaimed(worker, core.clock() + wait_s, why or "by hand", full_notice=True))

    def take(self, worker: str, deadline_s: float, why: str, *, forced: bool = False) -> None:
        """It is given to others after so long at the latest, until `resume`; `forced`: whatever that leaves."""
        self._core.hand(worker)
        self._core.tell(e.WorkerReclaimed(worker, self._core.clock() + deadline_s, why, forced))

    def resume(self, worker: str) -> None:
        """It may be used again."""
        self._core.hand(worker)
        self._core.tell(e.WorkerReturned(worker))

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
        self._core.tell(e.ScaleRequested(workers, None if for_s is None else self._core.clock() + for_s, why))

    def release_scale(self) -> None:
        """The policy decides again."""
        self._core.tell(e.ScaleReleased())

    def set_range(self, least: int, most: int) -> None:
        """The plan's range is another."""
        self._core.tell(e.WorkerRangeSet(least, most))

    def takers(self, takers: tuple[Taker, ...]) -> None:
        """Who could use a freed worker now, and has not got it."""
        self._core.tell(e.DemandSeen(takers))

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
        core.tell(e.HoldRequested(name, workers, None if for_s is None else core.clock() + for_s))
        try:
            if not await core.until(lambda: self._count(WorkerState.active) >= workers, wait_s):
                raise UnreachableError(
                    f"{self._count(WorkerState.active)} of {workers} workers serve after {wait_s:g} s",
                    hint="see `trimtab rollout status` for what the others wait for",
                )
            yield
        finally:
            if self._running:
                core.tell(e.HoldReleased(name))

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

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """What became of a worker or a request, and why."""
        return self._core.machine.story(name)

    def metrics(self) -> dict[str, float]:
        """Workers, requests, load as a share of capacity."""
        return self._core.machine.metrics()

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: answered by end, moved, restarted, refused."""
        return dict(self._core.counters)

    @property
    def background(self) -> Background:
        """What runs beside, and what of it failed."""
        return self._core.background

    def status(self) -> dict[str, Any]:
        """All that people ask about, as plain data."""
        return status(self._core, self.elastic)

    def warn(self, sentence: str, worker: str = "", code: ReasonCode | None = None) -> None:
        """Put a warning beside those of the pool, where `status` shows them."""
        self._core.warn(worker, sentence, code)

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
        self._core.warn(warn.worker, warn.reason.sentence, warn.reason.code)


def _choice(kind: Any, given: Any) -> Any:
    with contextlib.suppress(ValueError):
        return kind(given)
    raise InputError(f"{given!r} is none of {', '.join(one.value for one in kind)}")
