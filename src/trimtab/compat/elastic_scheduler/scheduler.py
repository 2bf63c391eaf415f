"""`ElasticScheduler`: a trainer's own worker group behind the rollout machine.

All decisions are made by `trimtab.machines.rollout.machine`; its instructions are executed on the worker group here,
and the outcomes go back as events. Requests are ids: the trainer asks here for the worker of a request, sends it
itself, and reports its completion.

What must never happen: a worker flushed while it has a request, by the machine's state or by its own status; a drain, a
flush or a wake that goes on after `stop`; a status that could not be read taken for an idle worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import replace
from typing import Any, get_args

from trimtab.compat.elastic_scheduler.worker_group import NotIdleError, WorkerGroupCalls, WorkerId, WorkerStatus
from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError, meant
from trimtab.core.numbers import SHORTEST_S, Range
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState, ScalingPolicy, Taker
from trimtab.machines.rollout.policies.policy import policy_of
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    End,
    Owner,
    Ownership,
    RequestClass,
    RequestSpec,
    RequestState,
    RolloutRules,
    ScaleStep,
    WorkerSpec,
    WorkerState,
    WorkerVerb,
    WorkerView,
)
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, describe
from trimtab.runtime.rollout.machine_loop import RolloutCore

__all__ = ["ElasticConfig", "ElasticScheduler", "Placement", "Taker"]

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
MAX_CALL_S = 1e6
MAX_QUEUED = 1_000_000
NEVER_S = 1e9  # tokens of a request are not seen here, so there is no stall detection
MIN_WAIT_S = 0.005
FRESH_INTERVALS = 2.5  # a status is valid for this many intervals, unless the next one fails
FAULTS_KEPT = 100
COMPLETED_KEPT = 1_000
LOST_AFTER = 3  # statuses in a row without a worker until it counts as lost
HOLD = "wake_up_all_workers"
STOPPED = "stop"
VERSION = 0  # weights are between trainer and group; to the machine they never change


class Placement:
    """The worker of a request: await it, or read `worker`, which is None while the request waits."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.worker: WorkerId | None = None
        self.error: TrimtabError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def __await__(self) -> Generator[Any, None, WorkerId]:
        while self.worker is None and self.error is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            yield from future
        if self.error is not None:
            raise self.error
        assert self.worker is not None
        return self.worker

    def settle(self, worker: WorkerId | None, error: TrimtabError | None = None) -> None:
        """Set the worker or the error, and wake those that await it."""
        self.worker, self.error = worker, error
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class RequestCompletion:
    """Whether the request was open. Known at once; may be awaited too."""

    def __init__(self, was_open: bool) -> None:
        self.was_open = was_open

    def __bool__(self) -> bool:
        return self.was_open

    def __await__(self) -> Generator[Any, None, bool]:
        yield from ()
        return self.was_open


