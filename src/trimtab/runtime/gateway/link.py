"""Messages between the process of a pool and the processes that serve its port, over a Unix socket.

A front process reads HTTP, checks tokens and bodies and writes answers; what it asks of the pool goes over here: whole
calls, tokenizers, and routes about the pool. Messages of one turn of the event loop go out in one write.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from trimtab.runtime.engines.engine import PromptIds
from trimtab.runtime.gateway.exchange import Refusal
from trimtab.runtime.gateway.fields import RequestTerms
from trimtab.runtime.gateway.serving import GenerationCall
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.sampling import Chunk, Completion, SamplingParams

HELD_BYTES = 2**28  # written and not read by the other side, which then counts as stuck
_LENGTH = struct.Struct("<I")


class LinkMessage(msgspec.Struct, array_like=True, tag=True):
    """`number` is that of a call or a question; those of one side never come again."""

    number: int


class LinkUp(LinkMessage):
    """A front process accepts connections."""


class LinkCall(LinkMessage):
    """A generation call. `how` has its parameters and terms: those of many calls are alike, and are read once."""

    prompts: list[tuple[bytes, int]]  # as JSON, and how many ids
    how: bytes
    stream: bool
    id: str
    created: int
    forward: tuple[str, dict[str, Any]] | None
    raw: bool

    @classmethod
    def of(cls, number: int, call: GenerationCall) -> LinkCall:
        how = msgspec.msgpack.encode((call.params, call.terms))
        forward = None if call.forward is None else (call.forward[0], dict(call.forward[1]))
        prompts = [(msgspec.json.encode(prompt), len(prompt)) for prompt in call.prompts]
        return cls(number, prompts, how, call.stream, call.id, call.created, forward, call.raw)

    def call(self) -> GenerationCall:
        params, terms = _read_how(self.how)
        prompts = [PromptIds(*prompt) for prompt in self.prompts]
        return GenerationCall(prompts, params, terms, self.stream, self.id, self.created, self.forward, self.raw)


@functools.lru_cache(maxsize=64)
def _read_how(how: bytes) -> tuple[list[SamplingParams], RequestTerms]:
    return msgspec.msgpack.decode(how, type=tuple[list[SamplingParams], RequestTerms])


class LinkCancel(LinkMessage):
    """The client of a call has left."""


class LinkTexts(LinkMessage):
    """A call of the pool's tokenizer."""

    method: str
    arguments: list[Any]
    options: dict[str, Any]


class LinkRoute(LinkMessage):
    """A request that is no generation."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class LinkCounted(LinkMessage):
    """A generation request was answered; for the metrics."""

    endpoint: str
    status: int
    seconds: float


class LinkSetup(LinkMessage):
    """First message to a front process."""

    settings: GatewaySettings


class LinkState(LinkMessage):
    """What a front process knows of the pool."""

    kinds: tuple[str, ...]
    adapters: tuple[str, ...]
    stopping: bool


class LinkStop(LinkMessage):
    """Ends a front process."""


class LinkChunk(LinkMessage):
    """Of a stream; `last`: it has ended with this."""

    prompt: int
    chunk: Chunk
    last: bool


class LinkAnswers(LinkMessage):
    """All answers of a call."""

    completions: list[Completion]
    aborted: bool


class LinkAbort(LinkMessage):
    """A call ends now, with what its client has."""

    why: str


class LinkReply(LinkMessage):
    """The answer to `LinkTexts`, or to `LinkRoute`: status, headers, body, and whether the connection ends."""

    value: Any


class LinkRefusal(LinkMessage):
    """A call or a question was refused."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str]

    @classmethod
    def of(cls, number: int, refusal: Refusal) -> LinkRefusal:
        return cls(number, refusal.status, refusal.message, refusal.param, refusal.code, refusal.headers)

    def refusal(self) -> Refusal:
        return Refusal(self.status, self.message, param=self.param, code=self.code, headers=self.headers)


ToPool = LinkUp | LinkCall | LinkCancel | LinkTexts | LinkRoute | LinkCounted
ToFront = LinkSetup | LinkState | LinkStop | LinkChunk | LinkAnswers | LinkAbort | LinkReply | LinkRefusal


class Link(asyncio.Protocol):
    """One side of a link; `lost` is called once."""

    transport: asyncio.Transport

    def __init__(self, kind: Any, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decoder, self._encoder = msgspec.msgpack.Decoder(kind), msgspec.msgpack.Encoder()
        self._received, self._lost = received, lost
        self._held = bytearray()
        self._out: list[bytes] = []
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=HELD_BYTES)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self._lost()

    def pause_writing(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        held = self._held
        held += data
        at = 0
        while len(held) - at >= 4:
            end = at + 4 + _LENGTH.unpack_from(held, at)[0]
            if len(held) < end:
                break
            with memoryview(held) as view, view[at + 4 : end] as part:
                message = self._decoder.decode(part)
            at = end
            self._received(message)
        del held[:at]

    def send(self, message: LinkMessage) -> None:
        if self.closed:
            return
        data = self._encoder.encode(message)
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out += (_LENGTH.pack(len(data)), data)

    def flush(self) -> None:
        out, self._out = self._out, []
        if out and not self.closed:
            self.transport.writelines(out)

    def close(self) -> None:
        self.flush()
        self.closed = True
        self.transport.close()
