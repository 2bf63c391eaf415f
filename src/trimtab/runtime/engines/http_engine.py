"""Engines over HTTP: the client of one engine, which calls its server has, and the base of their adapters.

One `ClientSession` serves all engines of a process. Calls have a deadline, and event streams a silence timeout: no wait
is unbounded. Failures are raised as the errors of `engine.py`, never as those of the HTTP library. A 200 with
`success: false` is a failure. Redirects are not followed: prompts go only to the address that was allowed, which is
private.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trimtab.core.errors import InputError, TrimtabError
from trimtab.runtime.engines.engine import (
    Engine,
    EngineDeadlines,
    EngineFailedError,
    EngineGoneError,
    EngineMalformedError,
    EngineRefusedError,
    EngineWedgedError,
    EventStream,
    ForwardRequest,
    GenerateRequest,
    NotSupportedError,
    OpenStream,
    StreamDelta,
)
from trimtab.runtime.engines.gated import GatedEngine

MAX_EVENT_BYTES = 64 * 2**20
"""Per event or answer. A vocabulary with its bytes is about 20 MB."""

_REST_S = 0.5


def open_session() -> aiohttp.ClientSession:
    """A session for any number of engines; connections are unlimited, because the router limits requests.

    Idle ones are closed well before engines close them, which is after 5 s.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))


