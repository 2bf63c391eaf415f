"""Rollout: workers (one engine each), requests (one generation each), refits and membership; validated on construction.

Requests are counts and ids here: prompts, tokens and texts stay in the runtime. Weight versions are integers issued by
the trainer. Decisions are made in `trimtab.machines.rollout`.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any, ClassVar

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen, Message
from trimtab.core.numbers import COUNT, LONGEST_S, MAX_COUNT, SHORTEST_S, Ranges, check_fields, is_number
from trimtab.core.reasons import Reason
from trimtab.model.elastic_config import MAX_WORKERS, ElasticConfig

DEFAULT_CLASS = "default"
MAX_TRIES = 100  # of retries whose delay doubles


class WorkerState(str, enum.Enum):
    """State of a worker."""

    active = "active"  # serves, and its weights are the trainer's
    draining = "draining"  # accepts no requests; its requests run on until its deadline
    inactive = "inactive"  # asleep: cache flushed and memory released; can be woken
    starting = "starting"  # being started or woken; accepts no requests yet
    stale = "stale"  # up, but its weights are older than the trainer's, or unconfirmed
    empty = "empty"  # up, but its weights were discarded: its version is None, whatever it reports
    suspect = "suspect"  # failing or silent: its requests run on, it gets no new ones
    lost = "lost"  # gone; its requests move


UP = (WorkerState.active, WorkerState.draining, WorkerState.stale, WorkerState.empty, WorkerState.suspect)


class RequestState(str, enum.Enum):
    """State of a request."""

    queued = "queued"  # accepted; waits for a worker, or for a version
    sent = "sent"  # dispatched, no token yet
    streaming = "streaming"  # dispatched, tokens arrive
    moving = "moving"  # its attempt is being aborted; continues on another worker with its tokens
    done = "done"  # answered
    failed = "failed"  # answered, with the reason why the answer is missing or partial


ANSWERED = (RequestState.done, RequestState.failed)


class WorkerVerb(str, enum.Enum):
    """An action on a worker. Each takes time, and ends in ActionDone or ActionFailed."""

    start = "start"  # the engine process
    wake = "wake"  # memory allocated again, cache empty
    sleep = "sleep"  # flush the cache and release the memory; only with no request running
    stop = "stop"  # the engine process
    pause = "pause"  # requests stay in place and generate no token
    resume = "resume"
    refit = "refit"  # load the trainer's weights
    probe = "probe"  # one small generation, as a health check


class Owner(str, enum.Enum):
    """Who executes an action; with `trainer` trimtab only observes."""

    trimtab = "trimtab"
    trainer = "trainer"


class Ownership(Frozen):
    """Owner of each action."""

    sleep: Owner = Owner.trimtab  # and wake
    pause: Owner = Owner.trimtab  # and resume
    refit: Owner = Owner.trainer
    abort: Owner = Owner.trimtab  # of requests that were not cancelled: at the end of a drain, at a refit


class RefitWay(str, enum.Enum):
    """How weights reach the engines."""

    disk = "disk"  # each engine reads them itself
    collective = "collective"  # one process group of trainer and engines, rebuilt on a new epoch
    same_gpu = "same_gpu"  # trainer and engine share devices


class InFlight(str, enum.Enum):
    """What happens to running requests when a refit begins. Those that may not span versions restart either way."""

    keep = "keep"  # they stay, paused, and continue under the new weights
    move = "move"  # they are aborted and continue on any worker with current weights


class ReleaseSupport(str, enum.Enum):
    """Whether an engine's release was tested."""

    tried = "tried"  # or an engine without releases
    untried = "untried"  # not the release that the adapter was written for
    unsaid = "unsaid"  # the engine does not report it


class End(str, enum.Enum):
    """How a request ended."""

    stop = "stop"  # the model ended it
    length = "length"  # max_tokens reached
    abort = "abort"  # by another client than trimtab; partial
    cancelled = "cancelled"  # by the client
    failed = "failed"


class RequestClass(Frozen):
    """Requests of one kind: rollout, validation, reward ..."""

    name: str = DEFAULT_CLASS
    priority: int = 0  # higher goes first
    queue_limit: int = 10_000  # queued requests; the next one is refused
    deadline_s: float | None = 3_600.0  # from arrival, where the request states none; None: no deadline

    RANGES: ClassVar[Ranges] = {"priority": (-MAX_COUNT, MAX_COUNT), "queue_limit": (1, MAX_COUNT)}

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("a request class needs a name")
        check_fields(self, f"class {self.name}")


