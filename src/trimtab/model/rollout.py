"""The nouns of rollout: workers (one rollout engine each), requests (one generation asked each), refits and membership.

Frozen facts, checked where they are made. Requests are counts and ids here: prompts, tokens and texts stay with whoever
holds them. Weight versions are whole numbers that the trainer gives out. What is done is decided in `trimtab.fleet`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields

from trimtab.core.errors import InputError
from trimtab.core.numbers import LONGEST_S, MAX_COUNT, SHORTEST_S, is_number, is_whole
from trimtab.core.reasons import Reason

DEFAULT_CLASS = "default"
MAX_WORKERS = 1_000_000
MAX_TRIES = 100  # of what is tried again twice as late each time


class WorkerState(str, enum.Enum):
    """Where a worker is."""

    active = "active"  # serves, and its weights are the trainer's
    draining = "draining"  # takes nothing new; what it has goes on until its deadline
    inactive = "inactive"  # off: its cache is flushed and its memory given back; can be had again
    starting = "starting"  # being started or woken; takes nothing yet
    stale = "stale"  # up, but its weights are older than the trainer's, or nobody vouches for them
    empty = "empty"  # up, but its weights were discarded: its version is none, whatever it reports
    suspect = "suspect"  # it fails or is silent: what runs there goes on, nothing new goes there
    lost = "lost"  # gone; what it had goes elsewhere


UP = (WorkerState.active, WorkerState.draining, WorkerState.stale, WorkerState.empty, WorkerState.suspect)


class RequestState(str, enum.Enum):
    """Where a request is."""

    queued = "queued"  # accepted; waits for room, or for a version
    sent = "sent"  # with a worker, nothing heard yet
    streaming = "streaming"  # with a worker, tokens come
    moving = "moving"  # its attempt is being cut; goes to another worker with what it has
    done = "done"  # answered
    failed = "failed"  # answered, with the reason why there is no (whole) answer


ANSWERED = (RequestState.done, RequestState.failed)


class WorkerVerb(str, enum.Enum):
    """What is done to a worker. Each takes time, and ends in ActDone or ActFailed."""

    start = "start"  # the engine's process
    wake = "wake"  # memory back, cache empty
    sleep = "sleep"  # flush the cache and give the memory back; only ever with no request running
    stop = "stop"  # end the process
    pause = "pause"  # requests stay where they are and make no token
    resume = "resume"
    refit = "refit"  # load the trainer's weights
    probe = "probe"  # one small generation, to see whether it answers


class Owner(str, enum.Enum):
    """Who carries out a verb; with `trainer` trimtab only watches."""

    trimtab = "trimtab"
    trainer = "trainer"


@dataclass(frozen=True)
class Ownership:
    """Who carries out what, per verb."""

    sleep: Owner = Owner.trimtab  # and wake
    pause: Owner = Owner.trimtab  # and resume
    refit: Owner = Owner.trainer
    abort: Owner = Owner.trimtab  # of requests nobody cancelled: at the end of a drain, at a refit


class RefitWay(str, enum.Enum):
    """How weights reach the engines."""

    disk = "disk"  # each engine reads them for itself
    collective = "collective"  # one group of trainer and engines, rebuilt on a new epoch
    same_gpu = "same_gpu"  # trainer and engine share devices


class InFlight(str, enum.Enum):
    """What becomes of requests that run when a refit begins. Those that may not span versions restart either way."""

    keep = "keep"  # they stay, paused, and go on under the new weights
    move = "move"  # they are cut and go on elsewhere, or here, once somebody is current


class ReleaseSupport(str, enum.Enum):
    """What is known of the release of an engine's software."""

    tried = "tried"  # or of a kind that has none
    untried = "untried"  # another than the adapter was written from
    unsaid = "unsaid"  # the engine does not say it


class End(str, enum.Enum):
    """How a request was answered."""

    stop = "stop"  # the model ended it
    length = "length"  # it has all the tokens it may have
    abort = "abort"  # cut by others than trimtab; partial
    cancelled = "cancelled"  # by the client
    failed = "failed"


def _seconds(name: str, value: float | None) -> None:
    if value is not None and not is_number(value, 0, LONGEST_S):
        raise InputError(f"{name} is {value}", hint=f"seconds, 0 or more, up to {LONGEST_S:g}")