async def addresses(url: str) -> frozenset[tuple[str, int]]:
    """Numeric addresses of a URL: two URLs that share one lead to the same engine."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise InputError(f"'{url}' is no address of an engine", hint="write http://HOST:PORT")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InputError(f"the host of '{url}' has no address: {error}") from None
    return frozenset((str(address[0]).partition("%")[0], port) for *_, address in found)


async def require_private(url: str) -> None:
    """Refuses addresses that are reachable from outside: engines have no access control."""
    for host, _ in await addresses(url):
        numeric = ipaddress.ip_address(host)
        if numeric.is_global or numeric.is_unspecified or numeric.is_multicast:
            raise InputError(
                f"'{url}' is {numeric}, which is not a private address",
                hint="engines have no access control; use a loopback or private interface",
            )


class EngineHttpClient:
    """Calls and streams of one engine."""

    def __init__(
        self,
        name: str,
        url: str,
        session: aiohttp.ClientSession,
        deadlines: EngineDeadlines,
        *,
        keep_alive: bool = True,
    ) -> None:
        self.name, self.url, self.session, self.deadlines = name, url.rstrip("/"), session, deadlines
        # If a server closes idle connections unannounced, the next request looks as if the server were gone.
        self.headers = {} if keep_alive else {"Connection": "close"}

    async def get(self, path: str, *, within_s: float | None = None, **query: Any) -> Any:
        """Returns JSON, or text if it is no JSON."""
        return await self._call("GET", path, None, query, within_s)

    async def post(
        self, path: str, body: Any = None, *, within_s: float | None = None, keep_alive: bool = True, **query: Any
    ) -> Any:
        """`keep_alive` False: for calls that may fail and be followed by another.

        After an exception uvicorn answers 500 and closes the connection unannounced: the next call would meet that.
        """
        return await self._call("POST", path, body, query, within_s, keep_alive)

    async def options(self, path: str) -> Any:
        return await self._call("OPTIONS", path, None, {}, None)

    async def _call(
        self,
        method: str,
        path: str,
        body: Any,
        query: dict[str, Any],
        within_s: float | None,
        keep_alive: bool = True,
    ) -> Any:
        if self.session.closed:
            raise EngineGoneError(f"{method} {path}: the session is closed", engine=self.name)
        seconds = within_s if within_s is not None else self.deadlines.call_s
        headers = self.headers if keep_alive else {"Connection": "close"}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self.deadlines.connect_s)
        try:
            async with self.session.request(
                method, self.url + path, json=body, params=query or None, timeout=timeout, headers=headers,
                allow_redirects=False,
            ) as response:  # fmt: skip
                raw = await response.content.read(MAX_EVENT_BYTES + 1)
                while len(raw) <= MAX_EVENT_BYTES and (more := await response.content.read(MAX_EVENT_BYTES + 1)):
                    raw += more
                status, location = response.status, response.headers.get("location", "")
        except asyncio.TimeoutError:
            raise EngineWedgedError(f"{method} {path} had no answer in {seconds:g} s", engine=self.name) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"{method} {path}: {_message(error)}", engine=self.name) from None
        if len(raw) > MAX_EVENT_BYTES:
            raise EngineMalformedError(f"{method} {path} answered without end", engine=self.name)
        answer = _parsed(raw)
        self.raise_for_answer(f"{method} {path}", status, answer, location)
        return answer

    def raise_for_answer(self, call: str, status: int, answer: Any, location: str = "") -> None:
        """Raises the error of an unsuccessful answer."""
        if 300 <= status < 400:
            to = f" to {location[:200]}" if location else ""
            raise EngineFailedError(
                f"{call} answered with a redirect{to} ({status}), which is not followed: attach the engine by its own"
                " address",
                engine=self.name,
            )
        if status == 404:
            said = f": {brief(answer)}" if isinstance(answer, dict) and "detail" not in answer else ""
            raise NoSuchPathError(f"{call} is unknown there (404){said}", engine=self.name)
        if 400 <= status < 500 and status not in (408, 429):
            raise EngineRefusedError(f"{call} was refused ({status}): {brief(answer)}", where=f"engine {self.name}")
        if not 200 <= status < 300:
            raise EngineFailedError(f"{call} failed ({status}): {brief(answer)}", engine=self.name)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailedError(f"{call} said 200, but success: false: {brief(answer)}", engine=self.name)

    def events(
        self, path: str, body: Any, *, whole: bool = False, alive_at: Callable[[], float | None] | None = None
    ) -> HttpEventStream:
        return HttpEventStream(self, path, body, whole, alive_at)


class NoSuchPathError(EngineFailedError):
    """The path does not exist: another kind or release of server, or no development mode."""


class HttpEventStream:
    """An open stream; iterates over the JSON of its events until `[DONE]` or the end of the connection.

    A timer per stream closes the connection on silence; reading then fails with `EngineWedgedError`. The reader decides
    whether the end came with a final event. `whole`: the answer is one JSON body, which counts as its only event.
    `alive_at`: when the engine was last seen to generate; silence counts from then.
    """

    def __init__(
        self,
        wire: EngineHttpClient,
        path: str,
        body: Any,
        whole: bool = False,
        alive_at: Callable[[], float | None] | None = None,
    ) -> None:
        self._wire, self._path, self._body = wire, path, body
        self._whole, self._alive_at = whole, alive_at
        self._response: aiohttp.ClientResponse | None = None
        self._opening: asyncio.Future[aiohttp.ClientResponse] | None = None  # until the response head
        self._timer: asyncio.TimerHandle | None = None
        self._first = True
        # Start of the current wait for bytes; None while the reader is processing, which is no silence.
        self._waiting_since: float | None = None
        self._allowed_s = wire.deadlines.first_bytes_s
        self._silent = False
        self.closed_on_purpose = False

    def close(self, *, on_purpose: bool = False) -> None:
        """Closes the connection, which engines take as an abort; harmless after the end."""
        self.closed_on_purpose |= on_purpose
        if self._timer:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._response is not None:
            self._response.close()

    def close_within(self, seconds: float) -> None:
        """Closes the connection on purpose unless the stream has ended by then."""
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, lambda: self.close(on_purpose=True))
        self._allowed_s = -1.0  # the new timer replaces the silence timeout

    async def rest(self) -> None:
        """Reads what follows the last delta, if it comes soon, so that the connection can be reused."""
        if self._wire.headers or self._response is None or self._whole:
            return
        self.close_within(_REST_S)
        with suppress(aiohttp.ClientError, OSError):
            while await self._response.content.readany():
                pass

    async def __aiter__(self) -> AsyncIterator[Any]:
        response = await self._open()
        held = b""
        try:
            if self._whole:
                yield self._checked(await self._body_of(response))
                return
            while True:
                self._waiting_since = asyncio.get_running_loop().time()
                chunk = await response.content.readany()
                if not chunk:
                    return
                self._on_bytes()
                *lines, held = (held + chunk).split(b"\n")
                if len(held) > MAX_EVENT_BYTES:
                    raise EngineMalformedError("an event without end", engine=self._wire.name)
                for line in lines:
                    event = self._event(line)
                    if event is _DONE:
                        return
                    if event is not None:
                        yield event
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from None

    async def _body_of(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        self._waiting_since = asyncio.get_running_loop().time()
        while chunk := await response.content.readany():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_EVENT_BYTES:
                raise EngineMalformedError("an answer without end", engine=self._wire.name)
        if self._timer:
            self._timer.cancel()
        return b"".join(chunks)

    async def _open(self) -> aiohttp.ClientResponse:
        deadlines = self._wire.deadlines
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=deadlines.connect_s)
        wire = self._wire
        sent = wire.session.post(
            wire.url + self._path, data=msgspec.json.encode(self._body), timeout=timeout,
            headers={"Content-Type": "application/json", **wire.headers}, allow_redirects=False,
        )  # fmt: skip
        self._opening = asyncio.ensure_future(_answered(sent))
        self._waiting_since = asyncio.get_running_loop().time()
        self._arm(deadlines.first_bytes_s)
        try:
            self._response = await self._opening
        except asyncio.CancelledError as error:
            if self._silent or self.closed_on_purpose:  # cancelled here; otherwise the caller was cancelled
                raise self._broken(error) from None
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from None
        finally:
            self._opening = None
        if self._response.status != 200:
            raw = b""
            with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                raw = await asyncio.wait_for(self._response.content.read(2**16), deadlines.call_s)
            location = self._response.headers.get("location", "")
            self._wire.raise_for_answer(f"POST {self._path}", self._response.status, _parsed(raw), location)
        return self._response

    def _event(self, line: bytes) -> Any:
        line = line.strip()
        if not line.startswith(b"data:"):
            if line.startswith((b":", b"event:", b"id:", b"retry:")) or not line:
                return None
            if line.startswith(b"error:"):  # llama.cpp's failures within a stream
                raise self._failed(_parsed(line[6:]))
            raise EngineMalformedError(f"not an event: {line[:80]!r}", engine=self._wire.name)
        payload = line[5:].strip()
        return _DONE if payload == b"[DONE]" else self._checked(payload)

    def _checked(self, payload: bytes) -> Any:
        event = _parsed(payload)
        if not isinstance(event, dict):
            raise EngineMalformedError(f"an event that is no object: {payload[:80]!r}", engine=self._wire.name)
        if event.get("error"):
            raise self._failed(event["error"])
        return event

    def _failed(self, error: Any) -> EngineFailedError | EngineRefusedError:
        """An error within a stream, after status 200."""
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500 and code not in (408, 429):
            return EngineRefusedError(f"it was refused ({code}): {brief(error)}", where=f"engine {self._wire.name}")
        return EngineFailedError(f"it failed within the stream: {brief(error)}", engine=self._wire.name)

    def _on_bytes(self) -> None:
        self._waiting_since = None
        if self._first and self._allowed_s > 0:
            self._first, self._allowed_s = False, self._wire.deadlines.silence_s
            self._arm(self._allowed_s)

    def _arm(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check_silence)

    def _check_silence(self) -> None:
        now = asyncio.get_running_loop().time()
        since = now if self._waiting_since is None else self._waiting_since
        if self._alive_at is not None:
            since = max(since, self._alive_at() or since)
        left_s = self._allowed_s - (now - since)
        if left_s > 0.001:
            self._arm(left_s)
            return
        self._silent = True
        self.close()

    def _broken(self, error: BaseException) -> EngineGoneError | EngineWedgedError:
        if self._silent:
            what = f"POST {self._path}: no bytes for {self._allowed_s:g} s"
            return EngineWedgedError(what, engine=self._wire.name)
        gone = EngineGoneError(f"POST {self._path}: {_message(error)}", engine=self._wire.name)
        gone.reached = not isinstance(error, aiohttp.ClientConnectorError)
        return gone


_DONE = object()


async def _answered(sent: Any) -> aiohttp.ClientResponse:
    response: aiohttp.ClientResponse = await sent
    return response


def _parsed(raw: bytes) -> Any:
    """JSON, or text if it is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except ValueError:
        text = raw.decode(errors="replace")
    try:
        return json.loads(text)  # it also takes NaN and bytes that are no UTF-8
    except ValueError:
        return text


