"""What the rollout machine remembers of workers, requests and a refit, and how others see it. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.core.errors import InputError, nearest
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.model.rollout import (
    End,
    InFlight,
    Membership,
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


@dataclass(eq=False)
class SentAttempt:
    """One attempt that is really on a worker, as far as anybody knows."""

    request: str
    attempt: int
    base: int  # tokens of the answer that existed when it was sent
    at: float
    last: float  # when it was last heard of
    cost: int  # tokens that it is predicted to make still, with its share of the prompt
    abort_by: float | None = None  # an AbortSent was said; by then it must have ended
    orphan: bool = False  # it did not, and nobody waits for it any more


@dataclass(eq=False)
class OngoingAction:
    """What is being done to a worker."""

    verb: WorkerVerb
    attempt: int
    since: float
    deadline: float
    version: int | None = None  # of a refit


@dataclass(eq=False)
class RolloutWorker:
    """One worker."""

    spec: WorkerSpec
    state: WorkerState
    reason: Reason
    since: float
    number: int  # in order of joining
    version: int | None = None  # confirmed; None: nobody vouches for what it has
    incarnation: int = 0  # grows whenever its process is another
    was_lost: bool = False  # nothing but a confirmed refit takes this away
    started: bool = False  # its process is there, as far as anybody knows
    asleep: bool = False
    paused: bool = False  # trimtab asked for it, and no resume has been confirmed since
    paused_elsewhere: bool = False  # by others: requests sent there would hang
    unhealthy: bool = False  # as its health check last said
    disabled: bool = False  # out of service for good: its refits or starts failed too often
    leaving: bool = False  # to go for good
    reclaimed: bool = False  # given to others
    drain_deadline: float | None = None  # when what is left on it is cut; exactly while draining
    drain_started_at: float | None = None
    drain_expired: bool = False  # what was left has been told to end
    last_response_at: float = 0.0  # when anything of its requests was last heard
    faults: int = 0  # requests broken in a row
    failures: int = 0  # starts, wakes or refits failed in a row
    probes: int = 0  # failed in a row
    retry_at: float | None = None  # nothing is tried before; then a tick does it
    attempt: int = 0  # of acts
    action: OngoingAction | None = None
    held: dict[str, SentAttempt] = field(default_factory=dict)  # by request#attempt: what is really there
    zombies: dict[str, SentAttempt] = field(
        default_factory=dict
    )  # what was there when it was lost, if its process may live
    outside: int = 0  # requests there that are not ours, by its own figures ...
    kv_full: bool = False
    load_fresh_until: float | None = None  # ... that are believed until then
    reports_load: bool = False  # it has given figures: having none now is not the same as having nothing to do
    served: int = 0
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its name."""
        return self.spec.id


@dataclass(eq=False)
class RolloutRequest:
    """One request."""

    spec: RequestSpec
    number: int  # in order of arrival; kept for life, so that whoever moves does not queue anew
    state: RequestState
    reason: Reason
    since: float
    arrived: float
    deadline: float | None = None
    tokens: int = 0  # of the answer, that exist
    spans: list[Span] = field(default_factory=list)  # of those tokens
    attempt: int = 0
    worker: str = ""  # where its attempt is; empty unless sent, streaming or moving
    restart: bool = False  # what it has is thrown away at the next cut
    breaks: int = 0
    poison_count: int = 0  # engines in a row that were gone before they made a token of it
    moves: int = 0
    avoid: str = ""  # the worker it broke on
    recipients: list[str] = field(default_factory=list)  # whom the answer goes to: itself, and others with its key
    end: End | None = None  # once answered
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its name."""
        return self.spec.id


@dataclass(eq=False)
class OngoingRefit:
    """A refit between its begin and its end."""

    version: int
    way: RefitWay
    in_flight: InFlight
    deadline: float
    waiting: list[str]  # members that are not quiet yet
    ready: bool = False  # RefitReady was said
    confirmed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(eq=False)
class FadingMean:
    """A running mean in which the past fades."""

    value: float | None = None
    count: int = 0

    def add(self, value: float) -> None:
        """One more."""
        self.count += 1
        if self.value is None:
            self.value = value
        else:
            self.value += (value - self.value) / min(self.count, FADES_AFTER)


FADES_AFTER = 32  # values


@dataclass(eq=False)
class RolloutCounters:
    """What else is in a snapshot: counters, and what people asked for."""

    now: float = 0.0
    version: int = 0  # of the trainer's weights
    min_workers: int = 1
    max_workers: int = 1
    arrivals: int = 0
    joins: int = 0
    next_evaluation: float | None = None
    manual_workers: int | None = None
    manual_until: float | None = None
    manual_why: str = ""
    holds: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    membership: Membership = field(default_factory=lambda: Membership(0))  # of the last refit, or of the open one
    answered: int = 0  # all that ever were
    refused: int = 0
    sleep_s: FadingMean = field(default_factory=FadingMean)
    wake_s: FadingMean = field(default_factory=FadingMean)
    drain_s: FadingMean = field(default_factory=FadingMean)
    service_s: FadingMean = field(default_factory=FadingMean)  # of a request, from being sent to its end


def attempt_key(request: str, attempt: int) -> str:
    """How an attempt is called on its worker."""
    return f"{request}#{attempt}"


def worker_view(worker: RolloutWorker, outstanding_tokens: int) -> WorkerView:
    """The worker as others see it."""
    action = worker.action
    return WorkerView(
        worker.id,
        worker.state,
        worker.reason,
        worker.since,
        worker.version,
        len(worker.held),
        outstanding_tokens,
        worker.spec,
        paused=worker.paused or worker.paused_elsewhere,
        asleep=worker.asleep,
        doing=None if action is None else action.verb,
        deadline=worker.drain_deadline if action is None else action.deadline,
        served=worker.served,
        paused_elsewhere=worker.paused_elsewhere,
        taken=worker.reclaimed,
        outside=worker.outside if worker.load_fresh_until is not None else 0,
    )


def request_view(request: RolloutRequest) -> RequestView:
    """The request as others see it."""
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
    """Tokens more, that this version made."""
    if tokens <= 0:
        return
    if spans and spans[-1].version == version:
        spans[-1] = Span(version, spans[-1].tokens + tokens)
    else:
        spans.append(Span(version, tokens))


def known_worker(workers: dict[str, RolloutWorker], name: str) -> RolloutWorker:
    """The worker of that name, or an error that says which there are."""
    worker = workers.get(name)
    if worker is None:
        near = nearest(name, workers)
        hint = f"did you mean {near}?" if near else "workers: " + (", ".join(sorted(workers)[:8]) or "none")
        raise InputError(f"there is no worker {name}", hint=hint)
    return worker


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
