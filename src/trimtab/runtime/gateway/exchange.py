"""One HTTP request and its response, and refusals as data: status, message, field.

A client that disconnects has its answering task cancelled, whether the response streams or not. One that stops reading
counts as disconnected after a while. Each API formats refusals its own way.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.runtime.rollout.sampling import RefusedError, Sample

if TYPE_CHECKING:
    from trimtab.runtime.gateway.connection import HttpConnection

log = logging.getLogger("trimtab.gateway")

Headers = dict[bytes, bytes]
Handler = Callable[["HttpExchange"], Awaitable[None]]

_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]  # fmt: skip

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""ASCII JSON: neither lone surrogates nor separators of lines can break a response."""


def to_json_bytes(answer: Any) -> bytes:
    """A whole body as JSON."""
    try:
        return msgspec.json.encode(answer)
    except (TypeError, ValueError, OverflowError):  # lone surrogates, long numbers
        return to_json(answer).encode()


def sse(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


class Refusal(Exception):  # noqa: N818 - a response, not a fault
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def openai(self) -> dict[str, object]:
        """In OpenAI's format."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def plain(self) -> dict[str, object]:
        """In SGLang's and its router's format."""
        return {"error": {"message": self.message, "code": self.code or self.status, "param": self.param}}


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_STATUSES = {
    ReasonCode.too_late: 504,
    ReasonCode.version_gone: 409,
    ReasonCode.refused: 400,
    ReasonCode.never_fits: 400,
    ReasonCode.retries_used: 502,
    ReasonCode.cancelled: 503,
}


def invalid_value(param: str, message: str) -> Refusal:
    return Refusal(400, message, param=param, code="invalid_value")


def refusal_for_error(error: BaseException) -> Refusal:
    """An error as a refusal. One that is trimtab's own fault is logged."""
    if isinstance(error, Refusal):
        return error
    if not isinstance(error, TrimtabError):
        log.error("a fault of the gateway", exc_info=error)
        return Refusal(500, f"internal error in trimtab: {type(error).__name__}", code="fault")
    message = " ".join(part for part in (error.what, error.hint and f"({error.hint})") if part)
    if isinstance(error, RefusedError):
        retry_after = str(max(1, math.ceil(error.retry_after_s)))
        return Refusal(429, message, code=error.reason.code.value, headers={"retry-after": retry_after})
    if isinstance(error, InputError):
        return Refusal(400, message, code="invalid_request")
    if isinstance(error, InfeasibleError):
        return Refusal(409, message, code="infeasible")
    return Refusal(503, message, code="unreachable")


def refusal_for_sample(sample: Sample) -> Refusal:
    reason = sample.reason
    return Refusal(_STATUSES.get(reason.code, 503), " ".join(reason.sentence.split()), code=reason.code.value)


class HttpExchange:
    """One request; `client_gone`: it has disconnected, `abort_reason`: the response must end early."""

    def __init__(
        self,
        connection: HttpConnection | None,
        method: str,
        path: str,
        query: str,
        headers: Headers,
        chunks: bool,
        closing: bool,
    ) -> None:
        self.method, self.path, self.query, self.headers = method, path, query, headers
        self.body = b""
        self.name = ""  # within the path
        self.handler: Handler | None = None
        self.form: Callable[[Refusal], dict[str, object]] = Refusal.plain
        self.refusal: Refusal | None = None  # by its head
        self.status = 0  # of the response, once it has begun
        self.complete = False  # the response
        self.client_gone = False
        self.abort_reason = ""
        self.aborted = False  # a client aborted all requests: what there is is the answer, also nothing
        self.closing = closing  # the connection ends with this response
        self.task: asyncio.Task[None] | None = None
        self._connection, self._chunks = connection, chunks
        self._head = b""  # not sent yet
        self._streams = False

    # ---- ends ------------------------------------------------------------------------------------------------------

    def left(self) -> None:
        """The client has disconnected."""
        self.client_gone = True
        if self.task is not None:
            self.task.cancel()

    def abort(self, why: str) -> None:
        """Ends the response now, with what there is."""
        if not self.abort_reason and self.task is not None:
            self.abort_reason = why
            self.task.cancel()

    def uncancellable(self) -> None:
        """From now on the response is written whatever happens."""
        self.task = None

    # ---- responses -------------------------------------------------------------------------------------------------

    async def json(self, answer: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        await self.raw(to_json_bytes(answer), status, [_JSON, *headers])

    async def refuse(self, refusal: Refusal) -> None:
        """Answers with an error; if the response has begun, only the connection can be closed."""
        self.uncancellable()
        if not self.status:
            headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
            await self.json(self.form(refusal), refusal.status, headers)

    async def raw(self, body: bytes, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        head = self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.complete = True
        await self._write(head if self.method == "HEAD" else head + body)

    def events(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Begins a stream; its head goes out with the first event."""
        length = [(b"transfer-encoding", b"chunked")] if self._chunks else []
        self.closing |= not self._chunks
        self._head = self._start(200, [*_EVENTS, *headers, *length])

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.status = status
        if self.closing:
            headers.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, _PHRASES.get(status, b"Unknown"), lines)

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Events of a stream."""
        if self._chunks:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body += b"" if more else b"0\r\n\r\n"
        head, self._head = self._head, b""
        self.complete = not more
        await self._write(head + body)

    async def _write(self, data: bytes) -> None:
        connection = self._connection
        assert connection is not None
        connection.transport.write(data)
        if connection.is_held:
            await connection.drained()
