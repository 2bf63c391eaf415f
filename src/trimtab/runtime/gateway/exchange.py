"""One HTTP request and its response, with disconnect detection, and refusals as data: status, message, field.

A disconnect is noticed whether the response streams or not, and the answering task is cancelled. The watch begins
after a delay, so that fast responses do not pay for it. A client that stops reading counts as disconnected after a
while. Each API formats refusals its own way.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.runtime.rollout.sampling import RefusedError, Sample

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

WATCH_AFTER_S = 0.25
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]  # fmt: skip

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""ASCII JSON, so that lone surrogates cannot break a response."""


def sse(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


class ClientLeft(Exception):  # noqa: N818 - not a fault
    """The client disconnected."""


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


def refusal_for_error(error: TrimtabError) -> Refusal:
    """Error of the pool as a refusal."""
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

    def __init__(self, scope: Scope, receive: Receive, send: Send, write_s: float) -> None:
        self.headers: Headers = dict(scope["headers"])
        self.scope, self.receive = scope, receive
        self.status = 0  # of the response, once it has begun
        self.client_gone = False
        self.abort_reason = ""
        self.aborted = False  # a client aborted all requests: what there is is the answer, also nothing
        self.closing = False  # the connection ends with this response
        self._send, self._write_s = send, write_s
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._writing_since: float | None = None

    # ---- disconnects -----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Cancels the answering task on disconnect. Call it after the body was read."""
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watched())
        self._timer = loop.call_later(self._write_s, self._look)

    async def _watched(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._writing_since is not None and loop.time() - self._writing_since > self._write_s:
            self._gone()
        else:
            self._timer = loop.call_later(self._write_s, self._look)

    def _gone(self) -> None:
        self.client_gone = True
        if self._task is not None:
            self._task.cancel()

    def abort(self, why: str) -> None:
        """Ends the response now, with what there is."""
        if not self.abort_reason and self._task is not None:
            self.abort_reason = why
            self._task.cancel()

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        self._task = None

    # ---- responses -------------------------------------------------------------------------------------------------

    async def json(self, answer: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        await self.raw(to_json(answer).encode(), status, [_JSON, *headers])

    async def refuse(self, refusal: Refusal, form: Callable[[Refusal], dict[str, object]]) -> None:
        """Answers with an error; if the response has begun, only the connection can be closed."""
        self.unwatch()
        if not self.status:
            headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
            await self.json(form(refusal), refusal.status, headers)

    async def raw(self, body: bytes, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.write(body, more=False)

    async def events(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        await self._start(200, [*_EVENTS, *headers])

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        if self.closing:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        self._writing_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._writing_since = None
