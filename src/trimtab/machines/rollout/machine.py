"""Rollout workers and requests: who serves what, who drains, wakes and starts, and that every request is answered once.

`handle(event, now)` is the one door: it looks at no clock and asks nobody, and the same events give the same
instructions. It is called by whoever talks to engines, clients and the trainer.

The transitions that must not exist are those to ACTIVE from STALE, EMPTY or LOST without a confirmed refit: an engine
that returns with old weights would answer as if nothing had happened, and the samples would be trained on. Nor is there
a way back from answered. What must never happen besides: a request lost, answered twice, or sent to a worker that is
not ACTIVE and current; memory released under a running request; a set of engines that changes during a weight sync;
fewer workers than the least by trimtab's own doing; a wait without a reason and a deadline.

The rooms: `rollout_requests` and `rollout_workers` have the lives, `rollout_trouble` and `rollout_acts` what goes wrong
and what comes of things done, `rollout_refit` the weights, `rollout_scaling` carries out how many, `routing` chooses,
`rollout_books` remembers.
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
    held_key,
    request_view,
    worker_view,
)
from trimtab.machines.rollout.refit import RefitCoordinator
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.scaler import Scaler
from trimtab.machines.rollout.state import EVERYBODY, RolloutState, TimerKey
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
        self._books = RolloutState(rules)
        self._requests = RequestTransitions(self._books)
        self._workers = WorkerTransitions(self._books, self._requests)
        self._trouble = WorkerHealth(self._books, self._requests, self._workers)
        self._acts = ActionResults(self._books, self._requests, self._workers, self._trouble)
        self._refits = RefitCoordinator(self._books, self._requests, self._workers)
        self._scaler = Scaler(self._books, self._workers, scaling.begin(elastic))
        self._requests.on_released = self._workers.settle
        self._requests.on_heard = self._trouble.heard
        self._requests.on_fault = self._trouble.fault
        self._requests.on_deaf = self._trouble.deaf
        self._workers.on_quieter = self._refits.quieter
        self._workers.on_confirmed = self._refits.vouched
        self._workers.on_refit_failed = self._refits.not_got
        self._workers.in_refit = self._refits.in_refit
        self._doors: dict[type, Callable[[Any], None]] = {
            e.RequestArrived: self._requests.arrived,
            e.TokensStreamed: self._requests.streamed,
            e.AttemptFinished: self._requests.finished,
            e.AttemptFailed: self._requests.broke,
            e.AbortedExternally: self._requests.aborted_elsewhere,
            e.AbortDone: self._requests.abort_done,
            e.RequestCancelled: self._requests.cancelled,
            e.WorkerAdded: self._workers.added,
            e.WorkerRemoved: self._workers.removed,
            e.WorkerReclaimed: self._workers.taken,
            e.WorkerReturned: self._workers.given,
            e.WorkerUp: self._trouble.came_up,
            e.WorkerDied: self._trouble.died,
            e.WorkerUnhealthy: self._trouble.unwell,
            e.WorkerHealthy: self._trouble.well,
            e.WorkerSlept: self._trouble.slept,
            e.WeightsDiscarded: self._trouble.emptied,
            e.PausedExternally: self._trouble.paused_elsewhere,
            e.LoadReported: self._trouble.load_seen,
            e.ActionDone: self._acts.act_done,
            e.ActionFailed: self._acts.act_failed,
            e.RefitBegun: self._refits.begun,
            e.RefitConfirmed: self._refits.confirmed,
            e.RefitFailed: self._refits.failed,
            e.RefitEnded: self._refits.ended,
            e.ScaleRequested: self._scaler.scaled,
            e.ScaleReleased: self._scaler.released,
            e.HoldRequested: self._scaler.held,
            e.HoldReleased: self._scaler.unheld,
            e.WorkerRangeSet: self._scaler.range_set,
            e.DemandSeen: self._on_takers_seen,
            e.RolloutTick: self._on_tick,
        }

    # ---- the door --------------------------------------------------------------------------------------------------

    def handle(self, event: e.RolloutEvent, now: float) -> list[e.RolloutInstruction]:
        """What is to be done about the event. Raises InputError or InfeasibleError, with nothing changed."""
        books = self._books
        before, books.rest.now = books.rest.now, max(float(now), books.rest.now)
        books.out = []
        try:
            self._doors[type(event)](event)
        except (InputError, InfeasibleError):
            books.rest.now = before
            raise
        if books.router.queued:
            self._requests.dispatch()
        self._arm()
        return books.out

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        books = self._books
        while (first := books.first_timer()) is not None:
            at, timer = first
            due = self._due(timer)
            if due == at:
                return at
            books.pop_timer()
            books.arm(timer, due)
        return None

    @property
    def version(self) -> int:
        """Of the trainer's weights."""
        return self._books.rest.version

    # ---- time ------------------------------------------------------------------------------------------------------

    def _on_takers_seen(self, event: e.DemandSeen) -> None:
        self._books.takers = event.takers

    def _on_tick(self, event: e.RolloutTick) -> None:
        books = self._books
        while (at := self.next_deadline()) is not None and at <= books.rest.now:
            _, (kind, name) = books.first_timer() or (0.0, EVERYBODY)
            books.pop_timer()
            if kind == "w":
                self._acts.late(name)
            elif kind == "r":
                self._requests.request_late(name)
            elif kind == "s":
                self._requests.attempt_late(name)
            else:
                self._everybody_late()
            self._arm()

    def _everybody_late(self) -> None:
        books = self._books
        if books.refit is not None and books.refit.deadline <= books.rest.now:
            self._refits.late()
        due = self._scaler.due()
        if due is not None and due <= books.rest.now:
            self._scaler.look()
        books.touch(*EVERYBODY)

    def _due(self, timer: TimerKey) -> float | None:
        kind, name = timer
        if kind == "w":
            return self._acts.due(name)
        if kind == "r":
            return self._requests.request_due(name)
        if kind == "s":
            return self._requests.attempt_due(name)
        refit = self._books.refit
        dues = (self._scaler.due(), None if refit is None else refit.deadline)
        return min((one for one in dues if one is not None), default=None)

    def _arm(self) -> None:
        books = self._books
        for timer in books.touched():
            books.arm(timer, self._due(timer))

    # ---- questions -------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerView, ...]:
        """All workers, in order of joining."""
        return tuple(worker_view(one, self._books.load_of(one)) for one in self._books.workers.values())

    def worker(self, name: str) -> WorkerView | None:
        """One worker."""
        known = self._books.workers.get(name)
        return None if known is None else worker_view(known, self._books.load_of(known))

    def requests(self) -> tuple[RequestView, ...]:
        """All requests that are not answered, in order of arrival."""
        return tuple(request_view(one) for one in self._books.requests.values())

    def request(self, name: str) -> RequestView | None:
        """One request; answered ones as long as they are remembered."""
        books = self._books
        name = books.joined.get(name, name)
        known = books.requests.get(name) or books.past.get(name)
        return None if known is None else request_view(known)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """What became of a worker or a request, and why."""
        books = self._books
        first = books.joined.get(name, name)
        known = books.workers.get(name) or books.requests.get(first) or books.past.get(first)
        if known is None:
            raise InputError(f"there is no request or worker {name}", hint="answered ones are remembered for a while")
        return tuple(known.story)

    def membership(self) -> Membership:
        """Who takes part in the open refit; with none open, who would in the next."""
        return self._refits.offered()

    def open_refit(self) -> dict[str, Any] | None:
        """The refit that is open, as plain data."""
        refit = self._books.refit
        return None if refit is None else {**encode(refit), "left_s": refit.deadline - self._books.rest.now}

    def sample(self, now: float | None = None) -> scaling.LoadSample:
        """The load as a scaling policy would see it."""
        sample = self._scaler.sample()
        return sample if now is None else replace(sample, now=now)

    @property
    def rules(self) -> RolloutRules:
        """As given."""
        return self._books.rules

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        """The last changes of the number of workers."""
        return tuple(self._books.steps)

    def scaling(self) -> dict[str, Any]:
        """What people asked for, and what the policy decided last, as plain data."""
        return self._scaler.said()

    def metrics(self) -> dict[str, float]:
        """The figures that a monitor wants: workers, requests, load as a share of capacity."""
        sample = self._scaler.sample()
        capacity = sample.active * sample.capacity
        return {
            "active_workers": sample.active,
            "draining_workers": sample.draining_workers,
            "total_workers": len(self._books.workers),
            "active_requests": sample.running + sample.draining,
            "pending_requests": sample.queued,
            "load_ratio": sample.load / capacity if capacity else float(sample.load > 0),
            "total_capacity": capacity,
        }

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """All that is remembered, as plain data."""
        books, router = self._books, self._books.router
        return {
            "rules": encode(books.rules),
            "rest": encode(books.rest),
            "workers": [encode(one) for one in books.workers.values()],
            "requests": [encode(one) for one in books.requests.values()],
            "past": [encode(one) for one in books.past.values()],
            "keys": dict(books.keys),
            "joined": dict(books.joined),
            "refit": encode(books.refit),
            "steps": encode(books.steps),
            "takers": encode(books.takers),
            "policy": scaling.dump(self._scaler.state),
            "decision": encode(self._scaler.last),
            "means": encode(router.predictor.means),
            "homes": dict(router.homes),
            "lanes": {name: [one.placed, list(one.groups)] for name, one in router.lanes.items()},
        }

    @classmethod
    def load(cls, data: dict[str, Any], elastic: ElasticConfig = STATIC) -> RolloutMachine:
        """A machine that goes on from a snapshot. How workers are scaled comes from where it is set."""
        machine = cls(decode(RolloutRules, data["rules"]), elastic)
        books, router = machine._books, machine._books.router
        books.rest = decode(RolloutCounters, data["rest"])
        books.keys, books.joined = dict(data["keys"]), dict(data["joined"])
        books.refit = None if data["refit"] is None else decode(OngoingRefit, data["refit"])
        books.steps = decode(list[ScaleStep], data["steps"])
        books.takers = decode(tuple[Taker, ...], data["takers"])
        machine._scaler.state = scaling.load(data["policy"], elastic)
        decision = data.get("decision")
        machine._scaler.last = None if decision is None else decode(scaling.Decision, decision)
        router.predictor.means = decode(dict[str, dict[str, FadingMean]], data["means"])
        router.homes = dict(data["homes"])
        books.past = {one.id: one for one in (decode(RolloutRequest, each) for each in data["past"])}
        for each in data["requests"]:
            machine._recall_request(decode(RolloutRequest, each))
        for each in data["workers"]:
            machine._recall_worker(decode(RolloutWorker, each))
        for name, (placed, groups) in data["lanes"].items():
            lane = router.lanes[name]
            lane.groups = dict.fromkeys(groups)
            router.restore(lane, placed)
        books.touch(*EVERYBODY)
        machine._arm()
        return machine

    def _recall_request(self, request: RolloutRequest) -> None:
        books = self._books
        books.requests[request.id] = request
        books.touch("r", request.id)
        if request.state is RequestState.queued:
            version = books.rest.version
            if (request.spec.version or version) > version or (request.spec.at_least or version) > version:
                books.put_off(request)
            else:
                books.router.push(request)

    def _recall_worker(self, worker: RolloutWorker) -> None:
        books = self._books
        books.workers[worker.id] = worker
        for key in (*worker.held, *worker.ghosts):
            books.where[key] = worker.id
            books.touch("s", key)
        books.touch("w", worker.id)
        books.lane(worker)

    # ---- what must be true -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError where the machine contradicts itself."""
        for worker in self._books.workers.values():
            self._check_worker(worker)
        for request in self._books.requests.values():
            self._check_request(request)
        self._check_queues()
        for timer in self._timed():
            due, armed = self._due(timer), self._books.timers_of(timer)
            assert due is None or (armed is not None and armed <= due), f"{timer}: nothing wakes it at {due}"

    def _timed(self) -> list[TimerKey]:
        books = self._books
        return [
            EVERYBODY,
            *(("w", name) for name in books.workers),
            *(("r", name) for name in books.requests),
            *(("s", key) for key in books.where),
        ]

    def _check_worker(self, worker: RolloutWorker) -> None:
        books, name = self._books, worker.id
        lane = books.router.lanes.get(name)
        open_ = worker.state is S.active and not worker.paused and not worker.paused_elsewhere
        assert worker.story[-1].state == worker.state.value, f"{name}: story"
        assert worker.reason.sentence, f"{name} has no reason"
        assert (lane is not None) == open_, f"{name}: lane"
        assert worker.state is not S.active or worker.version == books.rest.version, f"{name}: not current"
        assert worker.state is not S.active or not (worker.was_lost or worker.asleep), f"{name}: back without a refit"
        assert worker.state is not S.empty or worker.version is None, f"{name}: empty, with a version"
        assert worker.state is not S.lost or (not worker.held and worker.version is None), f"{name}: lost"
        assert (worker.state is S.draining) == (worker.drain_by is not None), f"{name}: drain"
        assert worker.state is not S.starting or worker.doing is not None, f"{name}: starting, and nothing is done"
        if lane is not None:
            assert (lane.count, lane.load) == (len(worker.held), books.load_of(worker)), f"{name}: load"
        for key, sent in worker.held.items():
            assert key == held_key(sent.request, sent.attempt), f"{name}: {key}"
            assert books.where[key] == name, f"{name}: {key}"

    def _check_request(self, request: RolloutRequest) -> None:
        books, name = self._books, request.id
        assert request.state not in ANSWERED, f"{name}: answered, and remembered as not"
        assert request.wanted, f"{name}: nobody wants it"
        assert sum(one.tokens for one in request.spans) == request.tokens <= request.spec.max_tokens, f"{name}: tokens"
        assert request.story[-1].state == request.state.value, f"{name}: story"
        held = books.attempt(held_key(name, request.attempt))
        if request.state is RequestState.queued:
            waits = name in books.later or name in books.router.lines[request.spec.class_].waiting
            assert waits, f"{name}: queued nowhere"
            assert not request.worker, f"{name}: queued, and with {request.worker}"
        else:
            assert held is not None, f"{name}: with nobody"
            assert books.where[held_key(name, request.attempt)] == request.worker, f"{name}: elsewhere"

    def _check_queues(self) -> None:
        books = self._books
        waiting = [name for line in books.router.lines.values() for name in line.waiting]
        assert len(waiting) == books.router.queued, "queued"
        assert all(books.requests[name].state is RequestState.queued for name in (*waiting, *books.later)), "waits"
        assert not set(waiting) & set(books.later), "waits twice"
        assert +books.later_of == Counter(one.spec.class_ for one in books.later.values()), "later"
        assert sum(len(one.held) + len(one.ghosts) for one in books.workers.values()) == len(books.where), "held"
        assert all(name in books.requests or name in books.past for name in books.keys.values()), "keys"
        assert len(books.past) <= books.rules.answers_kept, "past"
        assert not (books.router.queued and books.router.least()), "somebody waits, and somebody has room"
