"""Engine protocol: its data types, calls and errors.

An engine is stopped in this order: remove it from routing, drain or abort its requests, put it to sleep or release its
memory, end the process. Each step is safe only after the previous one. Releasing memory under running requests kills an
SGLang server; ending a process under running requests leaves connections open and silent. So `sleep` is refused while
requests run, unless the engine has confirmed a pause that ended or retracted all of them.

What must never happen: a request sent to an engine that is paused or asleep. It would neither fail nor be answered, and
no counter of the engine would show it. So after `pause` or `sleep`, `generate` works again only after a `resume` or
`wake` that the engine confirmed or, if another client had paused it, after a state check that saw it serving. A pause
that failed leaves the gate closed: the engine's state is unknown.

Every wait has a deadline, and a stream that ends early reports what was generated until then.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.core.frozen import Frozen, Message


class FinishReason(str, enum.Enum):
    """Why a stream ended."""

    stop = "stop"  # an end token, a stop id or a stop string
    length = "length"  # max_tokens reached
    full = "full"  # no memory or context left before max_tokens
    aborted = "aborted"  # by an abort, pause or sleep of this adapter
    aborted_elsewhere = "aborted_elsewhere"  # by another client, for example the trainer


class PauseMode(str, enum.Enum):
    """What a pause does to running requests."""

    abort = "abort"  # end at once, with partial output
    wait = "wait"  # finish first
    keep = "keep"  # hold, continue after resume


class MemoryTag(str, enum.Enum):
    """Parts of an engine's memory that can be woken separately."""

    weights = "weights"
    kv_cache = "kv_cache"


class EngineCapability(str, enum.Enum):
    """What not every engine supports."""

    pause = "pause"  # by the engine itself; without it the adapter only stops sending
    keep = "keep"  # a pause that holds running requests and continues them after resume
    sleep = "sleep"
    flush = "flush"
    refit = "refit"
    version = "version"  # it reports the version of its weights; without it, what was recorded here counts
    load = "load"  # it reports how many requests it has


class PromptIds(Sequence[int]):
    """Token ids as JSON, which most engines take as it is: they are read where something else needs them."""

    def __init__(self, json: bytes, count: int) -> None:
        self.json, self._count = json, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return msgspec.json.decode(self.json)[at]

    def __iter__(self) -> Iterator[int]:
        return iter(msgspec.json.decode(self.json))


class GenerateRequest(Message):
    """One generation request to an engine: token ids in, token ids out."""

    id: str
    token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    logprobs: int | None = None  # None: off; 0: of the chosen tokens; n: also of the top n at each position
    extra: Mapping[str, Any] = field(default_factory=dict)  # passed to the engine unchanged
    piece: int | None = 1  # tokens of a delta, where the engine takes it: 1: as they come; None: all, at the end
    cache_key: str = ""  # prompts are taken from the prefix cache only of requests with the same key
    lora: str | None = None  # name of a loaded adapter; None: the weights alone
    raw: bool = False  # its deltas may have a `RawAnswer`

    def __post_init__(self) -> None:
        where = f"request {self.id}"
        if not self.token_ids:
            raise InputError("the prompt has no tokens", where=where)
        if self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}; the minimum is 1", where=where)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is not within 0..{self.max_tokens}", where=where)
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise InputError("temperature and top_k are at least 0, top_p is in (0, 1]", where=where)
        if "" in self.stop:
            raise InputError("an empty stop string would end every answer at once", where=where)

    def fields(self) -> dict[str, Any]:
        """For engines that are objects: what to generate, not how it travels."""
        given = {**vars(self), "token_ids": tuple(self.token_ids)}
        return {name: value for name, value in given.items() if name not in ("piece", "cache_key", "lora", "raw")}

    @property
    def greedy(self) -> bool:
        """The same prompt gives the same output, up to rounding."""
        return self.temperature == 0


ROUTED_EXPERTS = "return_routed_experts"
"""A field of `extra`: the answer's `extra` has its experts as `routed_experts`, as the engine writes them."""


