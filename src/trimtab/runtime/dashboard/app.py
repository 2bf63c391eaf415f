"""The dashboard over HTTP: the page and its files, the current state, a stream of changes, stories, and change
requests.

Reading needs no token: any local process may. Every change needs it, on loopback too. A foreign Host header or a page
of another origin is refused before anything else. The page's policy allows this server alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trimtab.core.errors import InputError, TrimtabError, printable
from trimtab.runtime.dashboard.feed import Feed, FeedClient
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

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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
        self._guard = GatewayGuard(GatewaySettings(token=token, max_body_bytes=MAX_BODY_BYTES))
        self._files = source.files()
        self._app = Starlette(
            routes=[
                Route("/events", _AsgiEndpoint(self._stream)),
                Route("/story", self._story),
                Route("/state", self._state_now),
                Route("/change/{what}", self._change, methods=["POST"]),
                Route("/{path:path}", self._file),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        try:
            self._guard.check_host(headers)
        except Refusal as refusal:
            await _refused(refusal)(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

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
        """Poll if the last poll is too old."""
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
            body = await self._guard.body(headers, request.receive)
            facts = json.loads(body) if body else {}
            if not isinstance(facts, dict):
                raise ValueError
        except Refusal as refusal:
            return _refused(refusal)
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


class _AsgiEndpoint:
    """An ASGI endpoint, where a route would take a function of a request."""

    def __init__(self, answers: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answers(scope, receive, send)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_headers(send: Send) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return send_with_headers


def _refused(refusal: Refusal) -> Response:
    return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
