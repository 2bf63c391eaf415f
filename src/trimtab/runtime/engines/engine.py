"""What every rollout engine can be asked, whatever it is: the protocol, its data, and the ways in which it fails.

An engine is stopped in one order: take it out of the routing, let its requests end or abort them, let it sleep or
release its memory, end the process. Each step is safe only after the one before it. Memory released under running
requests kills an SGLang server with all that it holds; a process that ends under running requests leaves connections
open and silent. So `sleep` refuses while requests run, unless the engine itself has confirmed a pause that ended or
put back every one of them.

What must never happen is a request sent to an engine that is paused or asleep: it would neither fail nor be answered,
only hang, and no counter of the engine would show it. There is therefore no way from `pause` or `sleep` back to
`generate` except a `resume` or `wake` that the engine confirmed, or, where somebody else had paused it, a look that
saw it serving again. A pause that failed leaves the gate shut: nobody knows what the engine made of it.

Nothing here is waited for without a deadline, and whatever ends early says what had been generated until then.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError


class FinishReason(str, enum.Enum):
    """Why a stream ended."""

    stop = "stop"  # an end token, a stop id or a stop string
    length = "length"  # as many tokens as were asked for
    full = "full"  # the engine has no room for more of this one, though more were asked for
    aborted = "aborted"  # this adapter was asked to abort, pause or put to sleep
    aborted_elsewhere = "aborted_elsewhere"  # somebody else did: a trainer that has enough, most likely


class PauseMode(str, enum.Enum):
    """What becomes of running requests when an engine is paused."""

    abort = "abort"  # they end at once, with what they have
    wait = "wait"  # they are finished first
    keep = "keep"  # they stand still and go on after the resume


class MemoryTag(str, enum.Enum):
    """What of an engine's memory can be woken apart."""

    weights = "weights"
    kv_cache = "kv_cache"


class EngineCapability(str, enum.Enum):
    """What not every engine can do."""

    pause = "pause"  # by the engine itself; without it the adapter only sends nothing
    sleep = "sleep"
    flush = "flush"
    refit = "refit"
    version = "version"


@dataclass(frozen=True)
class GenerateRequest:
    """One generation asked of an engine: token ids in, token ids out."""

    id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: of the chosen tokens; n: also of the n best at each place
    extra: Mapping[str, Any] = field(default_factory=dict)  # handed to the engine as it is

    def __post_init__(self) -> None:
        where = f"request {self.id}"
        if not self.token_ids:
            raise InputError("the prompt has no tokens", where=where)
        if self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}; the least is 1", where=where)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is not within 0..{self.max_tokens}", where=where)
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise InputError("temperature and top_k are at least 0, top_p is in (0, 1]", where=where)
        if "" in self.stop:
            raise InputError("an empty stop string would end every answer at once", where=where)

    @property
    def greedy(self) -> bool:
        """The same prompt gives the same answer, up to rounding."""
        return self.temperature == 0


TopLogprobs = tuple[tuple[int, float], ...]
"""The best ids at one place with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What a stream said since the last piece."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None  # one for each id where asked for; None where the engine hid it
    best: tuple[TopLogprobs, ...] | None = None  # one for each id where asked for
    text: str | None = None
    finish: FinishReason | None = None
    stopped_by: str | int | None = None  # the stop string or stop id, where known
    version: str | None = None  # of the weights that made these tokens, where the engine says it
    missing: int = 0  # ids that were generated just before these, and that nobody can name


@dataclass(frozen=True)
class PartialOutput:
    """All that a stream had given when it ended, as it should or not."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    text: str = ""
    missing: int = 0  # above 0: the ids are not the whole answer, and it cannot be carried on from them

    @classmethod
    def of(cls, pieces: Sequence[StreamDelta]) -> PartialOutput:
        """What these pieces say together."""
        measured = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return cls(
            tuple(one for piece in pieces for one in piece.token_ids),
            tuple(one for logprobs in measured for one in logprobs) if measured else None,
            "".join(piece.text or "" for piece in pieces),
            sum(piece.missing for piece in pieces),
        )


@dataclass(frozen=True)
class EngineState:
    """What an engine is like now. `up` means that it would serve a request: not paused, not asleep, not wedged."""

    up: bool
    why: str
    version: str | None = None  # of its weights; None where it has none or does not say
    paused: bool = False
    asleep: bool = False
    dialect: str = ""  # which software, and which release of it
    elsewhere: bool = False  # the pause or sleep is others' doing, not this adapter's
    boots: int = 0  # grows whenever it is seen to be another process than before, where that can be seen


