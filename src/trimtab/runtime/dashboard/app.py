"""The dashboard over HTTP: the page and its files, how things stand, a stream of changes, stories, and what is asked.

Looking needs no token: whoever is on this machine may. Whatever changes something needs it, on loopback too. A Host
that is another machine's, or a page of another origin, is refused before anything else. Nothing is loaded from anywhere
else: the page's policy allows this server alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trimtab.core.errors import InputError, TrimtabError, printable
from trimtab.runtime.dashboard.feed import Feed, FeedClient
from trimtab.runtime.dashboard.source import PageSource
from trimtab.runtime.gateway.errors import Refusal
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
EVERY_S = 0.25  # between two looks
SELDOM_S = 5.0  # at most, on a machine that has no time
PART = 8.0  # it rests so many times as long as a look took
BEAT_S = 15.0  # a line for whoever is between us, when nothing happens
SEND_S = 20.0  # for a client to take what it was sent; then it counts as gone
RETRY_MS = 1_000
MOST_STREAMS = 4_096
MOST_BYTES = 16_384  # of what is asked

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class DashboardApp:
    """Serves one source. `follow` must run for anything to change."""

    def __init__(self, source: PageSource, token: str, *, every_s: float = EVERY_S) -> None:
        self._source = source
        self._every_s = every_s
        self._turn = asyncio.Lock()  # for asking the source
        self.feed = Feed()
        self._whole: tuple[int, bytes] | None = None
        self._looked, self._looked_at = asyncio.Event(), 0.0
        self._fault = ""
        self._logged: set[str] = set()
        self._guard = GatewayGuard(GatewaySettings(token=token, max_body_bytes=MOST_BYTES))
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
        """One request."""
        if scope["type"] != "http":
            return
        heads = dict(scope["headers"])
        try:
            self._guard.check_host(heads)
        except Refusal as refusal:
            await _refused(refusal)(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    # ---- following -----------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look again and again, and tell what changed, until it is cancelled. While nobody is there, nobody looks."""
        while True:
            began = time.monotonic()
            if self.feed.clients or not self._looked.is_set():
                await self._look()
            await asyncio.sleep(max(self._every_s, min(PART * (time.monotonic() - began), SELDOM_S)))

    async def _look(self) -> None:
        def looked() -> bytes | None:
            found = self._source.look()
            return None if found is None else _json(found)

        unknown: Exception | None = None
        async with self._turn:
            try:
                change, fault = await asyncio.to_thread(looked), ""
            except Exception as error:  # the page says so and goes on with what it has; the loop is started again
                change, fault = None, self._why(error)
                unknown = None if isinstance(error, TrimtabError) else error
            if fault != self._fault:
                self._fault = fault
                self.feed.publish(_json({"fault": fault}))
            if change is not None:
                self.feed.publish(change)
            self._looked_at = time.monotonic()
        self._looked.set()
        if unknown is not None:
            raise unknown

    def _why(self, error: Exception) -> str:
        """A fault in words; one of ours is logged, once."""
        if isinstance(error, TrimtabError):
            return error.what
        words = f"this cannot be shown: {printable(describe(error), 200)}"
        if words not in self._logged:
            self._logged.add(words)
            log.error(words, exc_info=error)
        return words

    async def send_final_state(self) -> None:
        """Look once more, and see it sent: how a run ended is told to whoever watches it."""
        if self.feed.clients:
            await self._look()
        while any(client.waits for client in self.feed.clients):
            await asyncio.sleep(0.01)

    async def _look_first(self) -> None:
        """Look, if nobody has for a while."""
        await self._looked.wait()
        if not self.feed.clients and time.monotonic() - self._looked_at > self._every_s:
            await self._look()

    async def _all(self) -> tuple[int, bytes]:
        """The whole of how things stand, and the number of the last change in it."""
        await self._look_first()
        async with self._turn:  # a thousand who come at once need it written once
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
        number, whole = await self._all()
        return Response(whole, media_type="application/json", headers={"last-event-id": self.feed.id(number)})

    async def _story(self, request: Request) -> Response:
        kind, name = request.query_params.get("kind", ""), request.query_params.get("name", "")
        await self._look_first()
        try:
            async with self._turn:
                found = await asyncio.to_thread(self._source.story, kind, name)
        except Exception as error:
            return JSONResponse({"error": self._why(error)}, 502)
        if found is None:
            return JSONResponse({"error": f"there is no {kind or 'thing'} {name}"}, 404)
        return JSONResponse(found)

    async def _change(self, request: Request) -> Response:
        heads = dict(request.scope["headers"])
        try:
            self._guard.check_token(heads)
            body = await self._guard.body(heads, request.receive)
            facts = json.loads(body) if body else {}
            if not isinstance(facts, dict):
                raise ValueError
        except Refusal as refusal:
            return _refused(refusal)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "what is asked must be a JSON object"}, 400)
        try:
            said = await asyncio.to_thread(self._source.change, request.path_params["what"], facts)
        except TrimtabError as error:
            status = 400 if isinstance(error, InputError) else 502
            return JSONResponse({"error": error.what, "hint": error.hint or ""}, status)
        return JSONResponse({"said": said})

    # ---- the stream ----------------------------------------------------------------------------------------------

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.feed.clients) >= MOST_STREAMS:
            busy = JSONResponse({"error": "too many look at once"}, 503, {"retry-after": "10"})
            await busy(scope, receive, send)
            return
        request = Request(scope)
        last = request.headers.get("last-event-id") or request.query_params.get("after", "")
        heads = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": heads})
        client = FeedClient()
        gone = asyncio.create_task(_until_gone(receive))
        sending = asyncio.create_task(self._send_all(client, last, send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.feed.clients.discard(client)
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError, OSError):  # it may be gone
            await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), 1.0)

    async def _send_all(self, client: FeedClient, last: str, send: Send) -> None:
        async def give(data: bytes) -> None:
            await asyncio.wait_for(send({"type": "http.response.body", "body": data, "more_body": True}), SEND_S)

        await give(f"retry: {RETRY_MS}\n\n".encode())
        missed = self.feed.since(last)
        while missed is None:
            number, data = await self._all()
            later = self.feed.since(self.feed.id(number))
            missed = None if later is None else [self.feed.framed("whole", data, number), *later]
        # Nothing is awaited between here and joining: no change is lost, and none comes twice.
        if missed:
            client.put(b"".join(missed))
        self.feed.clients.add(client)
        while not (client.behind or client.is_over or self.feed.is_over):
            found = await client.get(BEAT_S)
            if found is not None:
                await give(found)
            elif not (client.behind or client.is_over):
                await give(b": still here\n\n")
        if client.behind:
            await give(b"event: behind\ndata: {}\n\n")


class _AsgiEndpoint:
    """Something that answers by itself, where a route would take it for a function of a request."""

    def __init__(self, answers: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answers(scope, receive, send)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_headers(send: Send) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sent


def _refused(refusal: Refusal) -> Response:
    return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
