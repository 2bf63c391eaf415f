"""Engines over HTTP: the client of one engine, which calls its server has, and the base of their adapters.

One `ClientSession` serves all engines of a process. Calls have a deadline, and event streams a silence timeout: no wait
is unbounded. Failures are raised as the errors of `engine.py`, never as those of the HTTP library. A 200 with
`success: false` is a failure. Redirects are not followed: prompts go only to the address that was allowed, which is
private.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import suppress
from dataclasses import field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.frozen import Frozen
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
from trimtab.runtime.engines.http_stream import MAX_EVENT_BYTES, EngineConnections, HttpEventStream, brief, parsed


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
        self.connections = EngineConnections(name, self.url, deadlines, self.raise_for_answer, keep_alive=keep_alive)

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
        self, method: str, path: str, body: Any, query: dict[str, Any], within_s: float | None, keep_alive: bool = True
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
        answer = parsed(raw)
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


class NoSuchPathError(EngineFailedError):
    """The path does not exist: another kind or release of server, or no development mode."""


def _message(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ---- which calls a server has: asked of the server, not concluded from its release


class ServedCalls(Frozen):
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

    async def close(self) -> None:
        await super().close()
        self.wire.connections.close()

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
        whole = request.piece is None
        return HttpEventStream(self.wire.connections, path, body, whole, alive_at, stream.reader)

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
