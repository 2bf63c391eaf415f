"""Answers of one engine over HTTP: kept connections, and the events or the whole body that come on them.

Every answer costs this, so it is written on httptools and not on a client library. A connection has one request at a
time. A timer for each stream closes its connection on silence; reading then fails with `EngineWedgedError`. Redirects
are not followed. Where several events are there at once and the last one repeats all before it, only that is parsed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from trimtab.runtime.engines.engine import (
    DeltaReader,
    EngineDeadlines,
    EngineFailedError,
    EngineGoneError,
    EngineMalformedError,
    EngineRefusedError,
    EngineWedgedError,
    StreamDelta,
)

MAX_EVENT_BYTES = 64 * 2**20
"""Per event or answer. A vocabulary with its bytes is about 20 MB."""

IDLE_S = 2.0  # engines close idle connections after 5 s
REST_S = 0.5  # for what follows the last event
HELD_BYTES = 4 * 2**20  # that were read and not taken; the engine waits beyond them
_REFUSAL_BYTES = 2**16

Check = Callable[[str, int, Any, str], None]
"""Raises the error of an answer, given the call, its status, its body and where it redirects to."""


class EngineConnections:
    """Connections to one engine; `close` closes all of them."""

    def __init__(self, name: str, url: str, deadlines: EngineDeadlines, check: Check, *, keep_alive: bool) -> None:
        parts = urlsplit(url)
        self.name, self.deadlines, self.check, self.keep_alive = name, deadlines, check, keep_alive
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        kept = "" if keep_alive else "Connection: close\r\n"
        self._head = (
            f"POST {parts.path}%s HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\n{kept}"
            "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self.open: set[_Connection] = set()  # also those that wait for the rest of an answer
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    def request(self, path: str, body: Any) -> bytes:
        data = _encode(body)
        return (self._head % (path, len(data))).encode() + data

    async def connection(self) -> _Connection:
        """An idle connection, or a new one."""
        while self._idle:
            _, found = self._idle.pop()
            if not found.transport.is_closing():
                return found
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls)
        return (await asyncio.wait_for(connecting, self.deadlines.connect_s))[1]

    def release(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._reaper is None:
            self._reaper = loop.call_later(IDLE_S, self._reap)

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0][0] + IDLE_S <= loop.time():
            self._idle.popleft()[1].transport.close()
        self._reaper = loop.call_at(self._idle[0][0] + IDLE_S, self._reap) if self._idle else None

    def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        self._idle.clear()
        for connection in list(self.open):
            connection.transport.close()


class _Connection(asyncio.Protocol):
    """A connection; `stream` has it until its answer is whole."""

    transport: asyncio.Transport

    def __init__(self, pool: EngineConnections) -> None:
        self._pool, self._body = pool, list[bytes]()
        self.on_body = self._body.append  # many chunks come at once: nothing of Python is called for each
        self._parser = httptools.HttpResponseParser(self)
        self.stream: HttpEventStream | None = None
        self._counted = False  # the head says where the answer ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)

    def send(self, stream: HttpEventStream, request: bytes) -> None:
        self.stream, self._counted = stream, False
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        stream = self.stream
        if stream is None:  # nothing was asked
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._hand_over()
            self.stream = None
            self.transport.abort()
            stream.lost(f"no HTTP: {error}")
            return
        self._hand_over()
        stream.on_bytes()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.open.discard(self)
        stream, self.stream = self.stream, None
        if stream is None:
            return
        if stream.status and not self._counted and error is None:
            stream.complete = True
            stream.on_bytes()
        else:
            stream.lost(str(error) if error else "the connection was closed")

    # ---- called by the parser --------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._counted |= name in (b"content-length", b"transfer-encoding")
        if name == b"location" and self.stream is not None:
            self.stream.location = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.stream is not None:
            self.stream.status = self._parser.get_status_code()

    def _hand_over(self) -> None:
        if self.stream is not None:
            self.stream.on_body(self._body)
        self._body.clear()

    def on_message_complete(self) -> None:
        stream = self.stream
        if stream is None or stream.status < 200:  # 100: continue
            return
        self._hand_over()
        self.stream, stream.complete = None, True
        if self._pool.keep_alive and self._parser.should_keep_alive():
            self.transport.resume_reading()
            self._pool.release(self)
        else:
            self.transport.close()


class HttpEventStream:
    """An answer; iterates over the JSON of its events until `[DONE]` or its end.

    The reader decides whether the end came with a final event. `whole`: the answer is one JSON body, which counts as
    its only event. `alive_at`: when the engine was last seen to generate; silence counts from then.
    """

    def __init__(
        self,
        connections: EngineConnections,
        path: str,
        body: Any,
        whole: bool = False,
        alive_at: Callable[[], float | None] | None = None,
        reader: DeltaReader | None = None,
    ) -> None:
        self._connections, self._path, self._body = connections, path, body
        self._whole, self._alive_at = whole, alive_at
        self._covers: Callable[[bytes, Any], bool] | None = getattr(reader, "covers", None)
        self._parsed: Callable[[bytes], Any] = getattr(reader, "parsed", parsed)
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        self._parts: list[bytes] = []  # of the body, not taken yet
        self._size = 0
        self._events: deque[Any] = deque()
        self._error: Exception | None = None
        # Start of the current wait for bytes; None while the reader is processing, which is no silence.
        self._waiting_since: float | None = None
        self._allowed_s = connections.deadlines.first_bytes_s
        self._silent = False
        self.status = 0  # of the answer, once its head is there
        self.location = ""
        self.complete = False  # all of it is there
        self.closed_on_purpose = False

    # ---- ends ------------------------------------------------------------------------------------------------------

    def close(self, *, on_purpose: bool = False) -> None:
        """Closes the connection, which engines take as an abort; harmless after the end."""
        self.closed_on_purpose |= on_purpose
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opening is not None:
            self._opening.cancel()
        connection, self._connection = self._connection, None
        if connection is not None and connection.stream is self:
            connection.stream = None
            connection.transport.abort()
            self.lost("the connection was closed here")

    def close_within(self, seconds: float) -> None:
        """Closes the connection on purpose unless the stream has ended by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, lambda: self.close(on_purpose=True))
        self._allowed_s = -1.0  # the new timer replaces the silence timeout

    async def rest(self) -> None:
        """What follows the last event may come for a while, so that the connection can be reused."""
        connection, self._connection = self._connection, None
        if connection is None or connection.stream is not self:
            return
        if not self._connections.keep_alive or self.closed_on_purpose:
            self._connection = connection
            return
        drain = HttpEventStream(self._connections, self._path, None)
        drain._connection, connection.stream = connection, drain
        drain.status, drain._size = self.status, -MAX_EVENT_BYTES
        drain.close_within(REST_S)

    def lost(self, why: str) -> None:
        """The connection is gone, before all of the answer was there."""
        self._connection = None
        if self._error is None and not self.complete:
            self._error = self._broken(why)
        self._wake()

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def on_body(self, parts: list[bytes]) -> None:
        self._parts += parts
        self._size += sum(map(len, parts))

    def on_bytes(self) -> None:
        if not self._begun:
            self._begun = True
            if self._allowed_s > 0:
                self._allowed_s = self._connections.deadlines.silence_s
        if self._size > HELD_BYTES and not self._whole and self._connection is not None:
            self._connection.transport.pause_reading()
        if not self._whole or self.complete or self._size > MAX_EVENT_BYTES:
            self._wake()
        elif self._waiting_since is not None:
            self._waiting_since = self._loop.time()
        if self.complete and self._timer is not None and self._body is None:  # the rest of an answer
            self._timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _more(self) -> None:
        """Waits for something new."""
        self._waiter, self._waiting_since = self._loop.create_future(), self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = self._waiting_since = None

    # ---- events ----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> HttpEventStream:
        return self

    async def __anext__(self) -> Any:
        if self._body is not None and self._opening is None and not self._begun and self._connection is None:
            await self._open()
        while not self._events:
            if self._parts and self._take():
                continue
            if self.complete:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._more()
        event = self._events.popleft()
        if event is _DONE:
            raise StopAsyncIteration
        return event

    async def _open(self) -> None:
        self._waiting_since = self._loop.time()
        deadlines = self._connections.deadlines
        self._arm(min(deadlines.first_bytes_s, deadlines.silence_s))
        try:
            if self._connections._idle:
                connection = await self._connections.connection()
            else:
                self._opening = self._loop.create_task(self._connections.connection())
                connection = await self._opening
        except asyncio.CancelledError:
            if self._silent or self.closed_on_purpose:  # cancelled here; otherwise the caller was cancelled
                raise self._broken("cancelled") from None
            raise
        except (OSError, asyncio.TimeoutError) as error:
            gone = self._broken(str(error) or "no connection in time")
            if isinstance(gone, EngineGoneError):
                gone.reached = False
            raise gone from None
        self._connection = connection
        connection.send(self, self._connections.request(self._path, self._body))
        while not self.status and self._error is None:
            await self._more()
        if self.status not in (0, 200):
            await self._refused()

    async def _refused(self) -> None:
        """Raises for a status that is not 200; with what the body says, if that comes in time."""
        self._allowed_s = self._connections.deadlines.call_s
        while not self.complete and self._error is None and self._size <= _REFUSAL_BYTES:
            await self._more()
        said = parsed(b"".join(self._parts)[:_REFUSAL_BYTES])
        self._parts.clear()
        self._connections.check(f"POST {self._path}", self.status, said, self.location)

    def _take(self) -> bool:
        """Reads the events that are there; whether there were any."""
        if self._whole and not self.complete and self._size <= MAX_EVENT_BYTES:
            return False
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._whole:
            if len(data) > MAX_EVENT_BYTES:
                raise EngineMalformedError("an answer without end", engine=self._connections.name)
            self._events.append(self._checked(data))
            return True
        data = data.lstrip(b"\r\n")
        end = data.rfind(b"\n") + 1
        held = data[end:]
        if len(held) > MAX_EVENT_BYTES:
            raise EngineMalformedError("an event without end", engine=self._connections.name)
        if held:
            self._parts.append(held)
        if self._size > HELD_BYTES and self._connection is not None:
            self._connection.transport.resume_reading()
        self._size = len(held)
        if self._covers is not None and self._take_last(data, end):
            return True
        lines = data[:end].split(b"\n")
        payloads = [line[5:].strip() for line in map(bytes.strip, lines) if self._is_event(line)]
        ended = b"[DONE]" in payloads
        if ended:
            del payloads[payloads.index(b"[DONE]") :]
        for payload in payloads:
            try:
                self._events.append(self._checked(payload))
            except (EngineFailedError, EngineRefusedError, EngineMalformedError) as error:  # noqa: PERF203
                if not self._events:
                    raise
                self._error, self.complete = error, False  # after the events before it
                return True
        if ended:
            self._events.append(_DONE)
        return bool(self._events)

    def _take_last(self, data: bytes, end: int) -> bool:
        """Takes the last of several events, and reads no other, if it repeats all of them."""
        last, since = _last_line(data, end)
        if ended := last == b"data: [DONE]":
            last, since = _last_line(data, since)
        first = data[: data.find(b"\n")].strip()
        if since <= len(first) or not (first.startswith(b"data:") and last.startswith(b"data:")):
            return False
        event = self._parsed(last[5:])
        if self._covers is None or not self._covers(first[5:], event):
            return False
        self._events += (event, _DONE) if ended else (event,)
        return True

    def _is_event(self, line: bytes) -> bool:
        if line.startswith(b"data:"):
            return True
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            return False
        if line.startswith(b"error:"):  # llama.cpp's failures within a stream
            raise self._failed(parsed(line[6:]))
        raise EngineMalformedError(f"not an event: {line[:80]!r}", engine=self._connections.name)

    def _checked(self, payload: bytes) -> Any:
        event = self._parsed(payload)
        if isinstance(event, StreamDelta):
            return event
        if not isinstance(event, dict):
            raise EngineMalformedError(f"an event that is no object: {payload[:80]!r}", engine=self._connections.name)
        if event.get("error"):
            raise self._failed(event["error"])
        return event

    def _failed(self, error: Any) -> EngineFailedError | EngineRefusedError:
        """An error within a stream, after status 200."""
        code, name = error.get("code") if isinstance(error, dict) else None, self._connections.name
        if isinstance(code, int) and 400 <= code < 500 and code not in (408, 429):
            return EngineRefusedError(f"it was refused ({code}): {brief(error)}", where=f"engine {name}")
        return EngineFailedError(f"it failed within the stream: {brief(error)}", engine=name)

    # ---- silence ---------------------------------------------------------------------------------------------------

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._check_silence)

    def _check_silence(self) -> None:
        now = self._loop.time()
        since = now if self._waiting_since is None else self._waiting_since
        if self._alive_at is not None:
            since = max(since, self._alive_at() or since)
        left_s = self._allowed_s - (now - since)
        if left_s > 0.001:
            self._arm(left_s)
            return
        self._silent = True
        self.close()

    def _broken(self, why: str) -> EngineGoneError | EngineWedgedError:
        if self._silent:
            what = f"POST {self._path}: no bytes for {self._allowed_s:g} s"
            return EngineWedgedError(what, engine=self._connections.name)
        return EngineGoneError(f"POST {self._path}: {' '.join(why.split())[:200]}", engine=self._connections.name)


_DONE = object()
_encode = msgspec.json.Encoder(enc_hook=lambda ids: msgspec.Raw(ids.json)).encode  # of `PromptIds`


def _last_line(data: bytes, end: int) -> tuple[bytes, int]:
    """The last line before a place that is not empty, and where it begins; empty if there is none."""
    while end > 0:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        if line := data[begin:end].strip():
            return line, begin
        end = begin
    return b"", 0


def parsed(raw: bytes) -> Any:
    """JSON, or text if it is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        text = raw.decode(errors="replace")
    try:
        return json.loads(text)  # it also takes NaN and bytes that are no UTF-8
    except (ValueError, RecursionError):
        return text


def brief(answer: Any) -> str:
    """An engine's failure message, in one short line."""
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        answer = inner.get("message") or inner.get("error_message") or inner if isinstance(inner, dict) else inner
    return " ".join(str(answer).split())[:200] or "nothing more"
