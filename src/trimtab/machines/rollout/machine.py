"""Rollout machine: routes requests to workers, drains, wakes and starts workers, answers every request exactly once.

`handle(event, now)` is the only entry point. Pure: no clock, no I/O; the same events give the same instructions.

Transitions that must not exist: to ACTIVE from STALE, EMPTY or LOST without a confirmed refit (an engine that returns
with old weights would produce samples that are trained on), and back from answered. What must never happen besides: a
request lost, answered twice, or sent to a worker that is not ACTIVE and current; memory released under a running
request; a set of engines that changes during a weight sync; fewer workers than the minimum by trimtab's own action; a
wait without a reason and a deadline.

`requests`, `attempts` and `workers` hold the transitions, `health` failures and action outcomes, `refit` the weights,
`scaler` applies worker counts, `routing` chooses workers, `state` is shared by all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.core.machine import Machine, on
from trimtab.core.reasons import StoryEntry
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.attempts import AttemptEvents
from trimtab.machines.rollout.health import WorkerHealth
from trimtab.machines.rollout.policies.load import LoadSample
from trimtab.machines.rollout.records import RolloutRequest, RolloutWorker, attempt_key, request_view, worker_view
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.scaler import Scaler
from trimtab.machines.rollout.state import GLOBAL_TIMER, RolloutState
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


class RolloutMachine(Machine[RolloutState, e.RolloutEvent, e.RolloutInstruction]):
    """Workers, requests, refits and scaling."""

    EVENTS = e.RolloutEvent

    def __init__(
        self,
        rules: RolloutRules = RolloutRules(),  # noqa: B008
        elastic: ElasticConfig = STATIC,
        state: RolloutState | None = None,
    ) -> None:
        """`state` is that of a dump, with its rules."""
        if state is None:
            state = RolloutState(rules, 0.0, rules.version, rules.version, rules.min_workers, rules.max_workers)
        self._requests = RequestTransitions(state)
        self._workers = WorkerTransitions(state, self._requests)
        self._health = WorkerHealth(state, self._requests, self._workers)
        self._attempts = AttemptEvents(state, self._requests, self._workers, self._health)
        self._refits = self._workers.refits
        self._scaler = Scaler(state, self._workers, elastic)
        parts = (self._requests, self._workers, self._health, self._attempts, self._refits, self._scaler)
        super().__init__(state, state, state.out, *parts)

    @classmethod
    def load(cls, data: dict[str, Any], elastic: ElasticConfig = STATIC) -> RolloutMachine:
        """Restores a dump. The scaling settings are not in it."""
        state = decode(RolloutState, data)
        return cls(state.rules, elastic, state)

    def settle(self) -> None:
        if self.state.router.queued:
            self._requests.dispatch()
        self.state.arm_touched()

    def next_deadline(self) -> float | None:
        return self.state.timers.next()

    # ---- time ------------------------------------------------------------------------------------------------------

    @on(e.DemandSeen)
    def _on_demand_seen(self, event: e.DemandSeen) -> None:
        self.state.takers = event.takers

    @on(e.RolloutTick)
    def _on_tick(self, event: e.RolloutTick) -> None:
        state = self.state
        while (timer := state.timers.pop_due(state.now)) is not None:
            kind, name = timer
            if kind == "w":
                self._health.late(name)
            elif kind == "r":
                self._requests.late(name)
            elif kind == "s":
                self._attempts.late(name)
            else:
                self._global_timer_due()
            state.arm_touched()

    def _global_timer_due(self) -> None:
        state = self.state
        if state.refit is not None and state.refit.deadline <= state.now:
            self._refits.late()
        due = state.scaling_due()
        if due is not None and due <= state.now:
            self._scaler.evaluate()
        state.touch(*GLOBAL_TIMER)

    # ---- queries -------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(worker_view(worker) for worker in self.state.workers.values())

    def worker(self, name: str) -> WorkerView | None:
        known = self.state.workers.get(name)
        return None if known is None else worker_view(known)

    def requests(self) -> tuple[RequestView, ...]:
        return tuple(request_view(request) for request in self.state.requests.values())

    def request(self, name: str) -> RequestView | None:
        """A request, live or recently answered."""
        state = self.state
        name = state.coalesced.get(name, name)
        known = state.requests.get(name) or state.past.get(name)
        return None if known is None else request_view(known)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """State history of a worker or a request, with reasons."""
        state = self.state
        first = state.coalesced.get(name, name)
        known = state.workers.get(name) or state.requests.get(first) or state.past.get(first)
        if known is None:
            raise InputError(f"there is no request or worker {name}", hint="answered ones are remembered for a while")
        return tuple(known.story)

    def membership(self) -> Membership:
        return self._refits.next_membership()

    def open_refit(self) -> dict[str, Any] | None:
        refit = self.state.refit
        return None if refit is None else {**encode(refit), "left_s": refit.deadline - self.state.now}

    def sample(self, now: float | None = None) -> LoadSample:
        """The load as a scaling policy sees it."""
        sample = self._scaler.sample()
        return sample if now is None else replace(sample, now=now)

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def served_version(self) -> int:
        """The last version that a worker served; it differs from `version` after a refit that no worker confirmed."""
        return self.state.served_version

    @property
    def rules(self) -> RolloutRules:
        return self.state.rules

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        return tuple(self.state.steps)

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
            "total_workers": len(self.state.workers),
            "active_requests": sample.running + sample.draining,
            "pending_requests": sample.queued,
            "load_ratio": sample.load / capacity if capacity else float(sample.load > 0),
            "total_capacity": capacity,
        }

    # ---- invariants -----------------------------------------------------------------------------------------

    def check(self) -> None:
        for worker in self.state.workers.values():
            self._check_worker(worker)
        for request in self.state.requests.values():
            self._check_request(request)
        self._check_queues()
        late = self.state.timers.missing(self.state.timed())
        assert not late, f"no timer for {late}"

    def _check_worker(self, worker: RolloutWorker) -> None:
        state, name = self.state, worker.id
        lane = state.router.lanes.get(name)
        assert worker.story[-1].state == worker.state.value, f"{name}: story"
        assert worker.reason.sentence, f"{name} has no reason"
        assert (lane is not None) == worker.is_open, f"{name}: lane"
        assert worker.state is not S.active or worker.version == state.version, f"{name}: not current"
        assert worker.state is not S.active or not (worker.was_lost or worker.asleep), f"{name}: back without a refit"
        assert worker.state is not S.empty or worker.version is None, f"{name}: empty, with a version"
        assert worker.state is not S.lost or (not worker.held and worker.version is None), f"{name}: lost"
        assert (worker.state is S.draining) == (worker.drain_deadline is not None), f"{name}: drain"
        assert worker.state is not S.starting or worker.action is not None, f"{name}: starting, and nothing is done"
        if lane is not None:
            assert (lane.count, lane.load) == (len(worker.held), worker.outstanding_tokens), f"{name}: load"
        for key, sent in worker.held.items():
            assert key == attempt_key(sent.request, sent.attempt), f"{name}: {key}"
            assert state.worker_by_attempt[key] == name, f"{name}: {key}"

    def _check_request(self, request: RolloutRequest) -> None:
        state, name = self.state, request.id
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
        state = self.state
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