class ForwardRequest(Message):
    """A call that only the engine understands, sent as it is: its reply is the `body` in the delta's `extra`."""

    id: str
    path: str
    body: Mapping[str, Any]
    cache_key: str = ""
    lora: str | None = None
    piece: ClassVar[None] = None


EngineCall = GenerateRequest | ForwardRequest


class PieceSupport(Frozen):
    """In which pieces an engine gives an answer, besides a stream of tokens."""

    whole: bool = False  # at once, at the end
    interval: bool = False  # a stream with so many tokens for each event, as the request says
    repeats: bool = False  # every event of a stream repeats the answer so far, so few are wanted
    every: int = 1  # tokens for each event of a stream, if the request says nothing
    partial: bool = False  # an aborted request is answered with its tokens so far
    context: int | None = None  # tokens of prompt and answer together


STREAMS = PieceSupport()

TopLogprobs = tuple[tuple[int, float], ...]
"""Top ids at one position with their log-probabilities, best first."""


class RawAnswer(Message):
    """All tokens of an answer so far, in SGLang's own JSON: most are passed on as they are and never read."""

    tokens: int
    text: bytes
    ids: bytes
    meta: dict[str, bytes]

    @property
    def ended(self) -> bool:
        return self.meta.get("finish_reason", b"null") != b"null"

    def event(self) -> dict[str, Any]:
        read = msgspec.json.decode
        meta = {name: read(value) for name, value in self.meta.items()}
        return {"text": read(self.text), "output_ids": read(self.ids), "meta_info": meta}

    def delta(self, logprobs: int | None) -> StreamDelta:
        """Read; with log-probabilities as they were requested."""
        event = self.event()
        found = sglang_logprobs(event["meta_info"], logprobs, self.tokens)
        return StreamDelta(tuple(event["output_ids"]), *found, event["text"])


def sglang_logprobs(
    meta: Mapping[str, Any], requested: int | None, count: int
) -> tuple[tuple[float | None, ...] | None, tuple[TopLogprobs, ...] | None]:
    """Of the last tokens of an event."""
    if requested is None:
        return None, None
    places = (meta.get("output_token_logprobs") or [])[-count:] if count else []
    if len(places) != count:
        raise MalformedOutput(f"{len(places)} log-probabilities for {count} tokens")
    logprobs = tuple([float(place[0]) for place in places])
    if not requested:
        return logprobs, None
    ranked = (meta.get("output_top_logprobs") or [])[-count:] if count else []
    return logprobs, tuple(tuple((int(top[1]), float(top[0])) for top in place[:requested]) for place in ranked)


class StreamDelta(Message):
    """What a stream added since the previous delta."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None  # one per id if requested; None: not reported by the engine
    best: tuple[TopLogprobs, ...] | None = None  # one per id if requested
    text: str | None = None
    finish: FinishReason | None = None
    stopped_by: str | int | None = None  # stop string or stop id, if known
    version: str | None = None  # of the weights that generated these tokens, if reported
    missing: int = 0  # ids generated just before these that could not be identified
    extra: Mapping[str, Any] | None = None  # what else the engine says of the whole answer; with the last delta
    raw: RawAnswer | None = None  # instead of tokens and text, of which it has all so far


class PartialOutput(Message):
    """Everything a stream gave until it ended or failed."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    text: str = ""
    missing: int = 0  # above 0: the ids have a gap, so the output cannot be resumed from them

    @classmethod
    def of(cls, pieces: Sequence[StreamDelta]) -> PartialOutput:
        measured = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return cls(
            tuple(token for piece in pieces for token in piece.token_ids),
            tuple(value for logprobs in measured for value in logprobs) if measured else None,
            "".join(piece.text or "" for piece in pieces),
            sum(piece.missing for piece in pieces),
        )


MAX_RUNNING = 1_000_000  # requests at once; an engine that reports more is not believed


