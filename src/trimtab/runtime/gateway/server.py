"""Gateway: its routes with their access levels, a socket on the caller's event loop, and a graceful stop.

Health and readiness are public; generations and queries are open on loopback and need the token elsewhere; changes need
the token everywhere. The Host is checked for every route. Errors are answered in the format of the route, never with a
traceback.

The server starts no thread and handles no signal. A stop refuses new requests at once, lets open ones finish until the
deadline, then answers them with what they have; no connection is left silent. The pool belongs to the caller and is
neither started nor stopped here.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import gc
import logging
import operator
import socket
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.core.errors import InputError, TrimtabError
from trimtab.model.rollout import WorkerState
from trimtab.runtime.gateway.connection import HttpConnections
from trimtab.runtime.gateway.exchange import Handler, HttpExchange, Refusal, refusal_for_error
from trimtab.runtime.gateway.fronts import FrontProcesses
from trimtab.runtime.gateway.guard import GatewayGuard
from trimtab.runtime.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from trimtab.runtime.gateway.openai import OpenAIReader, PoolAdapters
from trimtab.runtime.gateway.serving import STOPPING, GenerationEndpoint, GenerationTracker
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.gateway.sglang import SglangReader
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.gateway.workers import WorkerApi
from trimtab.runtime.http.listening import BACKLOG, allow_files, listening

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.gateway")

T = TypeVar("T")
COLLECT_AFTER = (60_000, 20, 50)  # allocations, and collections of younger generations
FILES_BESIDE = 512
FILES_FEW = 4_096  # fewer: log a warning
NAME = "{name}"


class AccessLevel(enum.Enum):
    """Which routes need the token."""

    public = "public"
    read = "read"
    write = "write"


class GatewayApp:
    """The routes, their access levels, and their answers."""

    def __init__(self, pool: RolloutPool, settings: GatewaySettings) -> None:
        self.pool, self.settings = pool, settings
        self.guard = GatewayGuard(settings)
        self.metrics = GatewayMetrics(pool)
        self.tokenizer = PoolTokenizer(pool, settings.text_s, settings.vocabulary)
        self.serving = GenerationTracker(pool, settings, self.metrics)
        self.workers = WorkerApi(pool, settings, self.guard, self.serving.bodies, self.serving.abort_all)
        self.add_routes(lambda: pool.adapters)

    def admit(self, exchange: HttpExchange) -> None:
        """Finds the route of a request, and checks its Host and token."""
        methods = self._routes.get(exchange.path) or self._named_routes(exchange)
        if exchange.path in FORMS:
            exchange.form = FORMS[exchange.path]
        self.guard.check_host(exchange.headers)
        if methods is None:
            raise Refusal(404, f"there is no {exchange.path} here", code="unknown_path")
        found = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if found is None:
            allowed = ", ".join(sorted(methods.keys() | ({"HEAD"} if "GET" in methods else set())))
            raise Refusal(405, f"only {allowed}", code="wrong_method", headers={"allow": allowed})
        access, exchange.handler = found
        if access is AccessLevel.write or (access is AccessLevel.read and not self.guard.anonymous):
            self.guard.check_token(exchange.headers)

    def _named_routes(self, exchange: HttpExchange) -> dict[str, tuple[AccessLevel, Handler]] | None:
        path = exchange.path
        for begin, end, pattern in self._named:
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end):
                exchange.name = path[len(begin) : len(path) - len(end)]
                return self._routes[pattern]
        return None

    async def answer(self, exchange: HttpExchange) -> None:
        """Answers a request, whatever happens."""
        try:
            if exchange.refusal is not None:
                await exchange.refuse(exchange.refusal)
            else:
                assert exchange.handler is not None
                await exchange.handler(exchange)
        except Exception as fault:
            log.error("%s %s", exchange.method, exchange.path, exc_info=fault)
            await exchange.refuse(Refusal(500, f"internal error in trimtab: {type(fault).__name__}", code="fault"))

    # ---- routes ----------------------------------------------------------------------------------------------------

    def add_routes(self, adapters: PoolAdapters) -> None:
        """Fills the table of routes."""
        self._routes: dict[str, dict[str, tuple[AccessLevel, Handler]]] = {}
        self._named: list[tuple[str, str, str]] = []  # begin and end of a path with a name, and its pattern
        self._openai = OpenAIReader(
            self.tokenizer, self.settings.model_name, self.settings.default_max_tokens, adapters
        )
        for path, name, read in (
            ("/v1/completions", "completions", self._openai.completions),
            ("/v1/chat/completions", "chat", self._openai.chat),
            ("/generate", "generate", SglangReader(self.tokenizer, adapters).generate),
        ):
            endpoint = GenerationEndpoint(self.serving, name, read)
            self._routes[path] = {"POST": (AccessLevel.read, endpoint)}
        for method, path, access, name, status in ROUTES:
            answer = functools.partial(self.answer_route, access, name, status)
            self._routes.setdefault(path, {})[method] = (access, answer)
            begin, named, end = path.partition(NAME)
            if named and (begin, end, path) not in self._named:
                self._named.append((begin, end, path))

    async def answer_route(self, access: AccessLevel, name: str, status: int, exchange: HttpExchange) -> None:
        """Answers a request that is no generation, within a deadline."""
        exchange.closing |= self.serving.stopping
        within_s = self.settings.change_s + self.settings.body_s
        try:
            if access is AccessLevel.write and self.serving.stopping:
                raise Refusal(503, STOPPING, code="stopping")
            answer = await asyncio.wait_for(operator.attrgetter(name)(self)(exchange), within_s)
            if isinstance(answer, bytes):
                await exchange.raw(answer, status, [(b"content-type", CONTENT_TYPE.encode())])
            else:
                await exchange.json(answer, status)
        except (Refusal, TrimtabError) as error:
            await exchange.refuse(refusal_for_error(error))
        except asyncio.TimeoutError:
            await exchange.refuse(Refusal(504, f"not done within {within_s:g} s", code="timeout"))

    async def health(self, exchange: HttpExchange) -> Any:
        return {"status": "ok"}

    async def ready(self, exchange: HttpExchange) -> Any:
        if self.serving.stopping:
            raise Refusal(503, STOPPING, code="stopping")
        views = self.pool.workers()
        serving = sum(view.state is WorkerState.active for view in views)
        if not serving:
            why = "; ".join(f"{view.worker} is {view.state.value}: {view.reason.sentence}" for view in views[:8])
            raise Refusal(
                503, f"no worker could serve: {why or 'there is none'}", code="no_worker", headers={"retry-after": "1"}
            )
        return {"status": "ready", "healthy_workers": serving, "total_workers": len(views)}

    async def models(self, exchange: HttpExchange) -> Any:
        model = {"id": await self._openai.model(), "object": "model", "created": 0, "owned_by": "trimtab"}
        adapters = [{**model, "id": name, "parent": model["id"]} for name in self.pool.adapters]
        return {"object": "list", "data": [model, *adapters]}

    async def model(self, exchange: HttpExchange) -> Any:
        name = exchange.name
        for model in (await self.models(exchange))["data"]:
            if model["id"] == name:
                return model
        raise Refusal(404, f"there is no model {name!r}", code="model_not_found")

    async def model_info(self, exchange: HttpExchange) -> Any:
        info = {"model_path": await self._openai.model(), "is_generation": True}
        return {**info, "weight_version": str(self.pool.version)}

    async def metrics_page(self, exchange: HttpExchange) -> Any:
        return self.metrics.text()

    async def status(self, exchange: HttpExchange) -> Any:
        gateway = {
            "open": self.serving.open, "limit": self.settings.max_concurrent, "stopping": self.serving.stopping,
            "faults": self.workers.faults,
        }  # fmt: skip
        return {**self.pool.status(), "gateway": gateway}


_PUBLIC, _READ, _WRITE = AccessLevel.public, AccessLevel.read, AccessLevel.write
ROUTES: tuple[tuple[str, str, AccessLevel, str, int], ...] = (
    ("GET", "/health", _PUBLIC, "health", 200),
    ("GET", "/ready", _PUBLIC, "ready", 200),
    ("GET", "/health_generate", _PUBLIC, "ready", 200),
    ("GET", "/v1/models", _READ, "models", 200),
    ("GET", "/v1/models/{name}", _READ, "model", 200),
    ("GET", "/model_info", _READ, "model_info", 200),
    ("GET", "/get_model_info", _READ, "model_info", 200),
    ("GET", "/metrics", _READ, "metrics_page", 200),
    ("GET", "/status", _READ, "status", 200),
    ("GET", "/story/{name}", _READ, "workers.story", 200),
    ("GET", "/workers", _READ, "workers.listed", 200),
    ("GET", "/list_workers", _READ, "workers.urls", 200),
    ("POST", "/workers", _WRITE, "workers.add", 202),
    ("POST", "/add_worker", _WRITE, "workers.add_by_query", 200),
    ("POST", "/remove_worker", _WRITE, "workers.remove_by_query", 200),
    ("POST", "/workers/{name}/drain", _WRITE, "workers.drain", 200),
    ("POST", "/workers/{name}/resume", _WRITE, "workers.resume", 200),
    ("GET", "/workers/{name}", _READ, "workers.get", 200),
    ("DELETE", "/workers/{name}", _WRITE, "workers.remove", 202),
    ("POST", "/abort_request", _WRITE, "workers.abort", 200),
    ("POST", "/scale", _WRITE, "workers.scale", 200),
    ("DELETE", "/scale", _WRITE, "workers.release_scale", 200),
)
FORMS = dict.fromkeys(("/v1/completions", "/v1/chat/completions"), Refusal.openai)


def run_alone(main: Coroutine[Any, Any, T]) -> T:
    """Runs the event loop of a process that does nothing but serve: on uvloop if it is there, and with rarer garbage
    collections, which take a third of the time with the defaults.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    if sys.version_info < (3, 11):
        uvloop.install()
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class Gateway:
    """HTTP server of one pool."""

    def __init__(self, pool: RolloutPool, settings: GatewaySettings) -> None:
        self.settings = settings
        self.app = GatewayApp(pool, settings)
        self._socket: socket.socket | None = None
        self._connections = HttpConnections(settings, self.app.admit, self.app.answer)
        self._server: asyncio.Server | None = None
        self.fronts: FrontProcesses | None = None

    @property
    def port(self) -> int:
        """0 before the start."""
        return 0 if self._socket is None else int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.settings.host in ("0.0.0.0", "") else self.settings.host
        host = "::1" if host == "::" else host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def open(self) -> int:
        return self.app.serving.open

    async def start(self) -> None:
        """InputError if the port is taken."""
        if self._socket is not None:
            raise InputError("the gateway runs already")
        self._socket = listening(self.settings.host, self.settings.port)
        # Two connections per request: client and engine.
        files = allow_files(2 * self.settings.max_concurrent + FILES_BESIDE)
        if files < FILES_FEW:
            log.warning("at most %d open files are allowed here: about %d concurrent requests", files, files // 2)
        self._connections.closing = False
        if self.settings.processes > 1:
            self.fronts = FrontProcesses(self.app, self._socket, self.settings.processes - 1)
            try:
                await self.fronts.until_up()
            except BaseException:
                await self.stop(0)
                raise
            return
        self._server = await asyncio.get_running_loop().create_server(
            self._connections, sock=self._socket, backlog=BACKLOG
        )

    async def stop(self, drain_s: float = 10.0) -> None:
        """Stops gracefully; see the module. Harmless if it never started."""
        serving = self.app.serving
        serving.stopping = True
        if self._socket is not None:
            if self.fronts is not None:
                self.fronts.send_state()
            if not await serving.until_empty(drain_s):
                serving.abort_all()
                await serving.until_empty(self.settings.abort_s)
            if self._server is not None:
                self._server.close()
                await self._connections.close(self.settings.abort_s)
            if self.fronts is not None:
                await self.fronts.stop(self.settings.abort_s)
            self._socket.close()
        await self.app.workers.close()
        self._server = self._socket = self.fronts = None
        serving.stopping = False

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
