"""Gateway: its routes with their access levels, a socket, uvicorn on the caller's event loop, and a graceful stop.

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
import logging
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Match, Route

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.model.rollout import WorkerState
from trimtab.runtime.gateway.exchange import (
    ClientLeft,
    HttpExchange,
    Receive,
    Refusal,
    Scope,
    Send,
    refusal_for_error,
)
from trimtab.runtime.gateway.guard import GatewayGuard
from trimtab.runtime.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from trimtab.runtime.gateway.openai import OpenAIReader
from trimtab.runtime.gateway.serving import STOPPING, GenerationEndpoint, GenerationTracker, Read, Refused
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.gateway.sglang import SglangReader
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.gateway.workers import WorkerApi
from trimtab.runtime.http.head_limits import limited
from trimtab.runtime.http.listening import allow_files, listening, quiet_server
from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.gateway")

RouteHandler = Callable[[HttpExchange], Awaitable[Any]]
"""Answers with JSON, or with bytes of the metrics page."""

FILES_BESIDE = 512
FILES_FEW = 4_096  # fewer: log a warning
START_S = 10.0


class AccessLevel(enum.Enum):
    """Which routes need the token."""

    public = "public"
    read = "read"
    write = "write"


class GatewayApp:
    """The ASGI application."""

    def __init__(self, pool: RolloutPool, settings: GatewaySettings) -> None:
        self.pool, self.settings = pool, settings
        self.guard = GatewayGuard(settings)
        self.metrics = GatewayMetrics(pool)
        self.tokenizer = PoolTokenizer(pool, settings.text_s, settings.vocabulary)
        self.serving = GenerationTracker(pool, settings, self.guard, self.metrics)
        self.workers = WorkerApi(pool, settings, self.guard, self.serving.bodies, self.serving.abort_all)
        self._openai = OpenAIReader(
            self.tokenizer, settings.model_name, settings.default_max_tokens, lambda: pool.adapters
        )
        generations: dict[str, tuple[str, Read, Refused]] = {
            "/v1/completions": ("completions", self._openai.completions, Refusal.openai),
            "/v1/chat/completions": ("chat", self._openai.chat, Refusal.openai),
            "/generate": ("generate", SglangReader(self.tokenizer, lambda: pool.adapters).generate, Refusal.plain),
        }
        # The hot paths: found by one lookup, before any pattern is matched.
        self._direct = {path: GenerationEndpoint(self.serving, *how) for path, how in generations.items()}
        self._rest = Starlette(routes=self._routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self.guard.check_host(dict(scope["headers"]))
            direct = self._direct.get(scope["path"])
            if direct is None:
                self._find(scope)
                await self._rest(scope, receive, send)
            elif scope["method"] == "POST":
                await direct(scope, receive, send)
            else:
                raise Refusal(405, "only POST", headers={"allow": "POST"})
        except Exception as fault:
            refusal = fault
            if not isinstance(refusal, Refusal):
                log.error("%s %s", scope["method"], scope["path"], exc_info=fault)
                refusal = Refusal(500, f"internal error in trimtab: {type(fault).__name__}", code="fault")
            await HttpExchange(scope, receive, send, self.settings.write_s).refuse(refusal, Refusal.plain)

    def _find(self, scope: Scope) -> None:
        """Raises 404 or 405 in the gateway's own format."""
        methods: set[str] = set()
        for route in self._rest.router.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return
            if match is Match.PARTIAL and isinstance(route, Route):
                methods |= route.methods or set()
        if methods:
            allowed = ", ".join(sorted(methods))
            raise Refusal(405, f"only {allowed}", code="wrong_method", headers={"allow": allowed})
        raise Refusal(404, f"there is no {scope['path']} here", code="unknown_path")

    # ---- other routes ----------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        public, read, write, workers = AccessLevel.public, AccessLevel.read, AccessLevel.write, self.workers
        routes: tuple[tuple[str, str, AccessLevel, RouteHandler, int], ...] = (
            ("GET", "/health", public, self._health, 200),
            ("GET", "/ready", public, self._ready, 200),
            ("GET", "/health_generate", public, self._ready, 200),
            ("GET", "/v1/models", read, self._models, 200),
            ("GET", "/v1/models/{name:path}", read, self._model, 200),
            ("GET", "/model_info", read, self._model_info, 200),
            ("GET", "/get_model_info", read, self._model_info, 200),
            ("GET", "/metrics", read, self._metrics, 200),
            ("GET", "/status", read, self._status, 200),
            ("GET", "/story/{name:path}", read, workers.story, 200),
            ("GET", "/workers", read, workers.listed, 200),
            ("GET", "/list_workers", read, workers.urls, 200),
            ("POST", "/workers", write, workers.add, 202),
            ("POST", "/add_worker", write, workers.add_by_query, 200),
            ("POST", "/remove_worker", write, workers.remove_by_query, 200),
            ("POST", "/workers/{name:path}/drain", write, workers.drain, 200),
            ("POST", "/workers/{name:path}/resume", write, workers.resume, 200),
            ("GET", "/workers/{name:path}", read, workers.get, 200),
            ("DELETE", "/workers/{name:path}", write, workers.remove, 202),
            ("POST", "/abort_request", write, workers.abort, 200),
            ("POST", "/scale", write, workers.scale, 200),
            ("DELETE", "/scale", write, workers.release_scale, 200),
        )
        return [
            Route(path, _RouteApp(self, access, handler, status), methods=[method])
            for method, path, access, handler, status in routes
        ]

    async def _health(self, exchange: HttpExchange) -> Any:
        return {"status": "ok"}

    async def _ready(self, exchange: HttpExchange) -> Any:
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

    async def _models(self, exchange: HttpExchange) -> Any:
        model = {"id": await self._openai.model(), "object": "model", "created": 0, "owned_by": "trimtab"}
        adapters = [{**model, "id": name, "parent": model["id"]} for name in self.pool.adapters]
        return {"object": "list", "data": [model, *adapters]}

    async def _model(self, exchange: HttpExchange) -> Any:
        name = exchange.scope["path_params"]["name"]
        for model in (await self._models(exchange))["data"]:
            if model["id"] == name:
                return model
        raise Refusal(404, f"there is no model {name!r}", code="model_not_found")

    async def _model_info(self, exchange: HttpExchange) -> Any:
        info = {"model_path": await self._openai.model(), "is_generation": True}
        return {**info, "weight_version": str(self.pool.version)}

    async def _metrics(self, exchange: HttpExchange) -> Any:
        return self.metrics.text()

    async def _status(self, exchange: HttpExchange) -> Any:
        gateway = {
            "open": self.serving.open, "limit": self.settings.max_concurrent, "stopping": self.serving.stopping,
            "faults": self.workers.faults,
        }  # fmt: skip
        return {**self.pool.status(), "gateway": gateway}


