"""State of the rollout machine: workers, requests, attempts by worker, timers. Decides nothing.

Its parts read and write it; none of them keeps a copy. The fields are a snapshot, all else follows from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from trimtab.core.machine import Timers, earliest
from trimtab.core.reasons import Reason, StoryEntry, add_story_entry
from trimtab.machines.rollout.events import RolloutInstruction
from trimtab.machines.rollout.policies.load import Decision, PolicyMemory, Taker
from trimtab.machines.rollout.records import FadingMean, OngoingRefit, RolloutRequest, RolloutWorker, SentAttempt
from trimtab.machines.rollout.routing import Router, WorkerLane
from trimtab.model.rollout import Membership, RequestState, RolloutRules, ScaleStep, WorkerState

GLOBAL_TIMER = ("", "")  # refit and scaling deadlines

TimerKey = tuple[str, str]  # ("w", worker), ("r", request) or ("s", attempt)


@dataclass(eq=False)
class RolloutState:
    """All state of the rollout machine."""

    rules: RolloutRules
    now: float = 0.0
    version: int = 0  # of the trainer's weights
    served_version: int = 0  # the last one that a worker served: what a pool can go back to after a failed refit
    min_workers: int = 1
    max_workers: int = 1
    workers: dict[str, RolloutWorker] = field(default_factory=dict)  # in order of joining
    requests: dict[str, RolloutRequest] = field(default_factory=dict)  # accepted and not answered
    past: dict[str, RolloutRequest] = field(default_factory=dict)  # recently answered, oldest first
    keys: dict[str, str] = field(default_factory=dict)  # idempotency key -> request id, in `requests` or `past`
    # Request id -> the live request with the same key whose answer it shares.
    coalesced: dict[str, str] = field(default_factory=dict)
    arrivals: int = 0
    joins: int = 0
    answered: int = 0  # total
    refused: int = 0
    # Refits.
    refit: OngoingRefit | None = None
    membership: Membership = field(default_factory=lambda: Membership(0))  # of the open refit, or of the last one
    # Scaling.
    next_evaluation: float | None = None
    manual_workers: int | None = None
    manual_until: float | None = None
    manual_why: str = ""
    holds: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    steps: list[ScaleStep] = field(default_factory=list)  # the last ones
    takers: tuple[Taker, ...] = ()
    policy: PolicyMemory = field(default_factory=PolicyMemory)
    decision: Decision | None = None  # the policy's last one, also when it changed nothing
    # Measured.
    sleep_s: FadingMean = field(default_factory=FadingMean)
    wake_s: FadingMean = field(default_factory=FadingMean)
    drain_s: FadingMean = field(default_factory=FadingMean)
    service_s: FadingMean = field(default_factory=FadingMean)  # of a request, from sent to finished
    # Of the router.
    means: dict[str, dict[str, FadingMean]] = field(default_factory=dict)
    lanes: dict[str, WorkerLane] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.router = Router(self.rules, self.means, self.lanes, self.homes, self.sessions)
        self.parked: dict[str, RolloutRequest] = {}  # queued for a version that is not published yet
        self.parked_by_class: Counter[str] = Counter()
        self.worker_by_attempt: dict[str, str] = {}  # by request#attempt
        self.out: list[RolloutInstruction] = []
        self.timers = Timers[TimerKey](self._due)
        self._touched: dict[TimerKey, None] = {}  # timers whose due time may have come nearer
        for request in self.requests.values():
            if request.state is RequestState.queued:
                if self.is_early(request):
                    self.park(request)
                else:
                    self.router.push(request)
        for worker in self.workers.values():
            self.worker_by_attempt.update(dict.fromkeys((*worker.held, *worker.zombies), worker.id))
        self._touched.update(dict.fromkeys(self.timed()))
        self.arm_touched()

    def emit(self, instruction: RolloutInstruction) -> None:
        self.out.append(instruction)

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
        return (worker for worker in self.workers.values() if worker.state in states)

    def attempt(self, key: str) -> SentAttempt | None:
        """The attempt, if a worker that is not lost holds it."""
        worker = self.workers.get(self.worker_by_attempt.get(key, ""))
        return None if worker is None else worker.held.get(key)

    def will_serve(self, worker: RolloutWorker) -> bool:
        """Whether it will serve without a further decision: starting, or waiting for weights."""
        if worker.leaving or worker.reclaimed or worker.disabled:
            return False
        return worker.state in (WorkerState.starting, WorkerState.stale, WorkerState.empty)

    def in_refit(self, worker: RolloutWorker) -> bool:
        return self.refit is not None and self.is_member(worker)

    def is_member(self, worker: RolloutWorker) -> bool:
        """Whether the open or last refit includes it, as its current process."""
        return any(
            member.worker == worker.id and member.incarnation == worker.incarnation
            for member in self.membership.members
        )

    # ---- requests for a version that has not come ------------------------------------------------------------------

    def is_early(self, request: RolloutRequest) -> bool:
        """Whether it asks for a version that the trainer has not published yet."""
        spec, version = request.spec, self.version
        return (spec.version or version) > version or (spec.at_least or version) > version

    def park(self, request: RolloutRequest) -> None:
        self.parked[request.id] = request
        self.parked_by_class[request.spec.class_] += 1

    def unpark(self, request: RolloutRequest) -> None:
        if self.parked.pop(request.id, None) is not None:
            self.parked_by_class[request.spec.class_] -= 1

    # ---- lanes -----------------------------------------------------------------------------------------------------

    def update_lane(self, worker: RolloutWorker) -> None:
        """Open or close the worker for requests, by its state. The only place that creates lanes."""
        if not worker.is_open:
            self.lanes.pop(worker.id, None)
        elif worker.id not in self.lanes:
            lane = WorkerLane(worker.id, worker.number, worker.spec.limit, worker.spec.token_limit)
            lane.count, lane.load = len(worker.held), worker.outstanding_tokens
            self.update_lane_load(worker, lane)
            self.router.open(lane)

    def update_lane_load(self, worker: RolloutWorker, lane: WorkerLane) -> None:
        """Apply the engine's own figures while they are fresh."""
        believed = worker.load_fresh_until is not None and self.now < worker.load_fresh_until
        lane.outside = worker.outside if believed else 0
        lane.closed = worker.kv_full and believed

    # ---- timers ----------------------------------------------------------------------------------------------------

    def touch(self, kind: str, name: str) -> None:
        """Mark a due time as possibly nearer; it is armed before the event ends."""
        self._touched[kind, name] = None

    def arm_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for timer in touched:
            self.timers.arm(timer)

    def evaluate_soon(self) -> None:
        self.next_evaluation = self.now
        self.touch(*GLOBAL_TIMER)

    def timed(self) -> list[TimerKey]:
        """All that may have a due time."""
        return [
            GLOBAL_TIMER,
            *(("w", name) for name in self.workers),
            *(("r", name) for name in self.requests),
            *(("s", key) for key in self.worker_by_attempt),
        ]

    def scaling_due(self) -> float | None:
        """When the next evaluation of scaling, or an expiry, is due."""
        return earliest(self.next_evaluation, self.manual_until, *(until for _, until in self.holds.values()))

    def _due(self, timer: TimerKey) -> float | None:
        kind, name = timer
        if kind == "s":
            return self._attempt_due(name)
        if kind == "r":
            request = self.requests.get(name)
            return None if request is None else request.deadline
        if kind == "w":
            worker = self.workers.get(name)
            return None if worker is None else worker.due
        return earliest(self.scaling_due(), None if self.refit is None else self.refit.deadline)

    def _attempt_due(self, key: str) -> float | None:
        sent = self.attempt(key)
        if sent is None or sent.orphan:
            return None
        if sent.abort_by is not None:
            return sent.abort_by
        worker = self.workers[self.worker_by_attempt[key]]
        request = self.requests.get(sent.request)
        quiet = worker.paused or worker.paused_elsewhere or (request is not None and not request.spec.watched)
        return None if quiet else max(sent.last, worker.generated_at) + self.rules.stall_s