def brief(answer: Any) -> str:
    """An engine's failure message, in one short line."""
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        answer = inner.get("message") or inner.get("error_message") or inner if isinstance(inner, dict) else inner
    return " ".join(str(answer).split())[:200] or "nothing more"


def _message(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ---- which calls a server has: asked of the server, not concluded from its release


@dataclass(frozen=True)
class ServedCalls:
    """Calls of a server. `fields` has the query parameters and body fields of a call; None: not said."""

    paths: frozenset[str] = frozenset()
    fields: Mapping[str, frozenset[str]] | None = field(default=None)

    def has(self, path: str) -> bool:
        return path in self.paths

    def takes(self, path: str, name: str, otherwise: bool) -> bool:
        """Whether the call takes this field; `otherwise` where the server does not say."""
        known = None if self.fields is None else self.fields.get(path)
        return self.has(path) and (otherwise if not known else name in known)


async def served_calls(wire: EngineHttpClient, paths: Collection[str]) -> ServedCalls:
    """Asks the server which of these calls it has."""
    try:
        page = await wire.get("/openapi.json")
    except (EngineGoneError, EngineWedgedError):
        raise
    except TrimtabError:
        page = None
    if isinstance(page, dict) and isinstance(page.get("paths"), dict):
        found = {path: _fields(page, call) for path, call in page["paths"].items() if path in paths}
        if found:
            return ServedCalls(frozenset(found), found)
    return ServedCalls(frozenset([path for path in paths if await _exists(wire, path)]))


async def _exists(wire: EngineHttpClient, path: str) -> bool:
    try:
        await wire.options(path)
    except NoSuchPathError:
        return False
    except (EngineGoneError, EngineWedgedError):
        raise
    except TrimtabError:
        pass  # 405: the call exists, with another method
    return True


def _fields(page: dict[str, Any], call: Any) -> frozenset[str]:
    """Names of the query parameters and body fields of all methods of a call."""
    found: set[str] = set()
    for method in call.values() if isinstance(call, dict) else ():
        if not isinstance(method, dict):
            continue
        found |= {str(parameter.get("name")) for parameter in method.get("parameters") or ()}
        for content in ((method.get("requestBody") or {}).get("content") or {}).values():
            found |= _properties(page, content.get("schema") or {}, 0)
    return frozenset(found)


def _properties(page: dict[str, Any], schema: dict[str, Any], depth: int) -> set[str]:
    if depth > 4:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        schema = ((page.get("components") or {}).get("schemas") or {}).get(reference.rpartition("/")[2]) or {}
    found = set(schema.get("properties") or ())
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())):
        found |= _properties(page, part, depth + 1)
    return found


