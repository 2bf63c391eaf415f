"""The dashboard over HTTP: the page and its files, the current state, a stream of changes, stories, and change
requests.

Reading needs no token: any local process may. Every change needs it, on loopback too. A foreign Host header or a page
of another origin is refused before anything else. The page's policy allows this server alone.

Changes are numbered messages to all clients; the last ones are kept. A client says which it had last and gets the later
ones, if they are still kept and of this server; else the whole state. A client that does not take its messages is
dropped and reconnects by itself: a slow client delays no other, and memory does not grow with clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.core.errors import InputError, TrimtabError, printable
from trimtab.runtime.gateway.exchange import Refusal
from trimtab.runtime.gateway.guard import GatewayGuard
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.procs.background import describe

log = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
EVERY_S = 0.25  # between two polls of the source
MAX_INTERVAL_S = 5.0  # maximum interval on a busy machine
REST_FACTOR = 8.0  # it sleeps at least this many times as long as a poll took
HEARTBEAT_S = 15.0  # keep-alive line for proxies, when nothing happens
SEND_S = 20.0  # for a client to take a message; then it counts as gone
RETRY_MS = 1_000
MAX_STREAMS = 4_096
MAX_BODY_BYTES = 16_384  # of a change request
BODY_S = 30.0
CLOSES = {"connection": "close"}
MAX_KEPT = 256
MAX_KEPT_BYTES = 4 * 2**20
MAX_WAITING = 32  # messages for one client
MAX_WAITING_BYTES = 8 * 2**20


class FeedClient:
    """One client's queue. `behind` once it was dropped."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.behind = False
        self.closed = False  # the server ends

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting)

    def end(self) -> None:
        self.closed = True
        self._waiting.clear()
        self._changed.set()

    def put(self, message: bytes) -> None:
        """Queue a message, or drop the client if it has too many."""
        if self.behind or self.closed:
            return
        # One message always fits, however large: else the state of a large run could never be sent.
        if self._waiting and (len(self._waiting) >= MAX_WAITING or self._bytes + len(message) > MAX_WAITING_BYTES):
            self.behind = True
            self._waiting.clear()
        else:
            self._waiting.append(message)
            self._bytes += len(message)
        self._changed.set()

    async def get(self, wait_s: float) -> bytes | None:
        """The next message; None on time-out, or if the client is behind or closed."""
        if not (self._waiting or self.behind or self.closed):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except asyncio.TimeoutError:
                return None
        if self.behind or self.closed:
            return None
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message


