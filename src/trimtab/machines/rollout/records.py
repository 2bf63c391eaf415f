"""Records of the rollout machine: workers, requests, attempts, refit; and their read-only views."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.core.errors import InputError, meant
from trimtab.core.machine import earliest
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.model.rollout import (
    End,
    InFlight,
    RefitWay,
    RequestSpec,
    RequestState,
    RequestView,
    Span,
    WorkerSpec,
    WorkerState,
    WorkerVerb,
    WorkerView,
)

FADES_AFTER = 32  # values


@dataclass(eq=False)
class SentAttempt:
    """An attempt that a worker holds, as far as known."""

    request: str
    attempt: int
    base: int  # tokens of the answer when it was sent
    at: float
    last: float  # when it last made progress
    cost: int  # predicted remaining tokens, plus its share of the prompt
    abort_by: float | None = None  # abort deadline, once AbortAttempt was issued
    orphan: bool = False  # the abort was not confirmed in time; no longer waited for


@dataclass(eq=False)
class OngoingAction:
    """The action in progress on a worker."""

    verb: WorkerVerb
    attempt: int
    since: float
    deadline: float
    version: int | None = None  # of a refit


@dataclass(eq=False)
class RolloutWorker:
    """A rollout worker."""

    spec: WorkerSpec
    state: WorkerState
    reason: Reason
    since: float
    number: int  # in order of joining
    version: int | None = None  # confirmed; None: unknown weights
    incarnation: int = 0  # increases with every new process
    was_lost: bool = False  # cleared only by a confirmed refit
    started: bool = False  # its process exists, as far as known
    asleep: bool = False
    paused: bool = False  # by trimtab; no resume confirmed since
    paused_elsewhere: bool = False  # by another client: requests sent there would hang
    aborted_at: float = 0.0  # when another client last began to abort requests there ...
    hold_until: float | None = None  # ... and how long nothing is sent there: it may be aborting all of them
    unhealthy: bool = False  # by its last health check
    disabled: bool = False  # its refits or starts failed too often; not retried
    leaving: bool = False  # being removed
    reclaimed: bool = False  # lent out (WorkerReclaimed)
    drain_deadline: float | None = None  # set exactly while draining; then remaining requests are aborted
    drain_started_at: float | None = None
    drain_expired: bool = False  # the drain deadline has passed
    last_response_at: float = 0.0  # last sign of progress of its requests
    faults: int = 0  # consecutive failed requests
    failures: int = 0  # consecutive failed starts, wakes or refits
    probes: int = 0  # consecutive failed probes
    retry_at: float | None = None  # backoff: nothing is tried before
    attempt: int = 0  # of actions
    action: OngoingAction | None = None
    held: dict[str, SentAttempt] = field(default_factory=dict)  # by request#attempt
    # Attempts held when it was lost, while its process may still run.
    zombies: dict[str, SentAttempt] = field(default_factory=dict)
    outside: int = 0  # requests of other clients, by its own figures ...
    kv_full: bool = False
    load_fresh_until: float | None = None  # ... which are fresh until then
    generated_at: float = 0.0  # when its own figures last showed that it makes tokens
    reports_load: bool = False  # it has reported figures: having none now does not mean idle
    served: int = 0
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def serves(self) -> bool:
        return self.state is WorkerState.active and not self.paused and not self.paused_elsewhere

    @property
    def is_open(self) -> bool:
        return self.serves and self.hold_until is None

    @property
    def outstanding_tokens(self) -> int:
        return sum(attempt.cost for attempt in self.held.values())

    @property
    def known_outside(self) -> int:
        """Requests of other clients, while its figures are fresh."""
        return self.outside if self.load_fresh_until is not None else 0

    @property
    def due(self) -> float | None:
        """When its action, drain, retry, hold or load figures expire."""
        action_due = None if self.action is None else self.action.deadline
        drain_due = None if self.drain_expired else self.drain_deadline
        return earliest(self.retry_at, self.load_fresh_until, self.hold_until, action_due, drain_due)


@dataclass(eq=False)
class RolloutRequest:
    """A rollout request."""

    spec: RequestSpec
    number: int  # in order of arrival; kept, so that a moved request keeps its place
    state: RequestState
    reason: Reason
    since: float
    arrived: float
    deadline: float | None = None
    tokens: int = 0  # of the answer so far
    spans: list[Span] = field(default_factory=list)  # of those tokens
    attempt: int = 0
    worker: str = ""  # of its attempt; empty unless sent, streaming or moving
    restart: bool = False  # its tokens are dropped at the next abort
    breaks: int = 0
    poison_count: int = 0  # consecutive engines that died before its first token
    moves: int = 0
    avoid: str = ""  # the worker it last failed on
    recipients: list[str] = field(default_factory=list)  # ids to answer: itself, and others with its key
    end: End | None = None  # once answered
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.spec.id


@dataclass(eq=False)
class OngoingRefit:
    """A refit between begin and end."""

    version: int
    way: RefitWay
    in_flight: InFlight
    deadline: float
    waiting: list[str]  # members that are not quiesced yet
    ready: bool = False  # RefitReady was issued
    confirmed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(eq=False)
class FadingMean:
    """A running mean that weights recent values."""

    value: float | None = None
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.value is None:
            self.value = value
        else:
            self.value += (value - self.value) / min(self.count, FADES_AFTER)


def attempt_key(request: str, attempt: int) -> str:
    return f"{request}#{attempt}"


def worker_view(worker: RolloutWorker) -> WorkerView:
    action = worker.action
    return WorkerView(
        worker.id,
        worker.state,
        worker.reason,
        worker.since,
        worker.version,
        len(worker.held),
        worker.outstanding_tokens,
        worker.spec,
        paused=worker.paused or worker.paused_elsewhere,
        asleep=worker.asleep,
        doing=None if action is None else action.verb,
        deadline=worker.drain_deadline if action is None else action.deadline,
        served=worker.served,
        paused_elsewhere=worker.paused_elsewhere,
        taken=worker.reclaimed,
        outside=worker.known_outside,
    )


def request_view(request: RolloutRequest) -> RequestView:
    return RequestView(
        request.id,
        request.state,
        request.reason,
        request.since,
        request.spec,
        request.tokens,
        request.worker,
        request.attempt,
        request.breaks,
        request.moves,
        tuple(request.spans),
    )


def add_tokens(spans: list[Span], version: int, tokens: int) -> None:
    """Append tokens made by a version."""
    if tokens <= 0:
        return
    if spans and spans[-1].version == version:
        spans[-1] = Span(version, spans[-1].tokens + tokens)
    else:
        spans.append(Span(version, tokens))


def known_worker(workers: dict[str, RolloutWorker], name: str) -> RolloutWorker:
    """The worker of that name; InputError with a hint otherwise."""
    worker = workers.get(name)
    if worker is None:
        hint = meant(name, workers, f"workers: {', '.join(sorted(workers)[:8]) or 'none'}")
        raise InputError(f"there is no worker {name}", hint=hint)
    return worker