@dataclass(frozen=True)
class EngineLoad:
    """What an engine says it has to do, and whether that is to be believed."""

    running: int
    waiting: int
    kv_used_share: float | None
    at: float  # when it was read, by the monotonic clock here
    fresh: bool  # False: the figures are old ones, of a paused or silent engine


@dataclass(frozen=True)
class WeightUpdate:
    """New weights for an engine, made by the trainer."""

    path: str
    version: str
    way: str = "disk"


@dataclass(frozen=True)
class EngineDeadlines:
    """How long each kind of call may take, in seconds."""

    connect_s: float = 5.0
    call_s: float = 10.0  # a question that is answered at once
    change_s: float = 120.0  # pause, sleep, wake, flush
    refit_s: float = 600.0
    first_bytes_s: float = 120.0  # from sending a request to the first token
    silence_s: float = 30.0  # between two tokens
    abort_s: float = 2.0  # until an aborted stream has ended by itself; then its connection is closed

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not seconds > 0:
                raise InputError(f"{name} is {seconds:g}; a deadline is above 0 seconds")


class EngineError(UnreachableError):
    """An engine failed; `so_far` is what the stream had given. The same request may be asked of another engine."""

    def __init__(self, what: str, *, engine: str, so_far: PartialOutput | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=f"engine {engine}", hint=hint)
        self.engine = engine
        self.so_far = so_far or PartialOutput()


class EngineGoneError(EngineError):
    """Nothing listens there, or the connection broke: the process is gone, or cut the stream.

    `reached` is False where there was no connection at all: then it cannot have died of what was asked.
    """

    reached = True


class EngineWedgedError(EngineError):
    """No bytes for the stated time though the connection stands."""


class EngineFailedError(EngineError):
    """It answered that it failed: a status of 500, an error within a stream, or 200 with `success: false`."""


class EngineMalformedError(EngineError):
    """It answered something that cannot be: no JSON, counts that do not fit, ids that are no ids."""


class EnginePausedError(EngineError):
    """It is paused or asleep, so nothing is sent to it; or it was paused by somebody else with the request in it."""


class EngineBusyError(EngineError):
    """It has requests running, so its memory is not released."""


class EngineRefusedError(InputError):
    """The engine will not do what was ordered (400): no other engine of its kind would either."""


class NotSupportedError(InfeasibleError):
    """Engines of this kind have no such verb."""


@runtime_checkable
class Engine(Protocol):
    """One rollout engine. Every call is bounded by its deadlines; see `EngineCapability` for what some cannot do."""

    @property
    def name(self) -> str:
        """How people call it."""

    @property
    def kind(self) -> str:
        """vllm, sglang, llamacpp or actor."""

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it can do beyond generating."""

    async def ready(self) -> EngineState:
        """Would it serve now? Never raises for an engine that is down: that is an answer."""

    async def load(self) -> EngineLoad:
        """What it has to do. Raises an `EngineError` when it cannot be asked."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        """Streams until a piece with a `finish`, or raises. Closing the iterator aborts on the engine."""

    async def abort(self, ids: Collection[str] | None = None) -> None:
        """Ends these requests, or all: their streams end as `aborted`, with what they have."""

    async def pause(self, mode: PauseMode = PauseMode.abort) -> None:
        """No request is sent from now on; running ones as `mode` says."""

    async def resume(self) -> None:
        """The way back from `pause`."""

    async def sleep(self, level: int = 1) -> None:
        """Gives memory back: level 1 can be woken as it was, level 2 needs a refit. Refused while requests run."""

    async def wake(self, parts: Collection[MemoryTag] | None = None) -> None:
        """Takes the memory again: all of it, or parts one after the other around a refit."""

    async def flush(self) -> None:
        """Forgets cached prefixes."""

    async def version(self) -> str | None:
        """Of its weights; None where they were discarded, whatever the engine says, or where it does not know."""

    async def refit(self, refit: WeightUpdate) -> None:
        """Loads new weights and sees the new version confirmed."""

    async def refitted(self, version: str) -> None:
        """The trainer has sent new weights by a way of its own; raises where the engine says another version."""

    async def close(self) -> None:
        """Ends what this adapter has open; the engine itself lives on."""