class _RouteApp:
    """A route other than a generation: plain ASGI, so that Starlette does not wrap it."""

    def __init__(self, app: GatewayApp, access: AccessLevel, handler: RouteHandler, status: int) -> None:
        self._app, self._access, self._handler, self._status = app, access, handler, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks access, and answers within a deadline."""
        app = self._app
        exchange = HttpExchange(scope, receive, send, app.settings.write_s)
        exchange.closing = app.serving.stopping
        try:
            if self._access is AccessLevel.write or (self._access is AccessLevel.read and not app.guard.anonymous):
                app.guard.check_token(exchange.headers)
            if self._access is AccessLevel.write and app.serving.stopping:
                raise Refusal(503, STOPPING, code="stopping")
            within_s = app.settings.change_s + app.settings.body_s
            await asyncio.wait_for(self._answer(exchange), within_s)
        except Refusal as refusal:
            await exchange.refuse(refusal, Refusal.plain)
        except TrimtabError as error:
            await exchange.refuse(refusal_for_error(error), Refusal.plain)
        except asyncio.TimeoutError:
            await exchange.refuse(Refusal(504, f"not done within {within_s:g} s", code="timeout"), Refusal.plain)
        except ClientLeft:
            return

    async def _answer(self, exchange: HttpExchange) -> None:
        answer = await self._handler(exchange)
        if isinstance(answer, bytes):
            await exchange.raw(answer, self._status, [(b"content-type", CONTENT_TYPE.encode())])
        else:
            await exchange.json(answer, self._status)


class Gateway:
    """HTTP server of one pool."""

    def __init__(self, pool: RolloutPool, settings: GatewaySettings) -> None:
        self.settings = settings
        self.app = GatewayApp(pool, settings)
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

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
        if self._running is not None:
            raise InputError("the gateway runs already")
        self._socket = listening(self.settings.host, self.settings.port)
        # Two connections per request: client and engine.
        files = allow_files(2 * self.settings.max_concurrent + FILES_BESIDE)
        if files < FILES_FEW:
            log.warning("at most %d open files are allowed here: about %d concurrent requests", files, files // 2)
        self._server = quiet_server(
            self.app, http=limited(self.settings.head_s, self.settings.max_head_bytes),
            timeout_keep_alive=max(1, round(self.settings.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(self.settings.abort_s)),
        )  # fmt: skip
        self._running = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="gateway")
        for _ in range(int(START_S / 0.005)):
            if self._server.started or self._running.done():
                break
            await asyncio.sleep(0.005)
        if not self._server.started:
            await self.stop(0)
            raise UnreachableError(f"the gateway did not start within {START_S:g} s")

    async def stop(self, drain_s: float = 10.0) -> None:
        """Stops gracefully; see the module. Harmless if it never started."""
        serving, running = self.app.serving, self._running
        serving.stopping = True
        if running is not None and self._server is not None:
            if not await serving.until_empty(drain_s):
                serving.abort_all()
                await serving.until_empty(self.settings.abort_s)
            self._server.should_exit = True
            await asyncio.wait({running}, timeout=self.settings.abort_s + 1)
            if not running.done():
                self._server.force_exit = True
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        await self.app.workers.close()
        self._running = self._server = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        serving.stopping = False

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
