"""Routes requests: sessions stay where they are; else least outstanding tokens, prefix affinity, classes by priority.

Chooses only; the rollout machine sends. What must never happen: a closed or full worker is chosen; a request is passed
over for ever (a request that jumps the queue for its prefix comes from within a window behind the head); time that
grows with the number of workers or requests: open workers are in a heap by load, queues are in order of arrival, and
outdated entries of either are skipped when met.

Outstanding tokens are predicted from recent requests of that class and prompt length, capped by max_tokens. Prefill
costs much less per token than decode, and counts accordingly.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from trimtab.machines.rollout.records import FadingMean, RolloutRequest
from trimtab.model.rollout import RequestClass, RequestSpec, RolloutRules

PREFILL_SHARE = 8  # prompt tokens that cost as much as one generated token
GROUPS_PER_WORKER = 8  # prefixes assumed to be in a worker's cache
HOMES_KEPT = 65_536  # of groups, and of sessions
REFRESH_SHARE = 8  # a load that fell by 1/8 is re-placed in the heap
WHOLE = ""
BITS = [str(bits) for bits in range(64)]  # names of prompt length buckets
OVERRUN = 2  # a request longer than predicted is predicted to reach this multiple of its length


@dataclass(eq=False)
class WorkerLane:
    """A worker that may serve."""

    worker: str
    number: int  # for ties
    limit: int
    token_limit: int | None
    load: int = 0  # predicted tokens outstanding
    count: int = 0  # requests there
    outside: int = 0  # requests of other clients
    closed: bool = False  # full by its own figures
    placed: int | None = None  # its load in its valid heap entries; None: it has none
    groups: dict[str, None] = field(default_factory=dict)  # prefixes assumed in its cache, the latest last

    @property
    def has_capacity(self) -> bool:
        return (
            self.count + self.outside < self.limit
            and not self.closed
            and (self.token_limit is None or self.load < self.token_limit)
        )


@dataclass(eq=False)
class RequestQueue:
    """The queue of a request class."""

    spec: RequestClass
    waiting: dict[str, RolloutRequest] = field(default_factory=dict)  # exactly the waiting requests
    # All waiting requests are in one of these, with outdated entries:
    fresh: deque[RolloutRequest] = field(default_factory=deque)  # in order of arrival
    requeued: list[tuple[int, str]] = field(default_factory=list)  # a heap: sent before, and requeued
    last_number: int = 0  # the highest number that `fresh` has seen
    # By group, in order: exactly the waiting requests.
    groups: dict[str, deque[RolloutRequest]] = field(default_factory=dict)


class RoutingChoice(NamedTuple):
    """The next request and its worker."""

    request: RolloutRequest
    worker: str
    prefix_hit: bool  # its prefix is in the worker's cache


class LengthPredictor:
    """Predicts answer lengths by class and prompt length."""

    def __init__(self, means: dict[str, dict[str, FadingMean]]) -> None:
        """`means` by class, then by the bit length of the prompt length; all lengths under WHOLE."""
        self.means = means

    def learn(self, spec: RequestSpec, tokens: int) -> None:
        means = self.means.setdefault(spec.class_, {})
        for name in (WHOLE, BITS[spec.prompt_tokens.bit_length()]):
            mean = means.get(name)
            if mean is None:
                mean = means[name] = FadingMean()
            mean.add(tokens)

    def remaining(self, spec: RequestSpec, made: int) -> int:
        """Tokens still to come."""
        means = self.means.get(spec.class_)
        whole = spec.max_tokens
        if means is not None:
            mean = means.get(BITS[spec.prompt_tokens.bit_length()]) or means[WHOLE]
            if mean.value is not None:
                whole = int(mean.value)
        if whole <= made:
            whole = made * OVERRUN
        return max(1, min(whole, spec.max_tokens) - made)

    def cost(self, spec: RequestSpec, made: int) -> int:
        """Cost of sending it now: remaining tokens, plus the prefill."""
        return self.remaining(spec, made) + (spec.prompt_tokens + made) // PREFILL_SHARE


class Router:
    """Request queues and worker lanes. The tables that it is given belong to the machine's state."""

    def __init__(
        self,
        rules: RolloutRules,
        means: dict[str, dict[str, FadingMean]],
        lanes: dict[str, WorkerLane],
        homes: dict[str, str],
        sessions: dict[str, str],
    ) -> None:
        self.rules = rules
        self.predictor = LengthPredictor(means)
        self.lanes = lanes  # workers that may serve, with capacity or without
        self.homes = homes  # by group: the last worker; oldest first
        self.sessions = sessions  # by session, likewise
        self.queues = {request_class.name: RequestQueue(request_class) for request_class in rules.classes}
        self._by_priority = sorted(self.queues.values(), key=lambda queue: (-queue.spec.priority, queue.spec.name))
        self.queued = 0
        self._rebuild_heap()

    # ---- workers ---------------------------------------------------------------------------------------------------

    def open(self, lane: WorkerLane) -> None:
        self.lanes[lane.worker] = lane
        self._place(lane)

    def changed(self, lane: WorkerLane) -> None:
        if lane.load != lane.placed or not lane.has_capacity:
            self._place(lane)

    def load_decreased(self, lane: WorkerLane) -> None:
        """Small decreases are re-placed in the heap only once they add up."""
        if lane.placed is None or (lane.placed - lane.load) * REFRESH_SHARE > lane.placed:
            self._place(lane)

    def _place(self, lane: WorkerLane) -> None:
        if not lane.has_capacity:
            lane.placed = None
            return
        lane.placed = lane.load
        heapq.heappush(self._heap, (lane.load, lane.number, lane.worker))
        if len(self._heap) > 64 + 4 * len(self.lanes):
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        """An entry counts while it has its lane's `placed`: others are skipped when met."""
        lanes = self.lanes.values()
        self._heap = [(lane.placed, lane.number, lane.worker) for lane in lanes if lane.placed is not None]
        heapq.heapify(self._heap)

    def least_loaded(self, avoid: str = "") -> WorkerLane | None:
        """The open worker with capacity and the fewest outstanding tokens; another than `avoid`, if there is one."""
        heap, avoided = self._heap, None
        while heap:
            load, _, worker = heap[0]
            lane = self.lanes.get(worker)
            if lane is None or lane.placed != load:
                heapq.heappop(heap)
            elif worker == avoid:
                avoided = heapq.heappop(heap)
            else:
                break
        else:
            lane = None
        if avoided is not None:
            heapq.heappush(heap, avoided)
            return lane or self.lanes[avoid]
        return lane

    # ---- queues ----------------------------------------------------------------------------------------------------

    def push(self, request: RolloutRequest) -> None:
        """Queue it; a requeued request keeps its place by its number."""
        queue = self.queues[request.spec.class_]
        if request.id in queue.waiting:
            return
        queue.waiting[request.id] = request
        self.queued += 1
        if request.number > queue.last_number:
            queue.last_number = request.number
            queue.fresh.append(request)
        else:
            heapq.heappush(queue.requeued, (request.number, request.id))
        if request.spec.group:
            same = queue.groups.setdefault(request.spec.group, deque())
            at = len(same)
            while at and same[at - 1].number > request.number:  # a requeued request
                at -= 1
            same.insert(at, request)

    def drop(self, request: RolloutRequest) -> None:
        queue = self.queues[request.spec.class_]
        if queue.waiting.pop(request.id, None) is None:
            return
        self.queued -= 1
        group = request.spec.group
        if group:
            same = queue.groups[group]
            if same[0] is request:
                same.popleft()
            else:
                same.remove(request)
            if not same:
                del queue.groups[group]
        if len(queue.fresh) + len(queue.requeued) > 64 + 2 * len(queue.waiting):
            queue.fresh.clear()
            queue.requeued = sorted((request.number, request.id) for request in queue.waiting.values())

    def waiting(self) -> list[RolloutRequest]:
        """In order of arrival."""
        queued = (request for queue in self.queues.values() for request in queue.waiting.values())
        return sorted(queued, key=lambda request: request.number)

    def _head(self) -> tuple[RequestQueue, RolloutRequest] | None:
        for queue in self._by_priority:
            waiting, fresh, requeued = queue.waiting, queue.fresh, queue.requeued
            if not waiting:
                continue
            while fresh and fresh[0].id not in waiting:
                fresh.popleft()
            while requeued and requeued[0][1] not in waiting:
                heapq.heappop(requeued)
            if not requeued or (fresh and fresh[0].number < requeued[0][0]):
                return queue, fresh[0]
            return queue, waiting[requeued[0][1]]
        return None

    # ---- choice ------------------------------------------------------------------------------------------------

    def choose(self) -> RoutingChoice | None:
        """The next request and its worker; None: nothing waits, or no worker has capacity."""
        if self.queued == 0:
            return None
        lane = self.least_loaded()
        if lane is None:
            return None
        head = self._head()
        if head is None:
            return None
        queue, request = head
        home = self._session_home(request) or self._home(request, lane)
        if home is not None:
            return RoutingChoice(request, home.worker, True)
        match = self._prefix_match(queue, request, lane)
        if match is not None:
            return RoutingChoice(match, lane.worker, True)
        if request.avoid == lane.worker:
            lane = self.least_loaded(request.avoid) or lane
        return RoutingChoice(request, lane.worker, False)

    def _session_home(self, request: RolloutRequest) -> WorkerLane | None:
        """The worker that served its session last, while it has capacity, whatever the loads."""
        session = request.spec.session
        lane = self.lanes.get(self.sessions.get(session, "")) if session else None
        return lane if lane is not None and lane.has_capacity and lane.worker != request.avoid else None

    def _home(self, request: RolloutRequest, least: WorkerLane) -> WorkerLane | None:
        """The worker with its prefix in cache, while going there pays."""
        group = request.spec.group
        if not group:
            return None
        lane = self.lanes.get(self.homes.get(group, ""))
        if lane is None or not lane.has_capacity or lane.worker == request.avoid or group not in lane.groups:
            return None
        worth = self.rules.affinity_requests * self.predictor.cost(request.spec, request.tokens)
        return lane if lane.load - least.load <= worth else None

    def _prefix_match(self, queue: RequestQueue, head: RolloutRequest, lane: WorkerLane) -> RolloutRequest | None:
        """A request near the head of the queue whose prefix this worker has."""
        if not queue.groups or head.spec.group in lane.groups:
            return None
        last = head.number + self.rules.affinity_window
        for group in lane.groups:
            same = queue.groups.get(group)
            if (
                same is not None
                and same[0].number <= last
                and same[0].avoid != lane.worker
                and self._session_home(same[0]) in (None, lane)
            ):
                return same[0]
        return None

    def sent(self, request: RolloutRequest, worker: str, cost: int) -> None:
        self.drop(request)
        lane = self.lanes[worker]
        lane.load += cost
        lane.count += 1
        group = request.spec.group
        if group:
            lane.groups.pop(group, None)
            lane.groups[group] = None
            if len(lane.groups) > GROUPS_PER_WORKER:
                del lane.groups[next(iter(lane.groups))]
            _keep(self.homes, group, worker)
        if request.spec.session:
            _keep(self.sessions, request.spec.session, worker)
        self._place(lane)


def _keep(homes: dict[str, str], name: str, worker: str) -> None:
    """The latest last; the oldest is forgotten."""
    homes.pop(name, None)
    homes[name] = worker
    if len(homes) > HOMES_KEPT:
        del homes[next(iter(homes))]
