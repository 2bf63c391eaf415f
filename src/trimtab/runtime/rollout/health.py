"""Health checks of engines (state, load, and changes made by other clients) and of the pool's own tasks.

Each worker with an engine has its own check loop, so a hanging engine delays no other. An unreachable engine is
reported as unhealthy, and the machine decides when it is lost. An engine that turns out to be a new process, or to
report other weights than were confirmed, was restarted outside trimtab and does not serve until its weights are
confirmed. A check that fails for any reason counts as unhealthy: no worker stays active without checks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Hashable

from trimtab.core.errors import TrimtabError
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import ANSWERED, RequestState, WorkerState, WorkerView
from trimtab.runtime.engines.engine import EngineCapability as Offers
from trimtab.runtime.engines.engine import EngineState
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rollout.dispatcher import version_number
from trimtab.runtime.rollout.leases import EngineLeases
from trimtab.runtime.rollout.machine_loop import RolloutCore, WorkerHandle
from trimtab.runtime.rollout.worker_actions import WorkerActions

S = WorkerState
STARTING_OR_INACTIVE = (S.starting, S.inactive)
WHY = "it was instructed, but no task executes it"


class EngineHealthChecker:
    """Checks engines periodically and reports to the machine."""

    def __init__(self, core: RolloutCore, look_s: float) -> None:
        self._core = core
        self._look_s = look_s

    def begin(self, worker: str) -> None:
        handle = self._core.handles[worker]
        if handle.health_task is None or handle.health_task.done():
            handle.health_task = self._core.background.start(
                f"watch {worker}",
                functools.partial(self._check_loop, worker, handle),
                on_failed=lambda _, error: self._checks_failed(worker, handle, error),
            )

    async def _check_loop(self, worker: str, handle: WorkerHandle) -> None:
        while self._core.handles.get(worker) is handle:
            if handle.engine is not None:
                try:
                    await self.check(worker, handle)
                except Exception as error:
                    self._unhealthy(worker, handle, f"its health check failed: {describe(error)}")
                    raise
            await asyncio.sleep(self._look_s)

    def _checks_failed(self, worker: str, handle: WorkerHandle, error: Exception) -> None:
        if self._core.handles.get(worker) is handle:
            why = f"its health checks have stopped, attach it again: {describe(error)}"
            self._core.handle_event(e.WorkerUnhealthy(worker, self._core.machine.rules.lost_s, why))

    async def check(self, worker: str, handle: WorkerHandle) -> None:
        core, engine = self._core, handle.engine
        assert engine is not None
        state = await engine.ready()
        if handle.engine is not engine or core.handles.get(worker) is not handle:
            return
        handle.state, before = state, handle.reported
        handle.reported = state.version
        view = core.machine.worker(worker)
        if view is None or view.doing is not None:
            return  # its state is changing because of that action
        if state.up or state.paused or state.asleep:
            await self._on_state(worker, handle, state, view, before)
        else:
            self._unhealthy(worker, handle, state.why)

    async def _on_state(
        self, worker: str, handle: WorkerHandle, state: EngineState, view: WorkerView, before: str | None
    ) -> None:
        core = self._core
        handle.unhealthy_since = None
        if self._restarted(handle, state, view, before):
            handle.boots = state.boots
            core.handle_event(e.WorkerUp(worker, version_number(state.version)))
            return
        if state.asleep and state.elsewhere and not view.asleep and view.state not in STARTING_OR_INACTIVE:
            # The level is unknown, so its weights count as gone.
            core.handle_event(e.WorkerSlept(worker, keeps_weights=False))
            return
        if state.up and view.asleep and view.state is S.inactive:
            core.handle_event(e.WorkerUp(worker, version_number(state.version), restarted=False))
            return
        if view.state is not S.inactive and (view.paused_elsewhere or not view.paused):
            core.handle_event(e.PausedExternally(worker, state.paused and state.elsewhere and not state.asleep))
        core.handle_event(e.WorkerHealthy(worker))
        await self._load(worker, handle)

    def _restarted(self, handle: WorkerHandle, state: EngineState, view: WorkerView, before: str | None) -> bool:
        if view.state is S.lost or state.boots != handle.boots:
            return True
        offered = handle.engine is not None and Offers.version in handle.engine.capabilities
        if not offered or state.version is None or view.version is None or view.state not in (S.active, S.draining):
            return False
        reported = version_number(state.version)
        if reported is None:  # a name, as new processes report it
            return before != state.version and version_number(before) == view.version
        return reported != view.version

    async def _load(self, worker: str, handle: WorkerHandle) -> None:
        engine = handle.engine
        assert engine is not None
        try:
            load = await engine.load()
        except TrimtabError:
            return  # the next check decides about its health
        if load.fresh and handle.engine is engine and worker in self._core.handles:
            before, handle.load = handle.load, load
            generates = load.progress is not None and (before is None or load.progress != before.progress)
            self._core.handle_event(
                e.LoadReported(worker, load.running, load.waiting, load.kv_used_share or 0.0, load.at, generates)
            )

    def _unhealthy(self, worker: str, handle: WorkerHandle, why: str) -> None:
        now = self._core.clock()
        if handle.unhealthy_since is None:
            handle.unhealthy_since = now
        self._core.handle_event(e.WorkerUnhealthy(worker, now - handle.unhealthy_since, why))


class RolloutReconciler:
    """Compares the machine's state with the running tasks of a pool at intervals.

    Something that the machine waits for and no task executes would be awaited until a deadline, or for ever: an attempt
    that was never started, an action without a task, a client whose request the machine does not know. Each is failed
    with that reason, and the machine decides how to go on. It is failed only if two checks in a row find it, because a
    task may start or end just between an instruction and its event.
    """

    def __init__(self, core: RolloutCore, every_s: float, actions: WorkerActions, leases: EngineLeases) -> None:
        self._core, self._every_s, self._actions, self._leases = core, every_s, actions, leases
        self._seen: set[Hashable] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self.check()

    def check(self) -> None:
        missing = self._missing()
        again = [outcome for key, outcome in missing.items() if key in self._seen]
        self._seen = set(missing)
        for outcome in again:
            self._core.counters["reconciled"] += 1
            outcome()

    def _missing(self) -> dict[Hashable, Callable[[], None]]:
        core, found = self._core, dict[Hashable, Callable[[], None]]()
        for request in core.machine.requests():
            name, attempt = request.request, request.attempt
            if (name, attempt) in core.attempts or self._leases.is_lease(name):
                continue
            if request.state in (RequestState.sent, RequestState.streaming):
                found[name, attempt] = self._report(e.AttemptFailed(name, attempt, 0, WHY))
            elif request.state is RequestState.moving:
                found[name, attempt] = self._report(e.AbortDone(name, attempt, 0))
        for worker in core.machine.workers():
            action = core.last_actions.get(worker.worker)
            if action is not None and worker.doing is action.verb and not self._actions.is_busy(action.worker):
                failed = e.ActionFailed(action.worker, action.attempt, WHY)
                found[action.worker, action.attempt, action.verb] = self._report(failed)
        for name, pending in core.pending.items():
            view = core.machine.request(name)
            if not pending.answered.done() and (view is None or view.state in ANSWERED):
                found[name] = functools.partial(core.fail_client, name, "its answer was lost")
        return found

    def _report(self, event: e.RolloutEvent) -> Callable[[], None]:
        return functools.partial(self._core.handle_event, event)
