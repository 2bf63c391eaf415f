"""The engines of a run's rollout component: settings, a rollout pool on its own thread, a launcher for its workers.

If the component has slots to itself, each engine is a task of the run's pool that may be preempted by priority, with
notice: it is drained, its requests continue on other engines, and it returns when a slot is free. Otherwise engines run
in the component's process or as its children. What must never happen: a task, process or thread that is left after
`close`, a worker that is removed while its requests cannot continue elsewhere.

Public methods may be called from any thread; each waits for the pool's event loop, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.formats import sections
from trimtab.formats.rollout.elastic_config import SETTINGS
from trimtab.formats.rollout.schema import ResumeEvery
from trimtab.formats.sections import Count, FieldsOf, Priority, Seconds, Section, Switch, Text, refused
from trimtab.formats.yaml_text import Source
from trimtab.machines.rollout.machine import STATIC
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import Owner, Ownership, RolloutRules, WorkerSpec, WorkerState, WorkerView
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background
from trimtab.runtime.rollout.launch.launcher import EngineCommand, Launcher
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.run.component import Place
from trimtab.runtime.run.engines.object_engine import (
    METHODS,
    EngineObjectSpec,
    LoopThread,
    ObjectLauncher,
    WeightsAt,
    engine_class,
)
from trimtab.runtime.run.folder import event_log_path, load_path, take_requests, workers_queue
from trimtab.runtime.store.files import AppendLog, write_file

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

log = logging.getLogger("trimtab.rollout")

ANSWER_S = 30.0
CLOSE_S = 50.0  # beside what engines need to end
POLL_S = 0.5
EVENT_LOG_S = 0.25
MAX_THREADS = 256  # each engine in this process uses one during a call
S = WorkerState
LEFT = "left"
LOAD_S = 0.5  # between two writes of the load file
HEARTBEAT_S = 5.0  # the load file is rewritten even if unchanged, so that one of a dead process is recognised
NOT_LOGGED = (ReasonCode.joined, ReasonCode.refitting)  # a start follows at once; a refit comes after every iteration
RUN_RULES = ("min_workers", "max_workers", "capacity", "version", "ownership", "classes")
RULES = FieldsOf(RolloutRules, dict.fromkeys(RUN_RULES, ("is set by the run", "")), {"resume_every": ResumeEvery})
GATEWAY = FieldsOf(
    GatewaySettings,
    only=("host", "port", "token", "model_name", "max_concurrent", "default_max_tokens"),
    optional=("token",),
)


class EngineSettings(Section):
    """Settings of `EngineRollout`; seconds, unless stated otherwise. Either `engine` or `command` is given."""

    ask: Text
    engine: Text | None = None
    command: str | list[str] | Annotated[dict[str, Any], FieldsOf(EngineCommand, optional=("model",))] | None = None
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    ask_settings: dict[str, Any] = Field(default_factory=dict)
    gpus_each: Count = 1
    capacity: Count = 64  # concurrent requests, on each
    gateway: Switch | Annotated[dict[str, Any], GATEWAY] | None = False
    priority: Priority = 5.0  # of engines on slots: below that of the run's components
    notice_s: Seconds = 20.0  # for an engine's requests, when its slot is preempted
    room_s: Seconds = 5.0  # a slot that is not free after this is waited for in the queue
    start_s: Seconds = 120.0
    stop_s: Seconds = 10.0  # for an engine object to end
    ready_s: Seconds = 30.0  # the component is ready when an engine serves, or after this
    seeds: Switch = True  # every request without a seed gets one from the run's
    elastic: Annotated[dict[str, Any], SETTINGS] | None = None
    rules: Annotated[dict[str, Any], RULES] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> EngineSettings:
        if (self.engine is None) == (self.command is None):
            hint = "either engine: package.module:Class, or command: a command line with {port}"
            raise refused("exactly one of engine and command is required", hint)
        return self

    def engine_command(self) -> EngineCommand | None:
        """How an engine process is started; None if engines are objects."""
        if self.command is None:
            return None
        stated = self.command if isinstance(self.command, dict) else {"command": self.command}
        return EngineCommand(**{"model": "", "start_s": self.start_s, **stated})

    def rollout_rules(self, min_workers: int, max_workers: int) -> RolloutRules:
        # The pool refits workers that lack the current weights, also those that join later. Only a process is started
        # with them.
        owner = Owner.trimtab if self.command is None else Owner.trainer
        usual = {"monitor_s": 1.0, "drain_s": self.notice_s, "back_off_s": 0.5, "retries": 20}
        return RolloutRules(
            **{**usual, **self.rules},
            min_workers=min_workers,
            max_workers=max_workers,
            capacity=self.capacity,
            ownership=Ownership(refit=owner),
        )

    def elastic_config(self) -> ElasticConfig | None:
        """How the number of engines follows the load; None: all that the plan gives serve."""
        if self.elastic is None:
            return None
        return ElasticConfig(**{"requests_per_worker_capacity": self.capacity, **self.elastic})

    def gateway_settings(self) -> dict[str, Any] | None:
        return self.gateway if isinstance(self.gateway, dict) else {} if self.gateway else None


def read_settings(given: Mapping[str, Any]) -> EngineSettings:
    """Settings from plain data. InputError names the one at fault."""
    source = Source("settings")
    settings = sections.read(EngineSettings, given, source)
    with source.located():
        settings.engine_command()
        settings.rollout_rules(0, 1)
        settings.elastic_config()
    return settings


class EngineEventLog:
    """Writes state changes of the pool's workers with their reasons, except refits, which follow every iteration.

    A component cannot be called during a step, so the run reads this file instead. Load figures change all the time and
    are kept in a file of their own, which holds only the latest. A full disk delays lines, never the run.
    """

    def __init__(self, pool: RolloutPool, folder: Path | None, component: str) -> None:
        self._pool = pool
        self._path = None if folder is None else event_log_path(folder, component)
        self._log: AppendLog | None = None
        self._load_path = None if folder is None else load_path(folder, component)
        self._seen: dict[str, tuple[float, str]] = {}  # by worker: when, and which state
        self._load = ""
        self._load_at = float("-inf")

    def write_changes(self, last: str = "") -> None:
        """Write what is new. `last`: why all of them are gone, if they are."""
        lines: list[dict[str, Any]] = []
        now, clock = time.time(), time.monotonic()
        views = {view.worker: view for view in self._pool.workers()} if not last else {}
        for worker, view in views.items():
            since, state = self._seen.get(worker, (0.0, ""))
            for entry in self._pool.story(worker):
                if entry.at <= since:
                    continue
                since = entry.at
                if entry.reason.code in NOT_LOGGED:
                    continue
                if entry.state != state or entry.reason.code is ReasonCode.returned:
                    state = str(entry.state)
                    code, reason = entry.reason.code.value, entry.reason.sentence
                    lines.append(_line(now - clock + entry.at, worker, state, code, reason, view.running))
            self._seen[worker] = since, state
        for worker in [name for name in self._seen if name not in views]:
            del self._seen[worker]
            code = ReasonCode.completed if last else ReasonCode.by_hand
            lines.append(_line(now, worker, LEFT, code.value, last or "it was removed"))
        self._write(sorted(lines, key=lambda line: float(line["at"])))
        self._write_load(
            {} if last else {view.worker: [view.running, view.spec.limit] for view in views.values()}, clock
        )

    def write_refusal(self, worker: str, reason: str) -> None:
        for view in self._pool.workers():
            if view.worker == worker:
                self._write(
                    [_line(time.time(), worker, view.state.value, ReasonCode.refused.value, reason, view.running)]
                )

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        with contextlib.suppress(OSError):  # the run goes on without its event log
            self._log = self._log or AppendLog(self._path)
            for line in lines:
                self._log.append(json.dumps(line))

    def _write_load(self, loads: dict[str, list[int]], clock: float) -> None:
        """Replace the load figures if they changed, at most every LOAD_S."""
        text, past_s = json.dumps(loads), clock - self._load_at
        wait_s = HEARTBEAT_S if text == self._load else LOAD_S
        if self._load_path is None or (loads and past_s < wait_s):
            return
        self._load, self._load_at = text, clock
        with contextlib.suppress(OSError):
            if loads:
                write_file(self._load_path, text.encode())
            else:
                self._load_path.unlink()


def _line(at: float, worker: str, state: str, code: str, reason: str, running: int = 0) -> dict[str, Any]:
    return {
        "at": round(at, 3), "worker": worker, "state": state, "running": running, "code": code, "reason": reason
    }  # fmt: skip


class RunEnginePool(LoopThread):
    """Engines for `gpus` GPUs, and the rollout pool in front of them."""

    def __init__(self, settings: EngineSettings, place: Place, near: Path | None, weights_at: WeightsAt) -> None:
        self.settings = settings
        self.place = place
        self.gateway_url = ""
        self._near = near
        self._weights_at = weights_at
        self._command = settings.engine_command()
        self._methods: frozenset[str] = frozenset()  # of engine objects
        if settings.engine is not None:
            kind = engine_class(settings.engine, settings.engine_settings, near, "settings.engine")
            self._methods = frozenset(method for method in METHODS if callable(getattr(kind, method, None)))
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
        super().__init__(f"trimtab-{place.component}-pool", MAX_THREADS)
        try:
            if place.on_slots:
                from trimtab.runtime.client.session import connect

                self._session = connect(name=place.session or "trimtab")
            self.wait(self._begin(), ANSWER_S)
        except BaseException:
            self.close()
            raise

    # ---- from any thread -----------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TrimtabError):
            self.wait(self._end(), CLOSE_S + self.settings.stop_s)
        self.stop(ANSWER_S)
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

    def workers(self) -> list[dict[str, Any]]:
        """Each engine: name, state, running, code, reason."""

        async def workers() -> tuple[WorkerView, ...]:
            return self.pool.workers()

        return [
            {
                "name": view.worker,
                "state": view.state.value,
                "running": view.running,
                "code": view.reason.code.value,
                "reason": view.reason.sentence,
            }
            for view in self.wait(workers(), ANSWER_S)
        ]

    def pids(self) -> dict[str, int]:
        return dict(self._pids)

    @property
    def takes_weights(self) -> bool:
        return self._command is not None or {"refit", "version"} <= self._methods

    # ---- on the loop ---------------------------------------------------------------------------------------------

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
        for request in take_requests(folder, workers_queue(component)) if folder is not None else ():
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
        return ObjectLauncher(self._object_spec(), self._methods, self._place_of, self._weights_at)

    def _object_spec(self) -> EngineObjectSpec:
        settings = self.settings
        assert settings.engine is not None
        given, start_s, stop_s = settings.engine_settings, float(settings.start_s), float(settings.stop_s)
        return EngineObjectSpec(settings.engine, self._place_of(""), given, self._near, start_s, stop_s)

    def _slot_launcher(self) -> Launcher:
        from trimtab.runtime.rollout.launch.slots import SlotLauncher
        from trimtab.runtime.rollout.launch.start import DemandWatch
        from trimtab.runtime.run.engines.slot_engines import ObjectEngines

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
            engines = ObjectEngines(self._object_spec(), self._methods, self._weights_at, self._pids)
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
