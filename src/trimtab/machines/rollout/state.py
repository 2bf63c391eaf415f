"""State of the rollout machine: workers, requests, attempts by worker, timers. Decides nothing.

`requests`, `workers`, `health`, `actions`, `refit` and `scaler` read and write it; none of them keeps a copy.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from trimtab.core.reasons import Reason, StoryEntry, add_story_entry
from trimtab.machines.rollout.events import RolloutInstruction
from trimtab.machines.rollout.policies.policy import Taker
from trimtab.machines.rollout.records import OngoingRefit, RolloutCounters, RolloutRequest, RolloutWorker, SentAttempt
from trimtab.machines.rollout.routing import Router, WorkerLane
from trimtab.model.rollout import RequestState, RolloutRules, ScaleStep, WorkerState

GLOBAL_TIMER = ("", "")  # refit and scaling deadlines

TimerKey = tuple[str, str]  # ("w", worker), ("r", request) or ("s", attempt)


class RolloutState:
    """All state of the rollout machine."""

    def __init__(self, rules: RolloutRules) -> None:
        self.rules = rules
        self.counters = RolloutCounters(
            version=rules.version,
            served_version=rules.version,
            min_workers=rules.min_workers,
            max_workers=rules.max_workers,
        )
        self.workers: dict[str, RolloutWorker] = {}  # in order of joining
        self.requests: dict[str, RolloutRequest] = {}  # accepted and not answered
        self.past: dict[str, RolloutRequest] = {}  # recently answered, oldest first
        self.keys: dict[str, str] = {}  # idempotency key -> request id, in `requests` or `past`
        self.coalesced: dict[str, str] = {}  # request id -> the live request with the same key whose answer it shares
        self.refit: OngoingRefit | None = None
        self.steps: list[ScaleStep] = []  # the last ones
        self.takers: tuple[Taker, ...] = ()
        # Derived from the above, except the router's prefixes and means.
        self.router = Router(rules)
        self.parked: dict[str, RolloutRequest] = {}  # queued for a version that is not published yet
        self.parked_by_class: Counter[str] = Counter()  # by class
        self.worker_by_attempt: dict[str, str] = {}  # by request#attempt
        self.instructions: list[RolloutInstruction] = []
        self._timers: list[tuple[float, TimerKey]] = []  # a heap of due times, some outdated
        self._armed: dict[TimerKey, float] = {}  # the earliest in the heap, by timer
        self._touched: dict[TimerKey, None] = {}  # timers whose due time may have changed

    @property
    def now(self) -> float:
        return self.counters.now

    @property
    def version(self) -> int:
        return self.counters.version

    def emit(self, instruction: RolloutInstruction) -> None:
        self.instructions.append(instruction)

    # ---- stories ---------------------------------------------------------------------------------------------------

    def set_worker_state(self, worker: RolloutWorker, state: WorkerState, reason: Reason) -> None:
        now = self.now
        if state is not worker.state:
            worker.since = now
        worker.state, worker.reason = state, reason
        add_story_entry(worker.story, StoryEntry(now, state.value, reason))
        self.touch("w", worker.id)

    def set_request_state(self, request: RolloutRequest, state: RequestState, reason: Reason) -> None:
        now = self.now
        request.state, request.reason, request.since = state, reason, now
        add_story_entry(request.story, StoryEntry(now, state.value, reason))

    # ---- queries -------------------------------------------------------------------------------------------------

    def workers_in(self, *states: WorkerState) -> Iterator[RolloutWorker]:
        """Workers in these states, in order of joining."""
        return (worker for worker in self.workers.values() if worker.state in states)

    def count(self, *states: WorkerState) -> int:
        return sum(worker.state in states for worker in self.workers.values())

    def attempt(self, key: str) -> SentAttempt | None:
        """The attempt, if a worker that is not lost holds it."""
        worker = self.workers.get(self.worker_by_attempt.get(key, ""))
        return None if worker is None else worker.held.get(key)

    def load_of(self, worker: RolloutWorker) -> int:
        """Predicted outstanding tokens."""
        return sum(attempt.cost for attempt in worker.held.values())

    def will_serve(self, worker: RolloutWorker) -> bool:
        """Whether it will serve without a further decision: starting, or waiting for weights."""
        if worker.leaving or worker.reclaimed or worker.disabled:
            return False
        return worker.state in (WorkerState.starting, WorkerState.stale, WorkerState.empty)

    # ---- requests for a version that has not come ------------------------------------------------------------------

    def park(self, request: RolloutRequest) -> None:
        """Queue it for a version that the trainer has not published yet."""
        self.parked[request.id] = request
        self.parked_by_class[request.spec.class_] += 1

    def unpark(self, request: RolloutRequest) -> None:
        if self.parked.pop(request.id, None) is not None:
            self.parked_by_class[request.spec.class_] -= 1

    # ---- lanes -----------------------------------------------------------------------------------------------------

    def update_lane(self, worker: RolloutWorker) -> None:
        """Open or close the worker for requests, by its state. The only place that creates lanes."""
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
        """Apply the engine's own figures while they are fresh."""
        believed = worker.load_fresh_until is not None and self.now < worker.load_fresh_until
        lane.outside = worker.outside if believed else 0
        lane.closed = worker.kv_full and believed

    # ---- timers ----------------------------------------------------------------------------------------------------

    def touch(self, kind: str, name: str) -> None:
        """Mark a due time as possibly changed; it is re-armed before the event ends."""
        self._touched[kind, name] = None

    def arm(self, timer: TimerKey, due: float | None) -> None:
        if due is None:
            return
        armed = self._armed.get(timer)
        if armed is None or due < armed:
            self._armed[timer] = due
            heapq.heappush(self._timers, (due, timer))

    def evaluate_soon(self) -> None:
        """Evaluate scaling at the next tick."""
        self.counters.next_evaluation = self.now
        self.touch(*GLOBAL_TIMER)

    def touched(self) -> list[TimerKey]:
        touched, self._touched = list(self._touched), {}
        return touched

    def first_timer(self) -> tuple[float, TimerKey] | None:
        """The head of the heap, possibly outdated."""
        return self._timers[0] if self._timers else None

    def pop_timer(self) -> None:
        at, timer = heapq.heappop(self._timers)
        if self._armed.get(timer) == at:
            del self._armed[timer]

    def armed_at(self, timer: TimerKey) -> float | None:
        return self._armed.get(timer)