@dataclass(frozen=True)
class RequestClass:
    """Requests of one kind: rollout, validation, reward ..."""

    name: str = DEFAULT_CLASS
    priority: int = 0  # the higher goes first
    queue_limit: int = 10_000  # requests that may wait; the next one is refused
    deadline_s: float | None = 3_600.0  # from arrival, where the request does not say; None: waits for ever

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("a request class needs a name")
        if not is_whole(self.queue_limit, 1):
            raise InputError(f"class {self.name}: queue_limit is {self.queue_limit}", hint=f"from 1 to {MAX_COUNT}")
        if not is_whole(self.priority, -MAX_COUNT):
            raise InputError(f"class {self.name}: priority is {self.priority}", hint="a whole number")
        _seconds(f"class {self.name}: deadline_s", self.deadline_s)


@dataclass(frozen=True)
class RequestSpec:
    """One generation asked. Several samples of one prompt are several requests of one group."""

    id: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    class_: str = DEFAULT_CLASS
    group: str = ""  # requests of one group begin alike; empty: like nobody's
    version: int | None = None  # only these weights
    at_least: int | None = None  # these weights or newer
    resumable: bool = True  # False: a cut would change the answer (seed, penalties, grammar), so it restarts
    spans: bool = True  # False: all of it from one version (staleness 0); a refit restarts it
    key: str = ""  # given by the client: a second request with it gets the answer of the first
    deadline: float | None = None
    watched: bool = True  # False: its tokens are not heard of here (a lease), so silence means nothing

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("a request needs an id")
        if self.prompt_tokens < 0 or self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(
                f"request {self.id}: {self.prompt_tokens} prompt tokens, {self.min_tokens} to {self.max_tokens} asked",
                hint="prompt_tokens >= 0, max_tokens >= 1, 0 <= min_tokens <= max_tokens",
            )


@dataclass(frozen=True)
class WorkerSpec:
    """One rollout engine, as whoever adds it describes it."""

    id: str
    limit: int = 64  # requests at once
    token_limit: int | None = None  # full when so many tokens are outstanding
    size: int = 1  # ranks of a collective (tensor parallel x pipeline parallel)
    startable: bool = False  # trimtab starts and stops its process; False: attached, somebody else runs it
    can_sleep: bool = True
    can_pause: bool = True  # in place, keeping what runs
    sleep_keeps_weights: bool = True  # False: after a sleep it is EMPTY
    node: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("a worker needs an id")
        if not (
            is_whole(self.limit, 1)
            and is_whole(self.size, 1)
            and is_whole(1 if self.token_limit is None else self.token_limit, 1)
        ):
            raise InputError(
                f"worker {self.id}: limit {self.limit}, size {self.size}, token_limit {self.token_limit}",
                hint="each at least 1",
            )