class RequestSpec(Message):
    """One generation. Several samples of one prompt are several requests of one group."""

    id: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    class_: str = DEFAULT_CLASS
    group: str = ""  # requests of one group share a prefix; empty: none
    version: int | None = None  # exactly these weights
    at_least: int | None = None  # these weights or newer
    resumable: bool = True  # False: resuming would change the answer (seed, penalties, grammar), so it restarts
    spans: bool = True  # False: generated by one version only (staleness 0); a refit restarts it
    key: str = ""  # idempotency key of the client: a second request gets the answer of the first
    deadline: float | None = None
    watched: bool = True  # False: its tokens are not reported here (a lease), so silence is no fault
    session: str = ""  # requests of one session go to one worker while it is open; empty: none

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("a request needs an id")
        if self.prompt_tokens < 0 or self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(
                f"request {self.id}: {self.prompt_tokens} prompt tokens, {self.min_tokens} to {self.max_tokens} asked",
                hint="prompt_tokens >= 0, max_tokens >= 1, 0 <= min_tokens <= max_tokens",
            )


class WorkerSpec(Frozen):
    """One rollout engine, as its launcher describes it."""

    id: str
    limit: int = 64  # concurrent requests
    token_limit: int | None = None  # outstanding tokens
    size: int = 1  # ranks of a collective (tensor parallel x pipeline parallel)
    startable: bool = False  # trimtab starts and stops its process; False: attached
    can_sleep: bool = True
    can_pause: bool = False  # in place, keeping running requests
    sleep_keeps_weights: bool = True  # False: it is `empty` after a sleep
    node: str = ""

    RANGES: ClassVar[Ranges] = dict.fromkeys(("limit", "token_limit", "size"), (1, MAX_COUNT))

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("a worker needs an id")
        check_fields(self, f"worker {self.id}")


class RolloutRules(Frozen):
    """How workers and requests are judged. Times in seconds."""

    min_workers: int = 1  # by plan
    max_workers: int = 8
    capacity: int = 8  # requests per worker, for scaling
    version: int = 0  # of the initial weights
    classes: tuple[RequestClass, ...] = (RequestClass(),)
    ownership: Ownership = Ownership()
    monitor_s: float = 5.0  # between two load samples
    drain_s: float = 30.0  # then remaining requests move
    abort_s: float = 5.0  # for an abort to be confirmed; then it counts as done and the worker as suspect
    stall_s: float = 120.0  # without a token: the request moves and the worker is suspect
    suspect_s: float = 2.0  # unhealthy this long: suspect
    lost_s: float = 30.0  # unhealthy this long: lost
    start_s: float = 600.0
    wake_s: float = 60.0
    sleep_s: float = 60.0
    stop_s: float = 60.0
    pause_s: float = 30.0
    refit_s: float = 600.0
    probe_s: float = 10.0
    back_off_s: float = 1.0  # before a failed start, wake or refit is retried; doubles
    tries: int = 3  # of a start, wake, stop or refit; and probes of a suspect
    faults: int = 3  # broken requests in a row: suspect
    retries: int = 5  # of a request after failures; moves by trimtab are not counted
    poison_count: int = 3  # engines in a row that died before its first token: it is not retried
    load_fresh_s: float = 5.0  # age up to which an engine's own figures are used
    kv_full: float = 0.97  # KV cache use above which an engine gets no more requests
    affinity_requests: float = 2.0  # extra queue depth that a prefix hit is worth
    affinity_window: int = 64  # queue positions that may be skipped for a prefix hit
    answers_kept: int = 1_000  # answered requests that are remembered
    key_kept_s: float = 600.0  # how long an answer is returned again for its key
    # An answer is fetched in pieces of so many tokens: what a lost engine costs. None: whole; also inf, or "10 s".
    resume_every: float | None = 512
    resume_every_s: float | None = None  # the same in seconds; the shorter of both counts

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("min_workers", "max_workers"), (0, MAX_WORKERS)),
        **dict.fromkeys(("capacity", "faults", "poison_count"), (1, MAX_COUNT)),
        **dict.fromkeys(("retries", "affinity_window", "answers_kept"), COUNT),
        **dict.fromkeys(("monitor_s", "resume_every_s"), (SHORTEST_S, LONGEST_S)),
        "version": (-math.inf, math.inf),
        "tries": (1, MAX_TRIES),
        "kv_full": (0.0, 1.0),
        "affinity_requests": (0.0, 1e6),
    }

    def __post_init__(self) -> None:
        tokens, seconds = resume_bounds(self.resume_every)
        object.__setattr__(self, "resume_every", tokens)
        if seconds is not None:
            object.__setattr__(self, "resume_every_s", seconds)
        check_fields(self, "the rules of the rollout pool")
        if self.min_workers > self.max_workers:
            raise InputError(f"min_workers {self.min_workers} is above max_workers {self.max_workers}")
        names = [request_class.name for request_class in self.classes]
        if not names or len(set(names)) < len(names):
            raise InputError(f"request classes: {', '.join(names) or 'none'}", hint="at least one, each name once")
        if self.lost_s < self.suspect_s:
            raise InputError(f"lost_s {self.lost_s:g} is under suspect_s {self.suspect_s:g}")

    @classmethod
    def of(cls, elastic: ElasticConfig, **others: Any) -> RolloutRules:
        """The rules that the settings of elastic rollout state, and others."""
        return cls(**{rule: getattr(elastic, name) for rule, name in ELASTIC_RULES.items()} | others)


