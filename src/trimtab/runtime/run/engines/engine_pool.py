"""The engines of a run's rollout component: a rollout pool on its own thread, and a launcher for its workers.

If the component has slots to itself, each engine is a task of the run's pool that may be preempted by priority, with
notice: it is drained, its requests continue on other engines, and it returns when a slot is free. Otherwise engines run
in the component's process or as its children. What must never happen: a task, process or thread that is left after
`close`, a worker that is removed while its requests cannot continue elsewhere.

Public methods may be called from any thread; each waits for the pool's event loop, with a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.rollout.machine import STATIC
from trimtab.model.rollout import WorkerSpec, WorkerState, WorkerView
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background
from trimtab.runtime.rollout.launch.launcher import Launcher
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.run import control_files
from trimtab.runtime.run.component import Place
from trimtab.runtime.run.engines.engine_thread import engine_class, methods_of
from trimtab.runtime.run.engines.event_log import EngineEventLog
from trimtab.runtime.run.engines.object_engine import ObjectLauncher, WeightsAt
from trimtab.runtime.run.engines.settings import EngineSettings

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

log = logging.getLogger("trimtab.rollout")

T = TypeVar("T")

ANSWER_S = 30.0
CLOSE_S = 60.0
POLL_S = 0.5
EVENT_LOG_S = 0.25
MAX_THREADS = 256  # each engine in this process uses one during a call
S = WorkerState


class RunEnginePool:
    """Engines for `gpus` GPUs, and the rollout pool in front of them."""

    def __init__(self, settings: EngineSettings, place: Place, near: Path | None, weights_at: WeightsAt) -> None:
        self.settings = settings
        self.place = place
        self.gateway_url = ""
        self._near = near
        self._weights_at = weights_at
        self._command = settings.engine_command()
        self._kind: Callable[..., Any] | None = None
        if settings.engine is not None:
            self._kind = engine_class(settings.engine, settings.engine_settings, near, "settings.engine")
        self._methods = methods_of(self._kind)
        self._count, self._min_engines, self._max_engines = 0, 0, 0
        self._workers: list[str] = []
        self._pids: dict[str, int] = {}  # of engine objects on slots, by worker
        self._session: Session | None = None
        self._launcher: Launcher | None = None
        self._gateway: Any = None
        self._offloaded = False  # other components have the GPUs
        self._closed = False
        self._event_log: EngineEventLog | None = None
        self._event_task: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"trimtab-{place.component}-beside")
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name=f"trimtab-{place.component}-pool", daemon=True)
        self._thread.start()
        try:
            if place.on_slots:
                from trimtab.runtime.client.session import connect

                self._session = connect(name=place.session or "trimtab")
            self.wait(self._begin(), ANSWER_S)
        except BaseException:
            self.close()
            raise

    # ---- from any thread -----------------------------------------------------------------------------------------

    def wait(self, work: Coroutine[Any, Any, T], within_s: float | None) -> T:
        """Run a coroutine on the pool's loop and return its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise UnreachableError(f"the rollout pool did not answer within {within_s:g} s") from None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TrimtabError):
            self.wait(self._end(), CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        if self._session is not None:
            self._session.close()

    def resize(self, gpus: int) -> None:
        """Set the number of GPUs. Engines that are removed hand over their requests first."""
        self._count = max(1, gpus // self.settings.gpus_each)
        self._min_engines, self._max_engines = min(self._min_engines, self._count), max(self._max_engines, self._count)
        self.wait(self._reconcile(), self._removal_s())

    def span(self, min_gpus: int, max_gpus: int) -> None:
        """Set the range of GPUs: without `elastic`, as many of them as the plan gave are used."""
        each = self.settings.gpus_each
        self._min_engines, self._max_engines = min_gpus // each, max(1, max_gpus // each)
        self.wait(self._reconcile(), self._removal_s())

    def offload(self) -> None:
        """Put engines to sleep, or stop engine processes that cannot sleep."""
        if self._can_release_gpus and not self._offloaded:
            self._offloaded = True
            self.wait(self._apply_offload(), self._removal_s())

    def onload(self) -> None:
        if self._offloaded:
            self._offloaded = False
            self.wait(self._apply_offload(), self.settings.start_s)

    def views(self) -> tuple[WorkerView, ...]:
        async def workers() -> tuple[WorkerView, ...]:
            return self.pool.workers()

        return self.wait(workers(), ANSWER_S)

    def pids(self) -> dict[str, int]:
        """Processes of engines on slots, by worker."""
        return dict(self._pids)

    @property
    def takes_weights(self) -> bool:
        return self._command is not None or {"refit", "version"} <= self._methods

    # ---- on the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._loop.close()

    async def _begin(self) -> None:
        settings, each = self.settings, self.settings.gpus_each
        self._count = max(1, self.place.gpus // each)
        self._min_engines, self._max_engines = 0, self._count
        rules = settings.rollout_rules(min(1, self._count), self._count)
        self.pool = RolloutPool(rules, settings.elastic_config() or STATIC, look_s=1.0)
        await self.pool.start()
        self._event_log = EngineEventLog(self.pool, self.place.folder, self.place.component)
        self._event_task = Background().start("rollout-diary", self._poll_folder, policy=NEVER_GIVE_UP)
        self._launcher = self._make_launcher()
        await self._reconcile()
        given = settings.gateway_settings()
        if given is not None:
            await self._open_gateway(given)

    async def _open_gateway(self, given: dict[str, Any]) -> None:
        from trimtab.runtime.gateway.server import Gateway
        from trimtab.runtime.gateway.settings import GatewaySettings

        self._gateway = Gateway(self.pool, GatewaySettings(**{"token": secrets.token_hex(16), **given}))
        await self._gateway.start()
        self.gateway_url = self._gateway.url
        log.info("the gateway of %s listens on %s", self.place.component, self.gateway_url)

    async def _end(self) -> None:
        if self._gateway is not None:
            await self._gateway.stop(0.0)
        if hasattr(self, "pool"):
            if self._event_task is not None:
                self._event_task.cancel()
            self._write_events()
            await self.pool.stop()
            self._write_events("the component ends")
        if self._launcher is not None:
            await self._launcher.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _poll_folder(self) -> None:
        while True:
            self._take_requests()
            self._write_events()
            await asyncio.sleep(EVENT_LOG_S)

    def _take_requests(self) -> None:
        """Apply control requests for workers; refused ones go to the event log with the reason."""
        folder, component = self.place.folder, self.place.component
        for request in (
            control_files.take_requests(folder, control_files.workers_queue(component)) if folder is not None else ()
        ):
            worker, given = str(request.get("worker")), request.get("deadline_s")
            try:
                deadline_s = None if given is None else float(given)
                if deadline_s is not None and not 0 <= deadline_s < float("inf"):
                    raise ValueError(f"a deadline of {given} s")
                if request.get("ask") == "drain":
                    self.pool.drain(worker, deadline_s, str(request.get("why", "")))
                elif request.get("ask") == "resume":
                    self.pool.resume(worker)
            except (TrimtabError, ValueError, TypeError) as refused:
                assert self._event_log is not None
                self._event_log.write_refusal(worker, f"refused: {getattr(refused, 'what', refused)}")

    def _write_events(self, last: str = "") -> None:
        if self._event_log is not None:
            self._event_log.write_changes(last)

    # ---- workers -------------------------------------------------------------------------------------------------

    def _make_launcher(self) -> Launcher:
        settings, place = self.settings, self.place
        if self._session is not None:
            return self._slot_launcher()
        if self._command is not None:
            each = settings.gpus_each
            rows = [place.devices[at : at + each] for at in range(0, len(place.devices) - each + 1, each)]
            devices = [",".join(map(str, row)) for row in rows]
            logs = None if place.folder is None else place.folder / f"{place.component}-engines"
            return ProcessLauncher(self.pool, self._command, devices=devices, logs=logs)
        assert self._kind is not None
        methods, start_s = self._methods, float(settings.start_s)
        return ObjectLauncher(self._kind, settings.engine_settings, methods, self._place_of, self._weights_at, start_s)

    def _slot_launcher(self) -> Launcher:
        from trimtab.runtime.rollout.launch.slots import SlotLauncher
        from trimtab.runtime.rollout.launch.start import DemandWatch
        from trimtab.runtime.run.engines.slot_engines import EngineObjectSpec, ObjectEngines

        settings, place = self.settings, self.place
        assert self._session is not None
        assert place.pool is not None
        options: dict[str, Any] = {
            "resources": {"gpu": float(settings.gpus_each)},
            "priority": settings.priority,
            "labels": {"component": place.component, "role": "engine"},
            "notice_s": float(settings.notice_s),
            "room_s": float(settings.room_s),
        }
        engines: Any = self._command
        if settings.engine is not None:
            spec = EngineObjectSpec(
                settings.engine, self._place_of(""), settings.engine_settings, self._near, float(settings.start_s)
            )
            engines = ObjectEngines(spec, self._methods, self._weights_at, self._pids)
        launcher = SlotLauncher(self.pool, self._session, place.pool, engines, **options)
        launcher.listen()
        if settings.elastic is not None:
            launcher.add_loop(DemandWatch(launcher).watch_demand)
        return launcher

    def _place_of(self, worker: str) -> Place:
        """The place of an engine: its component's, with GPUs of its own if they are known."""
        each, devices = self.settings.gpus_each, self.place.devices
        own = devices
        if worker in self._workers and len(devices) >= each:
            at = (_number(worker) - 1) * each % (len(devices) - each + 1)
            own = devices[at : at + each]
        return Place(worker or self.place.component, devices=own, gpus=each, seed=self.place.seed)

    def _spec(self, worker: str) -> WorkerSpec:
        kind = None if self._command is None else self._command.kind
        sleeps = kind in ("vllm", "sglang") if self._command is not None else {"sleep", "wake"} <= self._methods
        pauses = kind == "sglang" if self._command is not None else {"pause", "resume"} <= self._methods
        return WorkerSpec(
            worker,
            limit=self.settings.capacity,
            size=self.settings.gpus_each,
            startable=True,
            can_sleep=sleeps and self._session is None,  # asleep on a slot it would keep that slot
            can_pause=pauses,
        )

    async def _reconcile(self) -> None:
        """Match the number of workers to the plan; surplus ones are drained and removed."""
        elastic = self.settings.elastic is not None
        wanted = self._max_engines if elastic else max(self._min_engines, min(self._count, self._max_engines))
        assert self._launcher is not None
        self._write_events()
        leaving = self._workers_to_remove(len(self._workers) - wanted)
        for worker in leaving:
            self._workers.remove(worker)
        while len(self._workers) < wanted:
            taken = {_number(name) for name in (*self._workers, *leaving)}
            number = next(n for n in range(1, wanted + len(leaving) + 1) if n not in taken)
            worker = f"{self.place.component}-{number}"
            self._workers.append(worker)
            self.pool.add_startable(self._spec(worker), self._launcher)
        minimum = min(max(self._min_engines, 1), wanted) if not self._offloaded else 0
        self.pool.set_range(minimum, wanted)
        await asyncio.gather(*(self.pool.remove(worker, why="the plan gives fewer GPUs") for worker in leaving))

    def _workers_to_remove(self, count: int) -> list[str]:
        """Inactive ones first, then those with the fewest requests, then the newest."""
        if count <= 0:
            return []
        views = {view.worker: view for view in self.pool.workers()}
        worth = {w: (views[w].state is S.active, views[w].running, -_number(w)) for w in self._workers}
        return sorted(self._workers, key=lambda worker: worth[worker])[:count]

    @property
    def _can_release_gpus(self) -> bool:
        """Whether engines can free GPU memory: by sleeping, or because they are processes that end."""
        return self._session is None and (self._command is not None or {"sleep", "wake"} <= self._methods)

    async def _apply_offload(self) -> None:
        pool, wanted = self.pool, len(self._workers)
        if self._offloaded:
            pool.set_range(0, wanted)
            pool.scale(0, why="others have the GPUs")
            busy = (S.active, S.draining, S.starting)
            await pool.until(lambda: not any(worker.state in busy for worker in pool.workers()), self._removal_s())
            return
        pool.release_scale()
        await self._reconcile()
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until all engines serve that are not on preempted slots, at most `ready_s`.

        UnreachableError if none ever will.
        """
        end = time.monotonic() + self.settings.ready_s
        while not self._all_ready() and (left_s := end - time.monotonic()) > 0:
            self.raise_if_no_engine_left()
            await self.pool.until(self._all_ready, min(left_s, POLL_S))

    def _all_ready(self) -> bool:
        views = self.pool.workers()
        waits = [view for view in views if view.state is not S.active and not view.taken]
        return any(view.state is S.active for view in views) and not waits

    def _removal_s(self) -> float:
        rules = self.settings.rollout_rules(0, 1)
        return rules.drain_s + rules.abort_s + rules.sleep_s + rules.stop_s + ANSWER_S

    def permanent_failure(self) -> str:
        """Why no engine will ever serve; empty while one might. Call on the loop."""
        why = ""
        for view in self.pool.workers():
            last = self.pool.story(view.worker)[-1].reason
            if view.state is not S.lost or view.taken or last.code is not ReasonCode.restarts_used:
                return ""
            why = last.sentence
        return why

    def raise_if_no_engine_left(self) -> None:
        why = self.permanent_failure()
        if why:
            raise UnreachableError(f"no engine of {self.place.component} serves: {why}")


def _number(worker: str) -> int:
    return int(worker.rpartition("-")[2])