@dataclass(frozen=True)
class RolloutRules:
    """How workers and requests are judged. Seconds, unless said otherwise."""

    min_workers: int = 1  # by plan
    max_workers: int = 8
    capacity: int = 8  # requests that one worker is expected to carry, for scaling
    version: int = 0  # of the weights that engines are started with
    classes: tuple[RequestClass, ...] = (RequestClass(),)
    ownership: Ownership = Ownership()
    monitor_s: float = 5.0  # between two looks at the load
    drain_s: float = 30.0  # then what is left moves
    abort_s: float = 5.0  # for a cut to be confirmed; then it counts as done and the worker as suspect
    stall_s: float = 120.0  # without a token: a request is moved, and a worker silent for so long is suspect
    suspect_s: float = 2.0  # unwell for so long: suspect
    lost_s: float = 30.0  # unwell for so long: lost
    start_s: float = 600.0
    wake_s: float = 60.0
    sleep_s: float = 60.0
    stop_s: float = 60.0
    pause_s: float = 30.0
    refit_s: float = 600.0
    probe_s: float = 10.0
    back_off_s: float = 1.0  # before a failed start, wake or refit is tried again; doubles
    tries: int = 3  # of a start, wake, stop or refit in a row; and probes of a suspect
    faults: int = 3  # broken requests in a row: suspect
    retries: int = 5  # of one request after breaks; moves that trimtab asks for are not counted
    poison_count: int = 3  # engines in a row that were gone before its first token: it is not tried on another one
    load_fresh_s: float = 5.0  # an engine's own figures are believed for so long
    kv_full: float = 0.97  # share of its cache in use: nothing more for it
    affinity_requests: float = 2.0  # a prefix is worth waiting behind so many requests more than elsewhere
    affinity_window: int = 64  # so many places in the queue may be jumped for a prefix
    answers_kept: int = 1_000  # answered requests that can still be asked about
    key_kept_s: float = 600.0  # for which an answer is given again for its key

    def __post_init__(self) -> None:
        if not (
            is_whole(self.min_workers, 0, MAX_WORKERS) and is_whole(self.max_workers, self.min_workers, MAX_WORKERS)
        ):
            raise InputError(
                f"min_workers is {self.min_workers}, max_workers {self.max_workers}",
                hint=f"0 <= min_workers <= max_workers <= {MAX_WORKERS}",
            )
        if not is_whole(self.capacity, 1):
            raise InputError(f"capacity is {self.capacity} requests a worker", hint="at least 1")
        if not is_whole(self.version, maximum=math.inf):
            raise InputError(f"version is {self.version}", hint="a whole number")
        names = [one.name for one in self.classes]
        if not names or len(set(names)) < len(names):
            raise InputError(f"request classes: {', '.join(names) or 'none'}", hint="at least one, each name once")
        for one in fields(self):
            if one.name.endswith("_s"):
                _seconds(one.name, getattr(self, one.name))
        if self.monitor_s < SHORTEST_S:
            raise InputError(f"monitor_s is {self.monitor_s}", hint=f"seconds, {SHORTEST_S:g} or more")
        for name, maximum in (("kv_full", 1.0), ("affinity_requests", 1e6)):
            if not is_number(getattr(self, name), 0, maximum):
                raise InputError(f"{name} is {getattr(self, name)}", hint=f"from 0 to {maximum:g}")
        if self.lost_s < self.suspect_s:
            raise InputError(f"lost_s {self.lost_s} is under suspect_s {self.suspect_s}")
        counts = {"tries": 1, "faults": 1, "poison_count": 1, "retries": 0, "affinity_window": 0, "answers_kept": 0}
        for name, minimum in counts.items():
            maximum = MAX_TRIES if name == "tries" else MAX_COUNT
            if not is_whole(getattr(self, name), minimum, maximum):
                raise InputError(f"{name} is {getattr(self, name)}", hint=f"a whole number from {minimum} to {maximum}")


@dataclass(frozen=True)
class Span:
    """So many tokens in a row that one version of the weights made."""

    version: int
    tokens: int


@dataclass(frozen=True)
class RefitMember:
    """A worker's place in a collective: ranks offset .. offset + size - 1."""

    worker: str
    size: int
    offset: int
    incarnation: int  # grows whenever the worker's process is another one


@dataclass(frozen=True)
class Membership:
    """Who takes part in refits. Frozen from refit begin to refit end; a new epoch exactly when somebody is another."""

    epoch: int
    members: tuple[RefitMember, ...] = ()
    frozen: bool = False
    joined: tuple[str, ...] = ()  # since the epoch before
    left: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Of all members together."""
        return sum(one.size for one in self.members)


@dataclass(frozen=True)
class WorkerView:
    """A worker as others see it."""

    worker: str
    state: WorkerState
    reason: Reason
    since: float
    version: int | None  # as confirmed, not as reported; None: nobody knows
    running: int  # requests that are really there
    outstanding_tokens: int  # predicted
    spec: WorkerSpec
    paused: bool = False
    asleep: bool = False
    doing: WorkerVerb | None = None
    deadline: float | None = None  # of what is being done, or of a drain
    served: int = 0  # requests finished
    paused_elsewhere: bool = False  # by others than trimtab
    taken: bool = False  # given to others
    outside: int = 0  # requests there that are not ours, as far as its figures are fresh


@dataclass(frozen=True)
class RequestView:
    """A request as others see it."""

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


@dataclass(frozen=True)
class ScaleStep:
    """One decision about the number of workers: why, what it expected, and whether that came true."""

    at: float
    before: int  # that served
    workers: int  # asked
    reason: Reason
    expects: str = ""
    changed: tuple[str, ...] = ()  # workers that were woken, started, called back or drained
    came_true: bool | None = None  # None: not known yet