class Feed:
    """The messages and their clients."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self.number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self.clients: set[FeedClient] = set()
        self.closed = False

    def publish(self, data: bytes) -> None:
        """Send a change to all clients, and keep it for those that reconnect."""
        self.number += 1
        message = self.frame("change", data, self.number)
        self._kept.append((self.number, message))
        self._kept_bytes += len(message)
        while len(self._kept) > MAX_KEPT or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        for client in self.clients:
            client.put(message)

    def end(self) -> None:
        """End all streams, also of later clients."""
        self.closed = True
        for client in self.clients:
            client.end()

    def id(self, number: int) -> str:
        """Event id of a message; unique to this server."""
        return f"{self._epoch}-{number}"

    def frame(self, event: str, data: bytes, number: int) -> bytes:
        """A message in server-sent-events format; `data` has no line breaks."""
        return f"event: {event}\nid: {self.id(number)}\ndata: ".encode() + data + b"\n\n"

    def since(self, last: str) -> list[bytes] | None:
        """Messages after `last`; None if they are not kept any more, or `last` is of another server."""
        epoch, _, number = last.partition("-")
        if epoch != self._epoch or not number.isdecimal() or len(number) > 12:
            return None
        had = int(number)
        if had == self.number:
            return []
        if had > self.number or not self._kept or self._kept[0][0] > had + 1:
            return None
        return [message for at, message in self._kept if at > had]


class PageSource(Protocol):
    """Called from one thread at a time, but not always the same. May block."""

    def look(self) -> Mapping[str, Any] | None:
        """Changes since the last call, as data for JSON; None without any."""

    def whole(self) -> Mapping[str, Any]:
        """The full state after all calls of `look`, for a new client."""

    def story(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """The story of a task, worker, node, component, move or mark; None if it does not exist."""

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """Static files: path, media type and content. The page itself is at `/`."""

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        """Change something; returns a sentence. Raises a TrimtabError; InputError if `what` is unknown."""


class DashboardApp:
    """Serves one source. `follow` must run for anything to change."""

    def __init__(self, source: PageSource, token: str, *, every_s: float = EVERY_S) -> None:
        self._source = source
        self._every_s = every_s
        self._source_lock = asyncio.Lock()  # held while the source is called
        self.feed = Feed()
        self._whole: tuple[int, bytes] | None = None
        self._polled, self._polled_at = asyncio.Event(), 0.0
        self._fault = ""
        self._logged: set[str] = set()
        self._guard = GatewayGuard(GatewaySettings(token=token))
        self._files = source.files()
        self._app = Starlette(
            routes=[
                Route("/story", self._story),
                Route("/state", self._state_now),
                Route("/change/{what}", self._change, methods=["POST"]),
                Route("/{path:path}", self._file),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer: ASGIApp = self._stream if scope["path"] == "/events" else self._app
        try:
            self._guard.check_host(dict(scope["headers"]))
        except Refusal as refusal:
            answer = _refused(refusal)
        await answer(scope, receive, _with_headers(send))

    # ---- following -----------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Poll and publish changes until cancelled; pauses while there is no client."""
        while True:
            began = time.monotonic()
            if self.feed.clients or not self._polled.is_set():
                await self._poll()
            await asyncio.sleep(max(self._every_s, min(REST_FACTOR * (time.monotonic() - began), MAX_INTERVAL_S)))

    async def _poll(self) -> None:
        def poll() -> bytes | None:
            found = self._source.look()
            return None if found is None else _json(found)

        unknown: Exception | None = None
        async with self._source_lock:
            try:
                change, fault = await asyncio.to_thread(poll), ""
            except Exception as error:  # shown on the page; the background loop restarts after it
                change, fault = None, self._why(error)
                unknown = None if isinstance(error, TrimtabError) else error
            if fault != self._fault:
                self._fault = fault
                self.feed.publish(_json({"fault": fault}))
            if change is not None:
                self.feed.publish(change)
            self._polled_at = time.monotonic()
        self._polled.set()
        if unknown is not None:
            raise unknown

    def _why(self, error: Exception) -> str:
        """A fault as text; an unexpected one is logged, once."""
        if isinstance(error, TrimtabError):
            return error.what
        words = f"this cannot be shown: {printable(describe(error), 200)}"
        if words not in self._logged:
            self._logged.add(words)
            log.error(words, exc_info=error)
        return words

    async def send_final_state(self) -> None:
        """Poll once more and wait until it is sent: clients see how a run ended."""
        if self.feed.clients:
            await self._poll()
        while any(client.has_pending for client in self.feed.clients):
            await asyncio.sleep(0.01)

    async def _poll_if_stale(self) -> None:
        await self._polled.wait()
        if not self.feed.clients and time.monotonic() - self._polled_at > self._every_s:
            await self._poll()

    async def _snapshot(self) -> tuple[int, bytes]:
        """The whole state, and the number of the last change in it."""
        await self._poll_if_stale()
        async with self._source_lock:  # many clients that come at once share one
            if self._whole is None or self._whole[0] != self.feed.number:
                try:
                    whole = await asyncio.to_thread(lambda: _json({**self._source.whole(), "fault": self._fault}))
                except Exception as error:
                    whole = _json({"fault": self._why(error)})
                self._whole = self.feed.number, whole
            return self._whole

    # ---- answers -------------------------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.url.path)
        if found is None:
            return JSONResponse({"error": "there is no such page"}, 404)
        return Response(found[1], media_type=found[0])

    async def _state_now(self, request: Request) -> Response:
        number, whole = await self._snapshot()
        return Response(whole, media_type="application/json", headers={"last-event-id": self.feed.id(number)})

    async def _story(self, request: Request) -> Response:
        kind, name = request.query_params.get("kind", ""), request.query_params.get("name", "")
        await self._poll_if_stale()
        try:
            async with self._source_lock:
                found = await asyncio.to_thread(self._source.story, kind, name)
        except Exception as error:
            return JSONResponse({"error": self._why(error)}, 502)
        if found is None:
            return JSONResponse({"error": f"there is no {kind or 'thing'} {name}"}, 404)
        return JSONResponse(found)

    async def _change(self, request: Request) -> Response:
        headers = dict(request.scope["headers"])
        try:
            self._guard.check_token(headers)
            body = await asyncio.wait_for(_body_of(request), BODY_S)
            facts = json.loads(body) if body else {}
            if not isinstance(facts, dict):
                raise ValueError
        except Refusal as refusal:
            return _refused(refusal)
        except asyncio.TimeoutError:
            return _refused(Refusal(408, f"the body did not arrive within {BODY_S:g} s", headers=CLOSES))
        except (ValueError, RecursionError):
            return JSONResponse({"error": "the body must be a JSON object"}, 400)
        try:
            answer = await asyncio.to_thread(self._source.change, request.path_params["what"], facts)
        except TrimtabError as error:
            status = 400 if isinstance(error, InputError) else 502
            return JSONResponse({"error": error.what, "hint": error.hint or ""}, status)
        return JSONResponse({"said": answer})

    # ---- the stream ----------------------------------------------------------------------------------------------

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.feed.clients) >= MAX_STREAMS:
            busy = JSONResponse({"error": "too many clients"}, 503, {"retry-after": "10"})
            await busy(scope, receive, send)
            return
        request = Request(scope)
        last = request.headers.get("last-event-id") or request.query_params.get("after", "")
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        client = FeedClient()
        gone = asyncio.create_task(_until_disconnect(receive))
        sending = asyncio.create_task(self._send_all(client, last, send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.feed.clients.discard(client)
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError, OSError):  # the client may be gone
            await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), 1.0)

    async def _send_all(self, client: FeedClient, last: str, send: Send) -> None:
        async def write(data: bytes) -> None:
            await asyncio.wait_for(send({"type": "http.response.body", "body": data, "more_body": True}), SEND_S)

        await write(f"retry: {RETRY_MS}\n\n".encode())
        missed = self.feed.since(last)
        while missed is None:
            number, data = await self._snapshot()
            later = self.feed.since(self.feed.id(number))
            missed = None if later is None else [self.feed.frame("whole", data, number), *later]
        # Nothing is awaited between here and joining: no change is lost, and none comes twice.
        if missed:
            client.put(b"".join(missed))
        self.feed.clients.add(client)
        while not (client.behind or client.closed or self.feed.closed):
            found = await client.get(HEARTBEAT_S)
            if found is not None:
                await write(found)
            elif not (client.behind or client.closed):
                await write(b": still here\n\n")
        if client.behind:
            await write(b"event: behind\ndata: {}\n\n")


async def _body_of(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:  # the rest is not read, so the connection cannot be used again
            raise Refusal(413, f"a body has at most {MAX_BODY_BYTES} bytes", headers=CLOSES)
    return body


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_headers(send: Send) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return send_with_headers


def _refused(refusal: Refusal) -> Response:
    return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