ELASTIC_RULES = {
    "min_workers": "min_workers",
    "max_workers": "max_workers",
    "capacity": "requests_per_worker_capacity",
    "monitor_s": "monitoring_interval",
    "drain_s": "drain_timeout",
}  # rules that `ElasticConfig` states, and their names there


def resume_bounds(given: object) -> tuple[float | None, float | None]:
    """Tokens and seconds of a `resume_every`: 128, inf, or a text with a unit: `10 s`."""
    number: Any = given
    unit = ""
    if isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|inf)\s*(s|tokens)?\s*", given)
        number, unit = (float(found[1]), found[2] or "") if found else (math.nan, "")
    if number is None or number == math.inf:
        return None, None
    if unit == "s":
        if is_number(number, SHORTEST_S, LONGEST_S):
            return None, number
    elif is_number(number, 1, MAX_COUNT) and number == int(number):
        return float(number), None
    raise InputError(f"resume_every is {given!r}", hint="tokens, at least 1; seconds as '10 s'; inf: whole answers")


class Span(Message):
    """Consecutive tokens generated by one version of the weights."""

    version: int
    tokens: int


class RefitMember(Frozen):
    """A worker's place in a collective: ranks offset .. offset + size - 1."""

    worker: str
    size: int
    offset: int
    incarnation: int  # of the worker's process


class Membership(Frozen):
    """Members of refits. Frozen during a refit; a new epoch exactly when a member changes."""

    epoch: int
    members: tuple[RefitMember, ...] = ()
    frozen: bool = False
    joined: tuple[str, ...] = ()  # since the epoch before
    left: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return sum(member.size for member in self.members)


class WorkerView(Frozen):
    """A worker as other components see it."""

    worker: str
    state: WorkerState
    reason: Reason
    since: float
    version: int | None  # as confirmed, not as reported; None: unknown
    running: int  # requests on it
    outstanding_tokens: int  # predicted
    spec: WorkerSpec
    paused: bool = False
    asleep: bool = False
    doing: WorkerVerb | None = None
    deadline: float | None = None  # of `doing`, or of a drain
    served: int = 0  # requests finished
    paused_elsewhere: bool = False  # by another client than trimtab
    taken: bool = False  # lent to others
    outside: int = 0  # requests of other clients, as far as its figures are fresh


class RequestView(Frozen):
    """A request as other components see it."""

    request: str
    state: RequestState
    reason: Reason
    since: float
    spec: RequestSpec
    tokens: int
    worker: str = ""
    attempt: int = 0
    breaks: int = 0
    moves: int = 0
    spans: tuple[Span, ...] = ()


class ScaleStep(Frozen):
    """One scaling decision: why, what it expected, and whether that came true."""

    at: float
    before: int  # workers that served
    workers: int  # target
    reason: Reason
    expects: str = ""
    changed: tuple[str, ...] = ()  # workers that were woken, started, recalled or drained
    came_true: bool | None = None  # None: not known yet