class EngineState(Frozen):
    """State of an engine. `up`: it would serve a request, so it is not paused, asleep or wedged."""

    up: bool
    why: str
    version: str | None = None  # of its weights; None: no weights, or not reported
    paused: bool = False
    asleep: bool = False
    dialect: str = ""  # software and release
    elsewhere: bool = False  # paused or put to sleep by another client
    boots: int = 0  # grows when the process is seen to have been replaced


class EngineLoad(Frozen):
    """Load reported by an engine, and whether it is current."""

    running: int
    waiting: int
    kv_used_share: float | None
    at: float  # local monotonic time of the reading
    fresh: bool  # False: stale figures of a paused or silent engine
    progress: float | None = None  # a figure that grows while it generates, for example tokens since its start


class WeightUpdate(Frozen):
    """New weights for an engine, from the trainer."""

    path: str
    version: str
    way: str = "disk"


class WeightRecord(Frozen):
    """Which weights an engine has that cannot say so itself. It holds while the engine's process is the same."""

    version: str
    process: str | None  # what identified the process; None: to be read at the next state check


class EngineDeadlines(Frozen):
    """Seconds that each kind of call may take."""

    connect_s: float = 5.0
    call_s: float = 10.0  # calls that are answered immediately
    change_s: float = 120.0  # pause, sleep, wake, flush
    refit_s: float = 600.0
    first_bytes_s: float = 120.0  # from sending a request to the first token
    silence_s: float = 30.0  # between two tokens
    abort_s: float = 2.0  # for an aborted stream to end by itself, before its connection is closed
    settle_s: float = 1.0  # for its own figures to count the end of a request

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not seconds > 0:
                raise InputError(f"{name} is {seconds:g}; a deadline is above 0 seconds")


class EngineError(UnreachableError):
    """An engine failed; `so_far` is the partial output. The request may be retried on another engine."""

    def __init__(self, what: str, *, engine: str, so_far: PartialOutput | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=f"engine {engine}", hint=hint)
        self.engine = engine
        self.so_far = so_far or PartialOutput()


class EngineGoneError(EngineError):
    """Connection refused or broken: the process is gone, or cut the stream.

    `reached` is False if no connection was made: then the request cannot have caused the failure.
    """

    reached = True


class EngineWedgedError(EngineError):
    """No bytes within the deadline on an open connection."""


class EngineFailedError(EngineError):
    """The engine reported a failure: status 500, an error within a stream, or 200 with `success: false`."""


class EngineMalformedError(EngineError):
    """An impossible answer: no JSON, counts that do not match, invalid ids."""


class EnginePausedError(EngineError):
    """The engine is paused or asleep, so nothing is sent; or it was paused by another client mid-request."""


class EngineBusyError(EngineError):
    """Requests are running, so memory is not released."""


class EngineRefusedError(InputError):
    """The engine rejected the request (400): others of its kind would too."""


class NotSupportedError(InfeasibleError):
    """Engines of this kind lack the capability."""


@runtime_checkable
class Engine(Protocol):
    """A rollout engine. Every call is bounded by its deadlines; see `EngineCapability` for what is optional."""

    @property
    def name(self) -> str:
        """Display name."""

    @property
    def kind(self) -> str:
        """vllm, sglang, llamacpp or actor."""

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it supports beyond generating."""

    async def ready(self) -> EngineState:
        """Whether it would serve now. Never raises for an engine that is down."""

    async def load(self) -> EngineLoad:
        """Current load. Raises an `EngineError` if it cannot be read."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        """Streams until a delta with a `finish`, or raises. Closing the iterator aborts on the engine."""

    async def abort(self, ids: Collection[str] | None = None) -> None:
        """Aborts these requests, or all: their streams end as `aborted`, with partial output."""

    async def pause(self, mode: PauseMode = PauseMode.abort) -> None:
        """Stops sending requests; running ones as `mode` says."""

    async def resume(self) -> None:
        """Reverts `pause`."""

    async def sleep(self, level: int = 1) -> None:
        """Releases memory: level 1 keeps the weights, level 2 needs a refit. Refused while requests run."""

    async def wake(self, parts: Collection[MemoryTag] | None = None) -> None:
        """Takes memory back: all of it, or parts, for example around a refit."""

    async def flush(self) -> None:
        """Clears the prefix cache."""

    async def version(self) -> str | None:
        """Version of its weights; None if they were discarded or it is unknown."""

    async def refit(self, refit: WeightUpdate) -> None:
        """Loads new weights and checks that the engine reports the new version."""

    async def refitted(self, version: str) -> None:
        """The trainer has sent new weights itself; raises if the engine reports another version."""

    async def close(self) -> None:
        """Closes this adapter's streams; the engine keeps running."""


