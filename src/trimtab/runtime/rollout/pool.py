"""A pool of rollout engines: prompts in, answers out, and elastic scaling of the engines.

    async with RolloutPool() as pool:
        await pool.attach("http://127.0.0.1:8000")
        answers = await pool.generate(prompts, SamplingParams(max_tokens=512, n=8))

Routing, draining, waking, starting, and that every request is answered exactly once, are decided by
`trimtab.machines.rollout.machine`; this class connects it to engines and clients. A pool belongs to one event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import ReasonCode, StoryEntry
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.events import RefitOver
from trimtab.machines.rollout.machine import STATIC, RolloutMachine
from trimtab.machines.rollout.policies.load import Taker
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
from trimtab.runtime.engines.engine import Engine, EngineDeadlines, EngineError
from trimtab.runtime.engines.engine import EngineCapability as Offers
from trimtab.runtime.engines.http_engine import addresses, http_engine, open_session
from trimtab.runtime.procs.background import Background
from trimtab.runtime.rollout.dispatcher import Dispatcher, version_number
from trimtab.runtime.rollout.health import EngineHealthChecker, RolloutReconciler
from trimtab.runtime.rollout.journal import RolloutJournal
from trimtab.runtime.rollout.launch.launcher import Launcher
from trimtab.runtime.rollout.leases import EngineLeases
from trimtab.runtime.rollout.machine_loop import Listener, RolloutCore, WorkerHandle
from trimtab.runtime.rollout.refits import RefitSession, RefitWaiters
from trimtab.runtime.rollout.request_api import RequestApi
from trimtab.runtime.rollout.status import status
from trimtab.runtime.rollout.worker_actions import WorkerActions, record_weights


class RolloutPool(RequestApi):
    """Engines and requests. Use it as an async context manager, or call `start` and `stop`."""

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
        super().__init__(core, EngineLeases(core))
        Dispatcher(core, self._leases)
        self._health = EngineHealthChecker(core, look_s)
        self._actions = WorkerActions(core, self._health.begin, gpus_of)
        self._refits = RefitWaiters(core)
        self._reconciler = RolloutReconciler(core, reconcile_s, self._actions, self._leases)
        core.handlers |= {e.AnnounceScaleStep: lambda step: None, e.Warn: self._warned}
        self._deadlines = deadlines
        self._journal_at = None if journal is None else Path(journal)
        self._journal: RolloutJournal | None = None
        self._session: aiohttp.ClientSession | None = None

    # ---- lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Engines are attached or added afterwards."""
        if self._running:
            return
        self._session = open_session()
        if self._journal_at is not None:
            self._journal = await RolloutJournal.begin(self._core, self._journal_at)
        self._running = True
        self._core.closing = False
        self.background.start("reconcile", self._reconciler.run)
        self._core.handle_event(e.RolloutTick())

    async def stop(self, drain_s: float = 0.0) -> None:
        """Running requests may finish for `drain_s`, then are cancelled; engines started by the pool are stopped."""
        if not self._running:
            return
        core = self._core
        if drain_s > 0:
            await core.until(lambda: not core.machine.requests(), drain_s)
        for name in list(core.pending):
            core.handle_event(e.RequestCancelled(name, "the pool stops"))
        await core.until(lambda: not core.attempts, core.machine.rules.abort_s)
        self._running = False
        await core.end_tasks()
        for handle in core.handles.values():
            if handle.engine is not None:
                await handle.engine.close()
        for launcher in core.launchers():
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
        limit: int | None = None,
        version: int | None = None,
        size: int = 1,
        node: str = "",
    ) -> str:
        """Attaches a running engine, whose kind is detected. Returns the worker's name.

        `limit` is how many requests it has at once: by default as many as it says that it runs, or 64.
        `version` is the version of its weights. Default: what the engine reports or, if it reports none and there was
        no refit yet, the version that engines are started with.
        """
        self._require_running()
        assert self._session is not None
        name = name or url.partition("://")[2].rstrip("/") or url
        if name in self._core.handles:
            raise InputError(f"there is a worker {name} already", hint="remove it first, or give this one another name")
        found_at = await addresses(url)
        self._require_new(url, found_at)
        engine, _ = await attach_engine(name, url, self._session, self._deadlines)
        self._require_new(url, found_at)  # it may have been attached meanwhile
        spec = WorkerSpec(
            name,
            limit=limit or engine.max_running or WorkerSpec.limit,
            size=size,
            can_sleep=Offers.sleep in engine.capabilities,
            # The version of every token must be known after a pause, so each must have arrived. SGLang reports versions
            # by token, and counts those that it has not sent yet as made by the weights of the event.
            can_pause=Offers.keep in engine.capabilities
            and (not engine.pieces.whole or self._core.machine.rules.resume_every == 1),
            sleep_keeps_weights=1 in engine.sleep_levels or not engine.sleep_levels,
            node=node,
        )
        return await self.add_engine(engine, spec, version=version, url=url, addresses=found_at)

    def worker_at(self, found_at: frozenset[tuple[str, int]]) -> str | None:
        """The worker attached by a URL that leads to any of these addresses (`engines.http_engine.addresses`)."""
        return next((name for name, handle in self._core.handles.items() if handle.addresses & found_at), None)

    def _require_new(self, url: str, found_at: frozenset[tuple[str, int]]) -> None:
        known = self.worker_at(found_at)
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
        """Adds an engine by its adapter."""
        self._require_running()
        if spec.id in self._core.handles:
            raise InputError(f"there is a worker {spec.id} already", hint="remove it first")
        state = await engine.ready()
        if version is None:
            version = version_number(state.version)
        if version is None and self.version == self._core.machine.rules.version:
            version = self.version
        record_weights(engine, version)
        handle = self._core.handles[spec.id] = WorkerHandle(
            spec, engine, url, addresses, node=spec.node, note=note, state=state
        )
        handle.boots = state.boots
        try:
            self._core.handle_event(e.WorkerAdded(spec, up=True, version=version))
        except BaseException:
            del self._core.handles[spec.id]
            raise
        if state.paused and not state.asleep:
            self._core.handle_event(e.PausedExternally(spec.id))
        if state.asleep:
            self._core.handle_event(e.WorkerSlept(spec.id, keeps_weights=False))
        self._health.begin(spec.id)
        return spec.id

    def add_startable(self, spec: WorkerSpec, launcher: Launcher) -> str:
        """Adds a worker whose engine is started and stopped on demand."""
        self._require_running()
        if not spec.startable:
            raise InputError(f"worker {spec.id} is not startable", hint="WorkerSpec(..., startable=True)")
        if spec.id in self._core.handles:
            raise InputError(f"there is a worker {spec.id} already", hint="remove it first")
        self._core.handles[spec.id] = WorkerHandle(spec, launcher=launcher, node=spec.node)
        self._core.handle_event(e.WorkerAdded(spec))
        self._health.begin(spec.id)
        return spec.id

    async def remove(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        """Removes a worker: drain or abort, sleep, stop. Returns when it is gone."""
        core = self._core
        core.worker_handle(worker)
        core.handle_event(e.WorkerRemoved(worker, deadline_s, why))
        rules = core.machine.rules
        allowed_s = (rules.drain_s if deadline_s is None else deadline_s) + rules.abort_s + rules.sleep_s + rules.stop_s
        gone = await core.until(lambda: core.machine.worker(worker) is None, allowed_s)
        if not gone:
            view = core.machine.worker(worker)
            why = "" if view is None else f": {view.reason.sentence}"
            raise UnreachableError(f"worker {worker} has not gone in {allowed_s:g} s{why}")
        handle = core.handles.pop(worker, None)
        if handle is None:
            return
        if handle.health_task is not None:
            handle.health_task.cancel()
        if handle.engine is not None:
            await handle.engine.close()

    def drain(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        """Routes nothing new to it until `resume`; its requests move after `deadline_s` (default: the rules'
        `drain_s`).

        Refused if too few workers would be left.
        """
        core = self._core
        core.worker_handle(worker)
        wait_s = core.machine.rules.drain_s + core.machine.rules.abort_s if deadline_s is None else deadline_s
        core.handle_event(e.WorkerReclaimed(worker, core.clock() + wait_s, why or "by hand", full_notice=True))

    def take(self, worker: str, deadline_s: float, why: str, *, forced: bool = False) -> None:
        """Reclaims a worker within `deadline_s`, until `resume`; `forced`: even if too few are left."""
        self._core.worker_handle(worker)
        self._core.handle_event(e.WorkerReclaimed(worker, self._core.clock() + deadline_s, why, forced))

    def resume(self, worker: str) -> None:
        """The worker may be used again."""
        self._core.worker_handle(worker)
        self._core.handle_event(e.WorkerReturned(worker))

    def died(self, worker: str, why: str) -> None:
        """Its process has ended."""
        if worker in self._core.handles:
            self._core.handle_event(e.WorkerDied(worker, why))

    def vouch(self, worker: str, version: int | None = None) -> None:
        """Confirms which weights a worker has (default: the trainer's), for example after a restart."""
        version = self.version if version is None else version
        record_weights(self._core.worker_handle(worker).engine, version, by_caller=True)
        self._core.handle_event(e.RefitConfirmed(worker, version))

    def scale(self, workers: int, for_s: float | None = None, why: str = "") -> None:
        """Sets the number of workers, until `release_scale` or for `for_s`. Overrides the policy."""
        self._core.handle_event(e.ScaleRequested(workers, None if for_s is None else self._core.clock() + for_s, why))

    def release_scale(self) -> None:
        """Returns control to the policy."""
        self._core.handle_event(e.ScaleReleased())

    def set_range(self, min_workers: int, max_workers: int) -> None:
        """Changes the range of the number of workers."""
        self._core.handle_event(e.WorkerRangeSet(min_workers, max_workers))

    def takers(self, takers: tuple[Taker, ...]) -> None:
        """Reports the tasks that wait for a freed worker."""
        self._core.handle_event(e.DemandSeen(takers))

    # ---- weights and readiness ---------------------------------------------------------------------------------------

    def refit(
        self,
        version: int,
        *,
        way: RefitWay | str = RefitWay.disk,
        in_flight: InFlight | str = InFlight.keep,
        wait_s: float = 600.0,
    ) -> RefitSession:
        """Starts a weight update: `async with pool.refit(version) as refit: await refit.load(path)`."""
        self._require_running()
        return RefitSession(
            self._refits, self._actions, version, _choice(RefitWay, way), _choice(InFlight, in_flight), wait_s
        )

    async def restore(self, path: str | None = None) -> RefitOver:
        """Brings the pool back after a failed refit: the last version that served serves again.

        Engines that still have it are confirmed; the others load it from `path`. Default: from where it was loaded
        before or, if that was never said, from the model that they were started with.
        """
        self._require_running()
        session = self.refit(self._core.machine.served_version, in_flight=InFlight.move)
        async with session:
            await session.restore(path)
        assert session.outcome is not None
        return session.outcome

    @asynccontextmanager
    async def hold(
        self, workers: int, *, name: str = "hold", for_s: float | None = None, wait_s: float = 600.0
    ) -> AsyncIterator[None]:
        """Keeps this number of workers active within the block, for example for a validation."""
        core = self._core
        core.handle_event(e.HoldRequested(name, workers, None if for_s is None else core.clock() + for_s))
        try:
            if not await core.until(lambda: self._count(WorkerState.active) >= workers, wait_s):
                raise UnreachableError(
                    f"{self._count(WorkerState.active)} of {workers} workers serve after {wait_s:g} s",
                    hint="see `trimtab engine list` for what the others wait for",
                )
            yield
        finally:
            if self._running:
                core.handle_event(e.HoldReleased(name))

    def _count(self, state: WorkerState) -> int:
        return sum(worker.state is state for worker in self._core.machine.workers())

    @property
    def version(self) -> int:
        """Version of the trainer's weights."""
        return self._core.machine.version

    @property
    def weights(self) -> dict[int, str]:
        """Paths of versions, from `refit.load`; engines that start later read them there."""
        return self._core.weights

    async def load_adapter(self, name: str, path: str) -> None:
        """Adds a LoRA adapter for `SamplingParams(lora=name)`; a name has one path for ever.

        A worker that serves loads it now, so that a wrong path is an error here; the others before their first request
        with it, and again when their process was replaced.
        """
        self._require_running()
        if not name or not path:
            raise InputError("an adapter needs a name and a path")
        known = self._core.adapters.get(name)
        if known not in (None, path):
            raise InputError(f"adapter {name} is {known}, not {path}", hint="give another path another name")
        self._core.adapters[name] = path
        serving = (self.engine(view.worker) for view in self.workers() if view.state is WorkerState.active)
        engine = next(serving, None)
        try:
            if engine is not None:
                await http_engine(engine, "load LoRA adapters").load_adapter(name, path)
        except EngineError as error:  # requests with it load it
            self.warn(f"adapter {name} is not loaded yet: {error.what}", error.engine)
        except BaseException:
            if known is None:
                del self._core.adapters[name]
            raise

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters by name: their paths."""
        return dict(self._core.adapters)

    def membership(self) -> Membership:
        """Members of the open refit, or of the next."""
        return self._core.machine.membership()

    # ---- queries -----------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerView, ...]:
        return self._core.machine.workers()

    def engine(self, worker: str) -> Engine | None:
        """Adapter of a worker; None if it is not started."""
        return self._core.worker_handle(worker).engine

    def url(self, worker: str) -> str:
        """Address of a worker; empty if it has none."""
        return self._core.worker_handle(worker).url

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        """Recent changes of the number of workers."""
        return self._core.machine.steps

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """History of a worker or request, with reasons."""
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
        """Background loops and their failures."""
        return self._core.background

    def status(self) -> dict[str, Any]:
        """Status as JSON-compatible data."""
        return status(self._core, self.elastic)

    def warn(self, sentence: str, worker: str = "", code: ReasonCode | None = None) -> None:
        """Adds a warning to `status`."""
        self._core.warn(worker, sentence, code)

    def add_listener(self, listener: Listener) -> None:
        """Calls it with every event and instruction, and the time."""
        self._core.listeners.append(listener)

    async def until(self, true: Callable[[], bool], within_s: float | None = 60.0) -> bool:
        """Waits until the condition holds, checking after every event; False on timeout."""
        return await self._core.until(true, within_s)

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _warned(self, warn: e.Warn) -> None:
        self._core.warn(warn.worker, warn.reason.sentence, warn.reason.code)


def _choice(kind: Any, given: Any) -> Any:
    with contextlib.suppress(ValueError):
        return kind(given)
    raise InputError(f"{given!r} is none of {', '.join(member.value for member in kind)}")
