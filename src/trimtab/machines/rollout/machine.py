"""Rollout machine: routes requests to workers, drains, wakes and starts workers, answers every request exactly once.

`handle(event, now)` is the only entry point. Pure: no clock, no I/O; the same events give the same instructions.

Transitions that must not exist: to ACTIVE from STALE, EMPTY or LOST without a confirmed refit (an engine that returns
with old weights would produce samples that are trained on), and back from answered. What must never happen besides: a
request lost, answered twice, or sent to a worker that is not ACTIVE and current; memory released under a running
request; a set of engines that changes during a weight sync; fewer workers than the minimum by trimtab's own action; a
wait without a reason and a deadline.

`requests` and `workers` hold the transitions, `health` and `actions` failures and action outcomes, `refit` the weights,
`scaler` applies worker counts, `routing` chooses workers, `state` is shared by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.reasons import StoryEntry
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.actions import ActionResults
from trimtab.machines.rollout.health import WorkerHealth
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.policy import Taker
from trimtab.machines.rollout.records import (
    FadingMean,
    OngoingRefit,
    RolloutCounters,
    RolloutRequest,
    RolloutWorker,
    attempt_key,
    request_view,
    worker_view,
)
from trimtab.machines.rollout.refit import RefitCoordinator
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.scaler import Scaler
from trimtab.machines.rollout.state import GLOBAL_TIMER, RolloutState, TimerKey
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    ANSWERED,
    Membership,
    RequestState,
    RequestView,
    RolloutRules,
    ScaleStep,
    WorkerState,
    WorkerView,
)

S = WorkerState
STATIC = ElasticConfig(policy="static")


class RolloutMachine:
    """Workers, requests, refits and scaling. Events in, instructions out."""

    def __init__(self, rules: RolloutRules = RolloutRules(), elastic: ElasticConfig = STATIC) -> None:  # noqa: B008
        self._state = RolloutState(rules)
        self._requests = RequestTransitions(self._state)
        self._workers = WorkerTransitions(self._state, self._requests)
        self._health = WorkerHealth(self._state, self._requests, self._workers)
        self._actions = ActionResults(self._state, self._requests, self._workers, self._health)
        self._refits = RefitCoordinator(self._state, self._requests, self._workers)
        self._scaler = Scaler(self._state, self._workers, scaling.begin(elastic))
        self._requests.on_released = self._workers.settle
        self._requests.on_response = self._health.responded
        self._requests.on_fault = self._health.fault
        self._requests.on_unresponsive = self._health.unresponsive
        self._workers.on_worker_changed = self._refits.update_quiesced
        self._workers.on_confirmed = self._refits.confirm
        self._workers.on_refit_failed = self._refits.member_failed
        self._workers.in_refit = self._refits.in_refit
        self._handlers: dict[type, Callable[[Any], None]] = {
            e.RequestArrived: self._requests.arrived,
            e.TokensStreamed: self._requests.streamed,
            e.AttemptFinished: self._requests.finished,
            e.AttemptFailed: self._requests.failed,
            e.AbortedExternally: self._requests.aborted_elsewhere,
            e.AbortDone: self._requests.abort_done,
            e.RequestCancelled: self._requests.cancelled,
            e.WorkerAdded: self._workers.added,
            e.WorkerRemoved: self._workers.removed,
            e.WorkerReclaimed: self._workers.reclaimed,
            e.WorkerReturned: self._workers.returned,
            e.WorkerUp: self._health.came_up,
            e.WorkerDied: self._health.died,
            e.WorkerUnhealthy: self._health.unhealthy,
            e.WorkerHealthy: self._health.healthy,
            e.WorkerSlept: self._health.slept,
            e.WeightsDiscarded: self._health.weights_discarded,
            e.PausedExternally: self._health.paused_elsewhere,
            e.LoadReported: self._health.load_reported,
            e.ActionDone: self._actions.action_done,
            e.ActionFailed: self._actions.action_failed,
            e.RefitBegun: self._refits.begun,
            e.RefitConfirmed: self._refits.confirmed,
            e.RefitFailed: self._refits.failed,
            e.RefitEnded: self._refits.ended,
            e.ScaleRequested: self._scaler.scale_requested,
            e.ScaleReleased: self._scaler.scale_released,
            e.HoldRequested: self._scaler.hold_requested,
            e.HoldReleased: self._scaler.hold_released,
            e.WorkerRangeSet: self._scaler.range_set,
            e.DemandSeen: self._on_demand_seen,
            e.RolloutTick: self._on_tick,
        }

    # ---- entry point ------------------------------------------------------------------------------------------------

    def handle(self, event: e.RolloutEvent, now: float) -> list[e.RolloutInstruction]:
        """Instructions for the event. Raises InputError or InfeasibleError, with nothing changed."""
        state = self._state
        before, state.counters.now = state.now, max(float(now), state.now)
        state.instructions = []
        try:
            self._handlers[type(event)](event)
        except (InputError, InfeasibleError):
            state.counters.now = before
            raise
        if state.router.queued:
            self._requests.dispatch()
        self._arm()
        return state.instructions

    def next_deadline(self) -> float | None:
        """When the next RolloutTick is due."""
        state = self._state
        while (first := state.first_timer()) is not None:
            at, timer = first
            due = self._due(timer)
            if due == at:
                return at
            state.pop_timer()
            state.arm(timer, due)
        return None

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def served_version(self) -> int:
        """The last version that a worker served; it differs from `version` after a refit that no worker confirmed."""
        return self._state.counters.served_version

    # ---- time ------------------------------------------------------------------------------------------------------

    def _on_demand_seen(self, event: e.DemandSeen) -> None:
        self._state.takers = event.takers

    def _on_tick(self, event: e.RolloutTick) -> None:
        state = self._state
        while (at := self.next_deadline()) is not None and at <= state.now:
            _, (kind, name) = state.first_timer() or (0.0, GLOBAL_TIMER)
            state.pop_timer()
            if kind == "w":
                self._actions.late(name)
            elif kind == "r":
                self._requests.request_late(name)
            elif kind == "s":
                self._requests.attempt_late(name)
            else:
                self._global_timer_due()
            self._arm()

    def _global_timer_due(self) -> None:
        state = self._state
        if state.refit is not None and state.refit.deadline <= state.now:
            self._refits.late()
        due = self._scaler.due()
        if due is not None and due <= state.now:
            self._scaler.evaluate()
        state.touch(*GLOBAL_TIMER)

    def _due(self, timer: TimerKey) -> float | None:
        kind, name = timer
        if kind == "w":
            return self._actions.due(name)
        if kind == "r":
            return self._requests.request_due(name)
        if kind == "s":
            return self._requests.attempt_due(name)
        refit = self._state.refit
        dues = (self._scaler.due(), None if refit is None else refit.deadline)
        return min((due for due in dues if due is not None), default=None)

    def _arm(self) -> None:
        state = self._state
        for timer in state.touched():
            state.arm(timer, self._due(timer))

    # ---- queries -------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(worker_view(worker, self._state.load_of(worker)) for worker in self._state.workers.values())

    def worker(self, name: str) -> WorkerView | None:
        known = self._state.workers.get(name)
        return None if known is None else worker_view(known, self._state.load_of(known))

    def requests(self) -> tuple[RequestView, ...]:
        return tuple(request_view(request) for request in self._state.requests.values())

    def request(self, name: str) -> RequestView | None:
        """A request, live or recently answered."""
        state = self._state
        name = state.coalesced.get(name, name)
        known = state.requests.get(name) or state.past.get(name)
        return None if known is None else request_view(known)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """State history of a worker or a request, with reasons."""
        state = self._state
        first = state.coalesced.get(name, name)
        known = state.workers.get(name) or state.requests.get(first) or state.past.get(first)
        if known is None:
            raise InputError(f"there is no request or worker {name}", hint="answered ones are remembered for a while")
        return tuple(known.story)

    def membership(self) -> Membership:
        """Members of the open refit; with none open, of the next one."""
        return self._refits.next_membership()

    def open_refit(self) -> dict[str, Any] | None:
        """The open refit as plain data."""
        refit = self._state.refit
        return None if refit is None else {**encode(refit), "left_s": refit.deadline - self._state.now}

    def sample(self, now: float | None = None) -> scaling.LoadSample:
        """The load as a scaling policy sees it."""
        sample = self._scaler.sample()
        return sample if now is None else replace(sample, now=now)

    @property
    def rules(self) -> RolloutRules:
        return self._state.rules

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        return tuple(self._state.steps)

    def scaling(self) -> dict[str, Any]:
        """Manual settings and the policy's last decision, as plain data."""
        return self._scaler.status()

    def metrics(self) -> dict[str, float]:
        """Gauges for monitoring; load_ratio is a share of capacity."""
        sample = self._scaler.sample()
        capacity = sample.active * sample.capacity
        return {
            "active_workers": sample.active,
            "draining_workers": sample.draining_workers,
            "total_workers": len(self._state.workers),
            "active_requests": sample.running + sample.draining,
            "pending_requests": sample.queued,
            "load_ratio": sample.load / capacity if capacity else float(sample.load > 0),
            "total_capacity": capacity,
        }

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        state, router = self._state, self._state.router
        return {
            "rules": encode(state.rules),
            "counters": encode(state.counters),
            "workers": [encode(worker) for worker in state.workers.values()],
            "requests": [encode(request) for request in state.requests.values()],
            "past": [encode(request) for request in state.past.values()],
            "keys": dict(state.keys),
            "coalesced": dict(state.coalesced),
            "refit": encode(state.refit),
            "steps": encode(state.steps),
            "takers": encode(state.takers),
            "policy": scaling.dump(self._scaler.policy_state),
            "decision": encode(self._scaler.last),
            "means": encode(router.predictor.means),
            "homes": dict(router.homes),
            "sessions": dict(router.sessions),
            "lanes": {name: [lane.placed, list(lane.groups)] for name, lane in router.lanes.items()},
        }

    @classmethod
    def load(cls, data: dict[str, Any], elastic: ElasticConfig = STATIC) -> RolloutMachine:
        """Restores a dump. The scaling settings are not in it."""
        machine = cls(decode(RolloutRules, data["rules"]), elastic)
        state, router = machine._state, machine._state.router
        state.counters = decode(RolloutCounters, data["counters"])
        state.keys, state.coalesced = dict(data["keys"]), dict(data["coalesced"])
        state.refit = None if data["refit"] is None else decode(OngoingRefit, data["refit"])
        state.steps = decode(list[ScaleStep], data["steps"])
        state.takers = decode(tuple[Taker, ...], data["takers"])
        machine._scaler.policy_state = scaling.load(data["policy"], elastic)
        decision = data.get("decision")
        machine._scaler.last = None if decision is None else decode(scaling.Decision, decision)
        router.predictor.means = decode(dict[str, dict[str, FadingMean]], data["means"])
        router.homes, router.sessions = dict(data["homes"]), dict(data.get("sessions", {}))
        state.past = {request.id: request for request in decode(list[RolloutRequest], data["past"])}
        for request in decode(list[RolloutRequest], data["requests"]):
            machine._restore_request(request)
        for worker in decode(list[RolloutWorker], data["workers"]):
            machine._restore_worker(worker)
        for name, (placed, groups) in data["lanes"].items():
            lane = router.lanes[name]
            lane.groups = dict.fromkeys(groups)
            router.restore(lane, placed)
        state.touch(*GLOBAL_TIMER)
        machine._arm()
        return machine

    def _restore_request(self, request: RolloutRequest) -> None:
        state = self._state
        state.requests[request.id] = request
        state.touch("r", request.id)
        if request.state is RequestState.queued:
            version = state.version
            if (request.spec.version or version) > version or (request.spec.at_least or version) > version:
                state.park(request)
            else:
                state.router.push(request)

    def _restore_worker(self, worker: RolloutWorker) -> None:
        state = self._state
        state.workers[worker.id] = worker
        for key in (*worker.held, *worker.zombies):
            state.worker_by_attempt[key] = worker.id
            state.touch("s", key)
        state.touch("w", worker.id)
        state.update_lane(worker)

    # ---- invariants -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError where an invariant is violated."""
        for worker in self._state.workers.values():
            self._check_worker(worker)
        for request in self._state.requests.values():
            self._check_request(request)
        self._check_queues()
        for timer in self._timed():
            due, armed = self._due(timer), self._state.armed_at(timer)
            assert due is None or (armed is not None and armed <= due), f"{timer}: no timer at {due}"

    def _timed(self) -> list[TimerKey]:
        state = self._state
        return [
            GLOBAL_TIMER,
            *(("w", name) for name in state.workers),
            *(("r", name) for name in state.requests),
            *(("s", key) for key in state.worker_by_attempt),
        ]

    def _check_worker(self, worker: RolloutWorker) -> None:
        state, name = self._state, worker.id
        lane = state.router.lanes.get(name)
        open_ = worker.state is S.active and not worker.paused and not worker.paused_elsewhere
        assert worker.story[-1].state == worker.state.value, f"{name}: story"
        assert worker.reason.sentence, f"{name} has no reason"
        assert (lane is not None) == open_, f"{name}: lane"
        assert worker.state is not S.active or worker.version == state.version, f"{name}: not current"
        assert worker.state is not S.active or not (worker.was_lost or worker.asleep), f"{name}: back without a refit"
        assert worker.state is not S.empty or worker.version is None, f"{name}: empty, with a version"
        assert worker.state is not S.lost or (not worker.held and worker.version is None), f"{name}: lost"
        assert (worker.state is S.draining) == (worker.drain_deadline is not None), f"{name}: drain"
        assert worker.state is not S.starting or worker.action is not None, f"{name}: starting, and nothing is done"
        if lane is not None:
            assert (lane.count, lane.load) == (len(worker.held), state.load_of(worker)), f"{name}: load"
        for key, sent in worker.held.items():
            assert key == attempt_key(sent.request, sent.attempt), f"{name}: {key}"
            assert state.worker_by_attempt[key] == name, f"{name}: {key}"

    def _check_request(self, request: RolloutRequest) -> None:
        state, name = self._state, request.id
        assert request.state not in ANSWERED, f"{name}: answered, and kept as open"
        assert request.recipients, f"{name}: no recipient"
        assert sum(span.tokens for span in request.spans) == request.tokens <= request.spec.max_tokens, (
            f"{name}: tokens"
        )
        assert request.story[-1].state == request.state.value, f"{name}: story"
        held = state.attempt(attempt_key(name, request.attempt))
        if request.state is RequestState.queued:
            waits = name in state.parked or name in state.router.queues[request.spec.class_].waiting
            assert waits, f"{name}: queued nowhere"
            assert not request.worker, f"{name}: queued, and on {request.worker}"
        else:
            assert held is not None, f"{name}: on no worker"
            assert state.worker_by_attempt[attempt_key(name, request.attempt)] == request.worker, f"{name}: elsewhere"

    def _check_queues(self) -> None:
        state = self._state
        waiting = [name for queue in state.router.queues.values() for name in queue.waiting]
        assert len(waiting) == state.router.queued, "queued"
        assert all(state.requests[name].state is RequestState.queued for name in (*waiting, *state.parked)), "waits"
        assert not set(waiting) & set(state.parked), "waits twice"
        assert +state.parked_by_class == Counter(request.spec.class_ for request in state.parked.values()), "parked"
        assert sum(len(worker.held) + len(worker.zombies) for worker in state.workers.values()) == len(
            state.worker_by_attempt
        ), "held"
        assert all(name in state.requests or name in state.past for name in state.keys.values()), "keys"
        assert len(state.past) <= state.rules.answers_kept, "past"
        assert not (state.router.queued and state.router.least_loaded()), "a request waits, and a worker has capacity"