class ElasticScheduler:
    """Routes requests to the workers of a group, and scales the number of active workers with the load."""

    def __init__(
        self,
        config: ElasticConfig | Mapping[str, Any],
        worker_group: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        call_timeout_s: float = CALL_TIMEOUT_S,
        lost_after: int = LOST_AFTER,
        on_moved: Callable[[str, WorkerId], None] | None = None,
    ) -> None:
        """`on_moved(request_id, worker)` is called when a request that was sent must be sent again, to that worker."""
        self.config = config if isinstance(config, ElasticConfig) else ElasticConfig.from_mapping(config)
        Range(SHORTEST_S, MAX_CALL_S).check("call_timeout_s", call_timeout_s, "ElasticScheduler")
        Range(1, 1_000, whole=True).check("lost_after", lost_after, "ElasticScheduler")
        self.worker_group = worker_group
        self.faults: list[str] = []  # the last faults, oldest first
        self._clock = clock
        self._calls = WorkerGroupCalls(worker_group, call_timeout_s)
        self._lost_after, self._on_moved = lost_after, on_moved
        self._load_known = True  # False: the last status failed, or left out a worker that is not lost
        self._missing: Counter[str] = Counter()  # statuses in a row that left a worker out
        self._machine = RolloutMachine(_rules(self.config, self._calls), replace(self.config, policy=self._policy()))
        self.background = Background(prefix="elastic-scheduler")
        self._core = RolloutCore(self._machine, clock, background=self.background, closing=True)
        self._core.handlers = dict.fromkeys(get_args(e.RolloutInstruction), _ignore) | {
            e.SendRequest: self._send,
            e.AbortAttempt: lambda abort: self._spawn(f"abort {abort.request}", lambda: self._abort(abort)),
            e.WorkerAction: lambda act: self._spawn(f"{act.verb.value} {act.worker}", lambda: self._act(act)),
            e.AnswerRequest: self._answered,
            e.RefuseRequest: self._refused,
            e.AnnounceScaleStep: lambda scaled: log.info("workers: %s", scaled.step.reason),
            e.Warn: lambda warning: self._record_fault(f"worker {warning.worker}: {warning.reason}"),
        }
        self._core.listeners.append(self._on_event)
        self._handle = self._core.handle_event
        self._ids: dict[str, WorkerId] = {}  # by the machine's name
        self._added = 0
        self._open: dict[str, str] = {}  # by id: the machine's name of an open request
        self._placements: dict[str, Placement] = {}  # by that name
        self._completed: dict[str, None] = {}  # ids completed recently, oldest first
        self._actions: dict[asyncio.Task[None], str] = {}
        self._postponed: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []  # no event loop was running yet
        self._loops: list[asyncio.Task[None]] = []
        self._unflushed: set[str] = set()  # workers that are or will be inactive and still have their memory
        self._locks: dict[str, asyncio.Lock] = {}
        self._late_drains: set[str] = set()  # workers whose late drain was reported
        for worker in self._calls.workers or ():
            self._join(worker)

    def _policy(self) -> ScalingPolicy:
        """The configured policy, with what is known only here.

        After a failed status the load figures are stale; and inactive workers already serve the takers.
        """
        policy = policy_of(self.config)

        def decide(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
            takers = _unmet(sample.takers, sample.ready_to_wake + sample.draining_workers)
            return policy(state, replace(sample, takers=takers, fresh=sample.fresh and self._load_known))

        decide.__name__ = getattr(policy, "__name__", "policy")
        return decide

    # ---- start and stop ------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self._core.closing

    async def start(self) -> None:
        """Start monitoring the load. UnreachableError if the group does not say which workers it has."""
        if self.is_running:
            return
        for warning in self.config.warnings():
            log.warning("elastic_config: %s", warning)
        if self._calls.has_status:
            await self._first_status()
        if self.is_running:  # started concurrently
            return
        self._core.closing = False
        self._handle(e.RolloutTick())
        if self._calls.has_status:
            self._loops = [self.background.start("load", self._load_loop, policy=NEVER_GIVE_UP)]
        postponed, self._postponed = self._postponed, []
        for name, action in postponed:
            self._spawn(name, action)

    async def stop(self) -> None:
        """Stop. Draining workers serve again; running calls are awaited, with a deadline."""
        self._core.stop_timer()
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        end = self._clock() + self._calls.timeout_s + 1.0
        self._resume_draining()
        while self._actions and self._clock() < end:
            await asyncio.wait(list(self._actions), timeout=end - self._clock())
            self._resume_draining()
        left = list(self._actions)
        for action in left:
            action.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _resume_draining(self) -> None:
        """Let draining workers serve again, without waking others; a flush under way is left to end."""
        draining = [view for view in self._workers(WorkerState.draining) if view.doing is None]
        if draining:
            self._handle(e.HoldRequested(STOPPED, self._machine.sample().serving + len(draining)))
            self._handle(e.HoldReleased(STOPPED))

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str) -> Placement:
        """Add a request. Await the answer for its worker, once there is capacity."""
        if request_id in self._open:
            raise InputError(f"there is a request {request_id} already", hint="complete it first, or use another id")
        self._added += 1
        name = f"{request_id}@{self._added}"  # an id may come again, a name never does
        placement = self._placements[name] = Placement(request_id)
        self._open[request_id] = name
        self._handle(e.RequestArrived(RequestSpec(name, prompt_tokens=0, max_tokens=1)))
        if placement.error is not None:
            raise placement.error
        return placement

    def complete_request(self, request_id: str) -> RequestCompletion:
        """The request is finished or given up, and its slot is free. False if that was known already."""
        name = self._open.get(request_id)
        if name is None:
            if request_id in self._completed:
                return RequestCompletion(False)
            raise InputError(f"there is no request {request_id}", hint=meant(request_id, self._open))
        view = self._machine.request(name)
        assert view is not None
        if view.state is RequestState.queued:
            self._handle(e.RequestCancelled(name, "it was completed while it waited"))
        else:
            self._handle(e.AttemptFinished(name, view.attempt, 1, End.stop))
        return RequestCompletion(True)

    def worker_of(self, request_id: str) -> WorkerId | None:
        """The current worker of the request; None: it waits, or is finished."""
        name = self._open.get(request_id)
        view = None if name is None else self._machine.request(name)
        if name is None or view is None or view.state is RequestState.queued:
            return None
        return self._placements[name].worker

    # ---- how many ------------------------------------------------------------------------------------------------

    async def wake_up_all_workers(self) -> None:
        """Wake all workers, up to `max_workers`, until `resume_elastic_scheduling`.

        UnreachableError if one does not serve in time; the others serve.
        """
        wanted = min(len(self._machine.workers()), self.config.max_workers)
        self._handle(e.HoldRequested(HOLD, wanted))
        within_s = 3 * self._calls.timeout_s
        if not await self._core.until(lambda: len(self._workers(WorkerState.active)) >= wanted, within_s):
            others = [view for view in self._machine.workers() if view.state is not WorkerState.active]
            states = "; ".join(f"{view.worker} is {view.state.value} ({view.reason.sentence})" for view in others[:3])
            raise UnreachableError(f"{len(others)} workers do not serve: {states}", where="worker_group")

    async def resume_elastic_scheduling(self) -> None:
        """Let the policy decide again."""
        self._handle(e.HoldReleased(HOLD))

    def set_takers(self, *takers: Taker) -> None:
        """Set the demand for released workers: how many in all, and for how long."""
        self._handle(e.DemandSeen(takers))

    # ---- workers and metrics -------------------------------------------------------------------------------------

    def worker_lost(self, worker: WorkerId, why: str = "reported lost") -> None:
        """The worker is gone: nothing is sent to it, its requests go to others, and the others go on scaling.

        It is used again once `get_worker_status` names it.
        """
        name = str(worker)
        if name not in self._ids:
            raise InputError(f"there is no worker {worker}", hint=meant(name, self._ids))
        self._missing[name] = max(self._missing[name], self._lost_after)
        self._unflushed.discard(name)
        if not any(view.worker == name for view in self._workers(WorkerState.lost)):
            self._record_fault(f"worker {name} is lost: {why}; its requests go to others")
            self._handle(e.WorkerDied(name, why))

    def workers(self) -> tuple[WorkerView, ...]:
        """Each worker with its state, why it has it, and its requests."""
        return tuple(self._machine.workers())

    def get_metrics(self) -> dict[str, Any]:
        """Workers, requests and load. Load is waiting and running requests, on draining workers too."""
        return dict(self._machine.metrics())

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        """The last scale steps, oldest first: reason, expectation, and whether it came true."""
        return self._machine.steps

    def _workers(self, *states: WorkerState) -> list[WorkerView]:
        return [view for view in self._machine.workers() if view.state in states]

    # ---- events and instructions ---------------------------------------------------------------------------------

    def _on_event(self, what: object, now: float) -> None:
        if isinstance(what, e.RolloutTick):
            self._report_late_drains()

    def _refused(self, refused: e.RefuseRequest) -> None:
        placement = self._ended(refused.request)
        placement.settle(None, InfeasibleError(f"request {placement.request}: {refused.reason.sentence}"))

    def _send(self, send: e.SendRequest) -> None:
        worker = self._ids[send.worker]
        placement = self._placements[send.request]
        moves = placement.worker is not None
        if moves:
            log.info("request %s moves from worker %s to %s", placement.request, placement.worker, worker)
        if self._calls.is_told:
            self._spawn(f"assign {send.request}", lambda: self._assign(send))
        else:
            placement.settle(worker)
            if moves and self._on_moved is not None:
                self._on_moved(placement.request, worker)

    async def _assign(self, send: e.SendRequest) -> None:
        worker = self._ids[send.worker]
        async with self._lock(f"request {send.request}"):
            if not self._is_current(send):
                return  # completed or moved before it was assigned
            try:
                await self._calls.assign(_request_id(send.request), worker)
            except UnreachableError as error:
                self._handle(e.AttemptFailed(send.request, send.attempt, 0, error.what))
                return
            if self._is_current(send):
                self._placements[send.request].settle(worker)
            elif self._calls.can_abort:
                with contextlib.suppress(UnreachableError):
                    await self._calls.abort(_request_id(send.request), worker)

    def _is_current(self, send: e.SendRequest) -> bool:
        view = self._machine.request(send.request)
        return view is not None and (view.attempt, view.worker) == (send.attempt, send.worker)

    async def _abort(self, abort: e.AbortAttempt) -> None:
        if not self._calls.can_abort:
            return
        try:
            async with self._lock(f"request {abort.request}"):  # not before it is assigned
                await self._calls.abort(_request_id(abort.request), self._ids[abort.worker])
        except UnreachableError as error:
            self._record_fault(error.what)  # the machine's own deadline decides what follows
            return
        self._handle(e.AbortDone(abort.request, abort.attempt, 0))

    def _answered(self, answer: e.AnswerRequest) -> None:
        placement = self._ended(answer.request)
        if answer.end is End.failed:
            error = UnreachableError(f"request {placement.request}: {answer.reason.sentence}")
            placement.settle(None, error)
            self._record_fault(error.what)
        elif placement.worker is None:
            placement.settle(None, InputError(f"request {placement.request} was completed before it was sent"))

    def _ended(self, name: str) -> Placement:
        """Remove a request that is not open any more."""
        placement = self._placements.pop(name)
        del self._open[placement.request]
        self._locks.pop(f"request {name}", None)
        self._completed.pop(placement.request, None)
        self._completed[placement.request] = None
        if len(self._completed) > COMPLETED_KEPT:
            del self._completed[next(iter(self._completed))]
        return placement

    async def _act(self, act: e.WorkerAction) -> None:
        worker = self._ids[act.worker]
        try:
            async with self._lock(act.worker):
                if act.verb is WorkerVerb.sleep:
                    await self._flush_when_idle(act.worker, act.deadline)
                elif act.verb in (WorkerVerb.wake, WorkerVerb.start):
                    if act.worker not in self._unflushed:  # a worker that was not flushed still has its memory
                        await self._calls.resume(worker)
                    self._unflushed.discard(act.worker)
                elif act.verb is WorkerVerb.probe:
                    await self._calls.status()
                else:
                    raise UnreachableError(f"a worker group has no {act.verb.value}")
        except UnreachableError as error:
            self._record_fault(error.what)
            self._handle(e.ActionFailed(act.worker, act.attempt, error.what))
            return
        self._handle(e.ActionDone(act.worker, act.attempt, VERSION))
        self._confirm_version(act.worker)

    async def _flush_when_idle(self, name: str, deadline: float) -> None:
        """Flush a worker once it reports idle, before the deadline; after it `_poll_status` does."""
        self._unflushed.add(name)
        while True:
            try:
                await self._calls.flush(self._ids[name])
            except NotIdleError:
                left_s = deadline - self._clock() - 2 * self._calls.timeout_s
                if left_s <= 0 or not self.is_running:
                    raise
                await asyncio.sleep(min(self.config.monitoring_interval, left_s))
                continue
            except UnreachableError:
                self._unflushed.discard(name)  # unknown: its memory is resumed before it serves
                raise
            self._unflushed.discard(name)
            return

    async def _flush_late(self, name: str) -> None:
        async with self._lock(name):
            off = [view.worker for view in self._workers(WorkerState.inactive)]
            if name in self._unflushed and name in off:
                with contextlib.suppress(UnreachableError):
                    await self._calls.flush(self._ids[name])
                    self._unflushed.discard(name)

    def _lock(self, name: str) -> asyncio.Lock:
        """One call at a time for a worker or a request."""
        return self._locks.setdefault(name, asyncio.Lock())

    def _confirm_version(self, name: str) -> None:
        """Weights are between trainer and group: a worker of it always has the right version."""
        if any(view.worker == name for view in self._workers(WorkerState.stale, WorkerState.empty)):
            self._handle(e.RefitConfirmed(name, VERSION))

    # ---- time and status -----------------------------------------------------------------------------------------

    def _report_late_drains(self) -> None:
        """Without `abort_request` a drain continues past its timeout; reported once each."""
        draining = {view.worker: view for view in self._workers(WorkerState.draining)}
        self._late_drains &= draining.keys()
        if self._calls.can_abort:
            return
        for name, view in draining.items():
            is_late = (
                view.running and view.doing is None and view.deadline is not None and view.deadline <= self._clock()
            )
            if is_late and name not in self._late_drains:
                self._late_drains.add(name)
                self._record_fault(
                    f"worker {name} drains for longer than {self.config.drain_timeout:g} s: it has {view.running} "
                    "requests, and the group has no abort_request"
                )

    async def _load_loop(self) -> None:
        while True:
            began = self._clock()
            try:
                await self._poll_status()
            except Exception as fault:
                self._record_fault(f"the load loop failed and restarts: {describe(fault)}")
                raise
            await asyncio.sleep(max(self.config.monitoring_interval - (self._clock() - began), MIN_WAIT_S))

    async def _first_status(self) -> None:
        """Find the workers if the group has no `world_size`; which of them are inactive; their load."""
        if self._ids:
            statuses = await self._poll_status()
        else:
            statuses = await self._calls.status()
            if not statuses:
                raise UnreachableError("get_worker_status names no worker", where="worker_group")
            for worker in statuses:
                self._join(worker)
        for worker, status in (statuses or {}).items():
            if status.status == "inactive" and str(worker) in self._ids:
                self._handle(e.WorkerSlept(str(worker)))
                for view in self._machine.requests():
                    if view.worker == str(worker):
                        self._handle(e.AttemptFailed(view.request, view.attempt, 0, f"worker {worker} was off"))

    async def _poll_status(self) -> dict[WorkerId, WorkerStatus] | None:
        """Read the status once. A failure is reported and changes nothing."""
        try:
            statuses = await self._calls.status()
        except UnreachableError as error:
            self._load_known = False
            self._record_fault(f"{error.what}; the load is unknown, so nothing is scaled")
            return None
        self._look_for_lost(statuses)
        for worker, status in statuses.items():
            if str(worker) in self._ids:
                self._handle(e.LoadReported(str(worker), status.active_requests, 0, 0.0, self._clock()))
        for name in self._unflushed & {
            str(worker) for worker, status in statuses.items() if not status.active_requests
        }:
            if not self._lock(name).locked():
                self._spawn(f"late flush of {name}", functools.partial(self._flush_late, name))
        return statuses

    def _look_for_lost(self, statuses: Mapping[WorkerId, WorkerStatus]) -> None:
        """A worker left out of several statuses in a row is lost; a status that names no worker says nothing."""
        missing = [name for name, worker in self._ids.items() if worker not in statuses]
        lost = {view.worker for view in self._workers(WorkerState.lost)}
        unknown = [name for name in missing if name not in lost]
        self._load_known = not unknown
        if unknown:
            self._record_fault(f"get_worker_status says nothing of worker {', '.join(unknown[:8])}")
        if len(missing) == len(self._ids):
            return
        self._missing = Counter({name: self._missing[name] + 1 for name in missing})
        for name in unknown:
            if self._missing[name] >= self._lost_after:
                self.worker_lost(self._ids[name], f"get_worker_status left it out {self._missing[name]} times in a row")
        for name in sorted(lost - set(missing)):
            self._handle(e.WorkerUp(name, VERSION))
            if statuses[self._ids[name]].status == "inactive":
                self._handle(e.WorkerSlept(name))
            self._confirm_version(name)

    def _join(self, worker: WorkerId) -> None:
        name = str(worker)
        self._ids[name] = worker
        spec = WorkerSpec(name, limit=self.config.requests_per_worker_capacity)
        self._handle(e.WorkerAdded(spec, up=True, version=VERSION))

    def _record_fault(self, sentence: str) -> None:
        if self.faults and self.faults[-1] == sentence:  # repeated
            log.debug("%s", sentence)
            return
        log.warning("%s", sentence)
        self.faults = [*self.faults[1 - FAULTS_KEPT :], sentence]

    def _spawn(self, name: str, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._postponed.append((name, action))
            return
        task = self.background.once(name, action())
        self._actions[task] = name
        task.add_done_callback(self._actions.pop)


def _unmet(takers: tuple[Taker, ...], given: int) -> tuple[Taker, ...]:
    """Demand left after `given` workers; takers with the longest use are served first."""
    unmet = []
    for taker in sorted(takers, key=lambda taker: -taker.use_s):
        has = min(taker.workers, given)
        given -= has
        unmet.append(replace(taker, workers=taker.workers - has))
    return tuple(unmet)


def _ignore(instruction: object) -> None:
    """Refits are between the trainer and the group."""


def _request_id(name: str) -> str:
    """The id of a request, from the machine's name of it."""
    return name.rpartition("@")[0]


def _rules(config: ElasticConfig, calls: WorkerGroupCalls) -> RolloutRules:
    """The machine's rules for these settings."""
    call_s = calls.timeout_s + 1.0  # the machine's deadline comes after the call's own
    return RolloutRules.of(
        config,
        version=VERSION,
        classes=(RequestClass(queue_limit=MAX_QUEUED),),
        ownership=Ownership(abort=Owner.trimtab if calls.can_abort else Owner.trainer),
        abort_s=call_s,
        stall_s=NEVER_S,
        wake_s=call_s,
        sleep_s=config.drain_timeout + 3 * call_s,
        probe_s=call_s,
        load_fresh_s=FRESH_INTERVALS * config.monitoring_interval,
    )
