"""What the rollout machine knows, in one place: workers, requests, what is really where, timers. Decides nothing.

The rooms of the machine (`rollout_requests`, `rollout_workers`, `rollout_refit`, `rollout_scaling`) read and write it,
so that none of them owns a copy of what another one changes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from trimtab.core.reasons import Reason, StoryEntry, add_chapter
from trimtab.machines.rollout.events import RolloutInstruction
from trimtab.machines.rollout.policies.policy import Taker
from trimtab.machines.rollout.records import OngoingRefit, RolloutCounters, RolloutRequest, RolloutWorker, SentAttempt
from trimtab.machines.rollout.routing import Router, WorkerLane
from trimtab.model.rollout import RequestState, RolloutRules, ScaleStep, WorkerState

GLOBAL_TIMER = ("", "")  # the timer of what concerns no single worker or request

TimerKey = tuple[str, str]  # "w" and a worker, "r" and a request, "s" and an attempt


class RolloutState:
    """All that is remembered."""

    def __init__(self, rules: RolloutRules) -> None:
        self.rules = rules
        self.counters = RolloutCounters(version=rules.version, min_workers=rules.least, max_workers=rules.most)
        self.workers: dict[str, RolloutWorker] = {}  # in order of joining
        self.requests: dict[str, RolloutRequest] = {}  # accepted and not answered
        self.past: dict[str, RolloutRequest] = {}  # answered not long ago, oldest first
        self.keys: dict[str, str] = {}  # by the client's key: the request, which is in one of the above
        self.coalesced: dict[str, str] = {}  # by id: the live request whose answer it waits for, where that is another
        self.refit: OngoingRefit | None = None
        self.steps: list[ScaleStep] = []  # the last ones
        self.takers: tuple[Taker, ...] = ()
        # What follows can be worked out from the above (the router's prefixes and means apart).
        self.router = Router(rules)
        self.parked: dict[str, RolloutRequest] = {}  # queued for a version that has not come yet
        self.parked_by_class: Counter[str] = Counter()  # by class: how many of those there are
        self.worker_by_attempt: dict[str, str] = {}  # by request#attempt: the worker that holds it
        self.instructions: list[RolloutInstruction] = []
        self._timers: list[tuple[float, TimerKey]] = []  # a heap; has every due time, and some that have changed since
        self._armed: dict[TimerKey, float] = {}  # the earliest in the heap
        self._touched: dict[TimerKey, None] = {}  # whose due time may have changed

    # ---- stories ---------------------------------------------------------------------------------------------------

    def set_worker_state(self, worker: RolloutWorker, state: WorkerState, reason: Reason) -> None:
        """The worker is now there, for this reason."""
        now = self.counters.now
        if state is not worker.state:
            worker.since = now
        worker.state, worker.reason = state, reason
        add_chapter(worker.story, StoryEntry(now, state.value, reason))
        self.touch("w", worker.id)

    def set_request_state(self, request: RolloutRequest, state: RequestState, reason: Reason) -> None:
        """The request is now there, for this reason."""
        now = self.counters.now
        request.state, request.reason, request.since = state, reason, now
        add_chapter(request.story, StoryEntry(now, state.value, reason))

    # ---- questions -------------------------------------------------------------------------------------------------

    def workers_in(self, *states: WorkerState) -> Iterator[RolloutWorker]:
        """Workers in these states, in order of joining."""
        return (worker for worker in self.workers.values() if worker.state in states)

    def count(self, *states: WorkerState) -> int:
        """How many workers are in these states."""
        return sum(worker.state in states for worker in self.workers.values())

    def attempt(self, key: str) -> SentAttempt | None:
        """The attempt, if a worker holds it and is not lost."""
        worker = self.workers.get(self.worker_by_attempt.get(key, ""))
        return None if worker is None else worker.held.get(key)

    def load_of(self, worker: RolloutWorker) -> int:
        """Tokens outstanding there, predicted."""
        return sum(attempt.cost for attempt in worker.held.values())

    def will_serve(self, worker: RolloutWorker) -> bool:
        """Whether it will serve by itself: being started, or waits for weights."""
        if worker.leaving or worker.reclaimed or worker.disabled:
            return False
        return worker.state in (WorkerState.starting, WorkerState.stale, WorkerState.empty)

    # ---- requests for a version that has not come ------------------------------------------------------------------

    def park(self, request: RolloutRequest) -> None:
        """It waits for a version."""
        self.parked[request.id] = request
        self.parked_by_class[request.spec.class_] += 1

    def unpark(self, request: RolloutRequest) -> None:
        """It does not wait for one any more, if it did."""
        if self.parked.pop(request.id, None) is not None:
            self.parked_by_class[request.spec.class_] -= 1

    # ---- lanes -----------------------------------------------------------------------------------------------------

    def update_lane(self, worker: RolloutWorker) -> None:
        """Open or close the worker for requests, as it now is. The one place where a lane is made."""
        may = worker.state is WorkerState.active and not worker.paused and not worker.paused_elsewhere
        lane = self.router.lanes.get(worker.id)
        if not may:
            if lane is not None:
                self.router.close(worker.id)
            return
        if lane is None:
            lane = WorkerLane(worker.id, worker.number, worker.spec.limit, worker.spec.token_limit)
            lane.count, lane.load = len(worker.held), self.load_of(worker)
            self.update_lane_load(worker, lane)
            self.router.open(lane)

    def update_lane_load(self, worker: RolloutWorker, lane: WorkerLane) -> None:
        """What the engine says of itself, as long as it is believed."""
        believed = worker.load_fresh_until is not None and self.counters.now < worker.load_fresh_until
        lane.outside = worker.outside if believed else 0
        lane.closed = worker.kv_full and believed

    # ---- timers ----------------------------------------------------------------------------------------------------

    def touch(self, kind: str, name: str) -> None:
        """Something about it changed; when time alone changes it next is looked at before the event is over."""
        self._touched[kind, name] = None

    def arm(self, timer: TimerKey, due: float | None) -> None:
        """Wake at the due time."""
        if due is None:
            return
        armed = self._armed.get(timer)
        if armed is None or due < armed:
            self._armed[timer] = due
            heapq.heappush(self._timers, (due, timer))

    def evaluate_soon(self) -> None:
        """The number of workers is to be looked at as soon as time passes."""
        self.counters.next_evaluation = self.counters.now
        self.touch(*GLOBAL_TIMER)

    def touched(self) -> list[TimerKey]:
        """Those whose due time may have changed, once."""
        touched, self._touched = list(self._touched), {}
        return touched

    def first_timer(self) -> tuple[float, TimerKey] | None:
        """The next in the heap, due or outdated."""
        return self._timers[0] if self._timers else None

    def pop_timer(self) -> None:
        """Take it away."""
        at, timer = heapq.heappop(self._timers)
        if self._armed.get(timer) == at:
            del self._armed[timer]

    def armed_at(self, timer: TimerKey) -> float | None:
        """When it is woken at the latest, if ever."""
        return self._armed.get(timer)
