"""Rollout workers and requests: who serves what, who drains, wakes and starts, and that every request is answered once.

`handle(event, now)` is the one door: it looks at no clock and asks nobody, and the same events give the same
instructions. It is called by whoever talks to engines, clients and the trainer.

The transitions that must not exist are those to ACTIVE from STALE, EMPTY or LOST without a confirmed refit: an engine
that returns with old weights would answer as if nothing had happened, and the samples would be trained on. Nor is there
a way back from answered. What must never happen besides: a request lost, answered twice, or sent to a worker that is
not ACTIVE and current; memory released under a running request; a set of engines that changes during a weight sync;
fewer workers than the least by trimtab's own doing; a wait without a reason and a deadline.

The rooms: `rollout_requests` and `rollout_workers` have the lives, `rollout_refit` the weights, `rollout_scaling`
carries out how many, `routing` chooses, `rollout_books` remembers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from trimtab.fleet import rollout_events as e
from trimtab.fleet import scaling
from trimtab.fleet.rollout_books import EVERYBODY, Books, Timer
from trimtab.fleet.rollout_records import (
    Mean,
    Refit,
    Request,
    Rest,
    Worker,
    held_key,
    request_view,
    worker_view,
)
from trimtab.fleet.rollout_refit import Refits
from trimtab.fleet.rollout_requests import Requests
from trimtab.fleet.rollout_scaling import Scaler
from trimtab.fleet.rollout_workers import Workers
from trimtab.fleet.routing import GROUPS_PER_WORKER
from trimtab.fleet.scaling import Taker
from trimtab.model.codec import decode, encode
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.errors import InputError
from trimtab.model.reason import Chapter
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
        self.books = Books(rules)
        self.requests = Requests(self.books)
        self.workers = Workers(self.books, self.requests)
        self.refits = Refits(self.books, self.requests, self.workers)
        self.scaler = Scaler(self.books, self.workers, scaling.begin(elastic))
        self.requests.on_released = self.workers.settle
        self.requests.on_heard = self.workers.heard
        self.requests.on_fault = self.workers.fault
        self.requests.on_deaf = self.workers.deaf
        self.workers.on_quieter = self.refits.quieter
        self.workers.on_confirmed = self.refits.vouched
        self.workers.on_refit_failed = self.refits.not_got
        self.workers.in_refit = self.refits.in_refit
        self._doors: dict[type, Callable[[Any], None]] = {
            e.Arrived: self.requests.arrived,
            e.Streamed: self.requests.streamed,
            e.Finished: self.requests.finished,
            e.Broke: self.requests.broke,
            e.AbortedElsewhere: self.requests.aborted_elsewhere,
            e.AbortDone: self.requests.abort_done,
            e.Cancelled: self.requests.cancelled,
            e.WorkerAdded: self.workers.added,
            e.WorkerRemoved: self.workers.removed,
            e.WorkerTaken: self.workers.taken,
            e.WorkerGiven: self.workers.given,
            e.WorkerUp: self.workers.came_up,
            e.WorkerDied: self.workers.died,
            e.WorkerUnwell: self.workers.unwell,
            e.WorkerWell: self.workers.well,
            e.WorkerSlept: self.workers.slept,
            e.WorkerEmptied: self.workers.emptied,
            e.PausedElsewhere: self.workers.paused_elsewhere,
            e.LoadSeen: self.workers.load_seen,
            e.ActDone: self.workers.act_done,
            e.ActFailed: self.workers.act_failed,
            e.RefitBegun: self.refits.begun,
            e.RefitConfirmed: self.refits.confirmed,
            e.RefitFailed: self.refits.failed,
            e.RefitEnded: self.refits.ended,
            e.Scaled: self.scaler.scaled,
            e.ScaleReleased: self.scaler.released,
            e.Held: self.scaler.held,
            e.Unheld: self.scaler.unheld,
            e.RangeSet: self.scaler.range_set,
            e.TakersSeen: self._on_takers_seen,
            e.Tick: self._on_tick,
        }

    # ---- the door --------------------------------------------------------------------------------------------------

    def handle(self, event: e.RolloutEvent, now: float) -> list[e.RolloutInstruction]:
        """What is to be done about the event. Raises InputError or InfeasibleError, with nothing changed."""
        books = self.books
        books.rest.now = max(float(now), books.rest.now)
        books.out = []
        self._doors[type(event)](event)
        if books.router.queued:
            self.requests.dispatch()
        self._arm()
        return books.out

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        books = self.books
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
        return self.books.rest.version

    # ---- time ------------------------------------------------------------------------------------------------------

    def _on_takers_seen(self, event: e.TakersSeen) -> None:
        self.books.takers = event.takers

    def _on_tick(self, event: e.Tick) -> None:
        books = self.books
        while (at := self.next_deadline()) is not None and at <= books.rest.now:
            _, (kind, name) = books.first_timer() or (0.0, EVERYBODY)
            books.pop_timer()
            if kind == "w":
                self.workers.late(name)
            elif kind == "r":
                self.requests.request_late(name)
            elif kind == "s":
                self.requests.attempt_late(name)
            else:
                self._everybody_late()
            self._arm()

    def _everybody_late(self) -> None:
        books = self.books
        if books.refit is not None and books.refit.deadline <= books.rest.now:
            self.refits.late()
        due = self.scaler.due()
        if due is not None and due <= books.rest.now:
            self.scaler.look()
        books.touch(*EVERYBODY)

    def _due(self, timer: Timer) -> float | None:
        kind, name = timer
        if kind == "w":
            return self.workers.due(name)
        if kind == "r":
            return self.requests.request_due(name)
        if kind == "s":
            return self.requests.attempt_due(name)
        refit = self.books.refit
        dues = (self.scaler.due(), None if refit is None else refit.deadline)
        return min((one for one in dues if one is not None), default=None)

    def _arm(self) -> None:
        books = self.books
        for timer in books.touched():
            books.arm(timer, self._due(timer))

    # ---- questions -------------------------------------------------------------------------------------------------

    def worker_views(self) -> tuple[WorkerView, ...]:
        """All workers, in order of joining."""
        return tuple(worker_view(one, self.books.load_of(one)) for one in self.books.workers.values())

    def request_views(self) -> tuple[RequestView, ...]:
        """All requests that are not answered, in order of arrival."""
        return tuple(request_view(one) for one in self.books.requests.values())

    def view(self, name: str) -> RequestView:
        """One request, answered ones as long as they are remembered."""
        return request_view(self._request(name))

    def story(self, name: str) -> tuple[Chapter, ...]:
        """What became of a worker or a request, and why."""
        worker = self.books.workers.get(name)
        return tuple(worker.story if worker is not None else self._request(name).story)

    def _request(self, name: str) -> Request:
        books = self.books
        name = books.joined.get(name, name)
        known = books.requests.get(name) or books.past.get(name)
        if known is None:
            raise InputError(f"there is no request or worker {name}", hint="answered ones are remembered for a while")
        return known

    def membership(self) -> Membership:
        """Who takes part in the open refit; with none open, who would in the next."""
        return self.refits.offered()

    @property
    def steps(self) -> tuple[ScaleStep, ...]:
        """The last changes of the number of workers."""
        return tuple(self.books.steps)

    def metrics(self) -> dict[str, float]:
        """The figures that a monitor wants: workers, requests, load as a share of capacity."""
        sample = self.scaler.sample()
        capacity = sample.active * sample.capacity
        return {
            "active_workers": sample.active,
            "draining_workers": sample.draining_workers,
            "total_workers": len(self.books.workers),
            "active_requests": sample.running + sample.draining,
            "pending_requests": sample.queued,
            "load_ratio": sample.load / capacity if capacity else float(sample.load > 0),
            "total_capacity": capacity,
        }

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """All that is remembered, as plain data."""
        books, router = self.books, self.books.router
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
            "policy": scaling.dump(self.scaler.state),
            "means": encode(router.predictor.means),
            "homes": dict(router.homes),
            "lanes": {name: [one.placed, list(one.groups)] for name, one in router.lanes.items()},
        }

    @classmethod
    def load(cls, data: dict[str, Any], elastic: ElasticConfig = STATIC) -> RolloutMachine:
        """A machine that goes on from a snapshot. How workers are scaled comes from where it is set."""
        machine = cls(decode(RolloutRules, data["rules"]), elastic)
        books, router = machine.books, machine.books.router
        books.rest = decode(Rest, data["rest"])
        books.keys, books.joined = dict(data["keys"]), dict(data["joined"])
        books.refit = None if data["refit"] is None else decode(Refit, data["refit"])
        books.steps = decode(list[ScaleStep], data["steps"])
        books.takers = decode(tuple[Taker, ...], data["takers"])
        machine.scaler.state = scaling.load(data["policy"], elastic)
        router.predictor.means = decode(dict[str, Mean], data["means"])
        router.homes = dict(data["homes"])
        books.past = {one.id: one for one in (decode(Request, each) for each in data["past"])}
        for each in data["requests"]:
            machine._recall_request(decode(Request, each))
        for each in data["workers"]:
            machine._recall_worker(decode(Worker, each))
        for name, (placed, groups) in data["lanes"].items():
            lane = router.lanes[name]
            lane.groups = deque(groups, maxlen=GROUPS_PER_WORKER)
            router.restore(lane, placed)
        books.touch(*EVERYBODY)
        machine._arm()
        return machine

    def _recall_request(self, request: Request) -> None:
        books = self.books
        books.requests[request.id] = request
        books.touch("r", request.id)
        if request.state is RequestState.queued:
            version = books.rest.version
            if (request.spec.version or version) > version or (request.spec.at_least or version) > version:
                books.later[request.id] = request
            else:
                books.router.push(request)

    def _recall_worker(self, worker: Worker) -> None:
        books = self.books
        books.workers[worker.id] = worker
        for key in worker.held:
            books.where[key] = worker.id
            books.touch("s", key)
        books.touch("w", worker.id)
        books.lane(worker)

    # ---- what must be true -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError where the machine contradicts itself."""
        for worker in self.books.workers.values():
            self._check_worker(worker)
        for request in self.books.requests.values():
            self._check_request(request)
        self._check_queues()
        for timer in self._timed():
            due, armed = self._due(timer), self.books.timers_of(timer)
            assert due is None or (armed is not None and armed <= due), f"{timer}: nothing wakes it at {due}"

    def _timed(self) -> list[Timer]:
        books = self.books
        return [
            EVERYBODY,
            *(("w", name) for name in books.workers),
            *(("r", name) for name in books.requests),
            *(("s", key) for key in books.where),
        ]

    def _check_worker(self, worker: Worker) -> None:
        books, name = self.books, worker.id
        lane = books.router.lanes.get(name)
        open_ = worker.state is S.active and not worker.paused and not worker.paused_elsewhere
        assert worker.story[-1].state == worker.state.value and worker.reason.sentence, f"{name}: story"
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
            assert key == held_key(sent.request, sent.attempt) and books.where[key] == name, f"{name}: {key}"

    def _check_request(self, request: Request) -> None:
        books, name = self.books, request.id
        assert request.state not in ANSWERED and request.wanted, f"{name}: answered, and remembered as not"
        assert sum(one.tokens for one in request.spans) == request.tokens <= request.spec.max_tokens, f"{name}: tokens"
        assert request.story[-1].state == request.state.value, f"{name}: story"
        held = books.attempt(held_key(name, request.attempt))
        if request.state is RequestState.queued:
            waits = name in books.later or name in books.router.lines[request.spec.class_].waiting
            assert waits and not request.worker, f"{name}: queued nowhere"
        else:
            assert held is not None and request.worker in books.workers, f"{name}: with nobody"
            assert books.where[held_key(name, request.attempt)] == request.worker, f"{name}: elsewhere"

    def _check_queues(self) -> None:
        books = self.books
        waiting = [name for line in books.router.lines.values() for name in line.waiting]
        assert len(waiting) == books.router.queued, "queued"
        assert all(books.requests[name].state is RequestState.queued for name in (*waiting, *books.later)), "waits"
        assert not set(waiting) & set(books.later), "waits twice"
        assert sum(len(one.held) for one in books.workers.values()) == len(books.where), "held"
        assert all(name in books.requests or name in books.past for name in books.keys.values()), "keys"
        assert len(books.past) <= books.rules.answers_kept, "past"
        assert not (books.router.queued and books.router.least()), "somebody waits, and somebody has room"