# ---- open streams: their events, and what reads them


class DeltaReader(Protocol):
    """Converts the events of a stream to deltas; raises `MalformedOutput` for impossible ones.

    A reader may have a method `parsed(payload)`, which returns an event, or a delta that needs no more reading; and
    `covers(payload, last)`: whether the last of several events repeats all from that first one on.
    """

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        """Deltas of one event."""


class EventStream(Protocol):
    """An open stream of events; raises the errors of `engine.py`."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Events until the end, or an error."""

    def close(self, *, on_purpose: bool = False) -> None:
        """Closes the connection, which the engine takes as an abort."""

    def close_within(self, seconds: float) -> None:
        """Closes it after this time unless it has ended."""

    async def rest(self) -> None:
        """Reads what follows the last delta."""


class MalformedOutput(Exception):  # noqa: N818 - not raised beyond this folder
    """An impossible answer of an engine."""


def token_ids(given: Sequence[Any]) -> tuple[int, ...]:
    """Token ids of an event; raises TypeError or OverflowError for anything else."""
    array("q", given)  # checks all of them without a loop here
    return tuple(given)


def routed_experts(
    request: GenerateRequest, finish: FinishReason | None, reply: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The experts of a whole answer, if they were requested; an engine that cannot say them refuses the request."""
    if finish not in (FinishReason.stop, FinishReason.length) or not request.extra.get(ROUTED_EXPERTS):
        return None
    if reply.get("routed_experts") is None:
        raise EngineRefusedError(
            "the answer has no routed_experts", hint="start the engine with --enable-return-routed-experts"
        )
    return {"routed_experts": reply["routed_experts"]}


class ForwardReader:
    """Reads the reply to a forwarded request: OpenAI's form with `choices`, or SGLang's with `meta_info`."""

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        meta = event.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("status_code"):  # it failed, and nothing was aborted
            raise MalformedOutput(str(reason.get("message")))
        finishes = {choice.get("finish_reason") for choice in event.get("choices") or ()} | {reason.get("type")}
        finish = FinishReason.length if "length" in finishes else FinishReason.stop
        finish = FinishReason.aborted_elsewhere if "abort" in finishes else finish
        tokens = (event.get("usage") or meta).get("completion_tokens")
        return [StreamDelta(finish=finish, missing=int(tokens or 0), extra={"body": event})]


class OpenStream:
    """A request whose stream is open."""

    def __init__(self, request: EngineCall, attempt: str) -> None:
        self.request = request
        # Request id at the engine, never reused: SGLang aborts an id once more
        # two seconds after its stream has ended, even if it is in use again by then, and releases before 0.5.5 abort
        # every id that begins like the given one: hence the end mark.
        self.key = f"{request.id}.{attempt}."
        self.reader: DeltaReader | None = None
        self.events: EventStream | None = None
        self.aborting = False
        self.ended = False  # by itself, successfully or not
        self._stream_pieces: list[StreamDelta] = []

    def add(self, piece: StreamDelta) -> StreamDelta:
        if piece.raw is not None:
            self._stream_pieces.clear()
        self._stream_pieces.append(piece)
        self.ended = piece.finish is not None
        return piece

    def so_far(self) -> PartialOutput:
        return PartialOutput.of([each if each.raw is None else each.raw.delta(None) for each in self._stream_pieces])