# ---- adapters


class HttpEngine(GatedEngine):
    """Common half of the HTTP adapters; the session belongs to the caller and outlives them."""

    keeps_alive: ClassVar[bool] = True
    forwards: ClassVar[bool] = True  # a whole answer ends there when its connection is closed
    adapter_call: ClassVar[str] = ""  # that loads a LoRA adapter; empty: none
    adapter_flags: ClassVar[str] = ""  # to start it with
    _calls: ServedCalls | None = None  # None: not asked yet

    def __init__(
        self, name: str, url: str, session: aiohttp.ClientSession, deadlines: EngineDeadlines | None = None
    ) -> None:
        super().__init__(name, deadlines)
        self.url = url
        self.wire = EngineHttpClient(name, url, session, self.deadlines, keep_alive=self.keeps_alive)
        self._private = False
        self._loading_adapter = asyncio.Lock()

    async def _ensure_reachable(self) -> None:
        if not self._private:
            await require_private(self.url)
            self._private = True

    def _has(self, path: str) -> bool:
        return self._calls is not None and self._calls.has(path)

    def forward(self, request: ForwardRequest) -> AsyncGenerator[StreamDelta, None]:
        """Sends a call as it is; one delta with the whole reply. Gate and aborts are those of `generate`."""
        if not self.forwards:
            raise self._lacks("take requests as they are")
        return self._deltas(request)

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter, unless its process has it already."""
        async with self._loading_adapter:
            if name in self.adapters:
                return
            self._require_open()
            await self._ensure_reachable()
            if not self._has(self.adapter_call):
                raise self._lacks("load LoRA adapters", self.adapter_flags)
            there = await self._models()
            if there.get(name, path) != path:
                what = f"it has another {name}, from {there[name]}"
                raise EngineRefusedError(what, where=f"engine {self.name}", hint="choose another name")
            if name in there and name in self._spoiled:
                await self._adapter_call(self.adapter_call.replace("load", "unload"), name, path)
                del there[name]
            if name not in there:
                await self._adapter_call(self.adapter_call, name, path)
            self.adapters.add(name)
            self._spoiled.discard(name)

    async def _models(self) -> dict[str, str]:
        page = await self.wire.get("/v1/models")
        models = page.get("data") if isinstance(page, dict) else None
        return {str(model.get("id")): str(model.get("root")) for model in models or () if isinstance(model, dict)}

    async def _adapter_call(self, call: str, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        try:
            await self.wire.post(call, body, within_s=self.deadlines.change_s, keep_alive=False)
        except NoSuchPathError as error:
            raise EngineRefusedError(f"there is no adapter at {path}", where=f"engine {self.name}") from error
        except (EngineFailedError, EngineRefusedError) as error:
            if "not enabled" in error.what:
                raise self._lacks("load LoRA adapters", self.adapter_flags) from None
            raise

    def _lacks(self, what: str, flags: str = "") -> NotSupportedError:
        hint = f"start it with {flags}" if flags else None
        return NotSupportedError(f"{self.dialect or self.kind} cannot {what}", where=f"engine {self.name}", hint=hint)

    def _events(self, stream: OpenStream) -> EventStream:
        request = stream.request
        if isinstance(request, ForwardRequest):
            path, body = request.path, self._forward_body(request)
        else:
            path, body = self._generate_call(request, stream.key)
        # Between two pieces there are no bytes: it is alive as long as it makes tokens.
        alive_at = None if request.piece == 1 else lambda: self.progress_at
        return self.wire.events(path, body, whole=request.piece is None, alive_at=alive_at)

    def _forward_body(self, request: ForwardRequest) -> dict[str, Any]:
        """Body of a forwarded request: with the engine's own name of the model, and the adapter."""
        return dict(request.body)

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        """Path and body of a generate call."""
        raise NotImplementedError


def http_engine(engine: Engine, what: str) -> HttpEngine:
    """An engine that can do `what` only over HTTP."""
    if not isinstance(engine, HttpEngine):
        raise NotSupportedError(f"{engine.kind} engines cannot {what}", where=f"engine {engine.name}")
    return engine


async def gauges(wire: EngineHttpClient, path: str = "/metrics") -> dict[str, float]:
    """Reads a Prometheus page; labels are dropped and values of the same name added up."""
    found: dict[str, float] = {}
    for line in str(await wire.get(path)).splitlines():
        if line and not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            with suppress(ValueError):
                name = head.split("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found
