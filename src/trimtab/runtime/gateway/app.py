"""Routes of the gateway and their access levels.

Health and readiness are public; generations and queries are open on loopback and need the token elsewhere; changes need
the token everywhere. The Host is checked for every route. Errors are answered in the format of the route, never with a
traceback.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Match, Route

from trimtab.core.errors import TrimtabError
from trimtab.model.rollout import WorkerState
from trimtab.runtime.gateway import openai, sglang
from trimtab.runtime.gateway.errors import Refusal, refusal_for_error
from trimtab.runtime.gateway.exchange import HttpExchange, Send
from trimtab.runtime.gateway.fields import BodyFields
from trimtab.runtime.gateway.guard import ClientLeft, GatewayGuard, Receive, Scope
from trimtab.runtime.gateway.headers import RequestTerms
from trimtab.runtime.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from trimtab.runtime.gateway.openai import ServedKinds
from trimtab.runtime.gateway.openai_format import ForwardedFormat, OpenAIFormat
from trimtab.runtime.gateway.response_format import ResponseFormat
from trimtab.runtime.gateway.serving import STOPPING, GenerationEndpoint, GenerationTracker
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.gateway.workers import WorkerApi, require_only, seconds
from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.gateway")

App = Callable[[Scope, Receive, Send], Awaitable[None]]
RouteHandler = Callable[[HttpExchange, Request], Awaitable[None]]


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
        self.workers = WorkerApi(pool, settings, self.guard)
        self._openai = openai.OpenAIReader(
            self.tokenizer, settings.model_name, settings.default_max_tokens, lambda: pool.adapters
        )
        self._sglang = sglang.SglangReader(self.tokenizer, lambda: pool.adapters)
        generations = {
            "/v1/completions": GenerationEndpoint(self.serving, "completions", self._completions, Refusal.openai),
            "/v1/chat/completions": GenerationEndpoint(self.serving, "chat", self._chat, Refusal.openai),
            "/generate": GenerationEndpoint(self.serving, "generate", self._generate, Refusal.plain),
        }
        # The hot paths: found by one lookup, before any pattern is matched.
        self._direct: dict[str, App] = dict(generations)
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
        except Refusal as refusal:
            await _refuse(HttpExchange(scope, receive, send, self.settings.write_s), refusal)
        except Exception as fault:
            log.error("%s %s", scope["method"], scope["path"], exc_info=fault)
            broken = Refusal(500, f"internal error in trimtab: {type(fault).__name__}", code="fault")
            await _refuse(HttpExchange(scope, receive, send, self.settings.write_s), broken)

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

    # ---- generations -----------------------------------------------------------------------------------------------

    async def _completions(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> ResponseFormat:
        return OpenAIFormat(*await self._openai.completions(body, terms, kinds), self.tokenizer)

    async def _chat(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> ResponseFormat:
        call, options = await self._openai.chat(body, terms, kinds)
        return (OpenAIFormat if call.forward is None else ForwardedFormat)(call, options, self.tokenizer)

    async def _generate(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> ResponseFormat:
        return sglang.SglangFormat(*await self._sglang.generate(body, terms, kinds), self.tokenizer)

    # ---- other routes ----------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        routes: tuple[tuple[str, str, AccessLevel, RouteHandler], ...] = (
            ("GET", "/health", AccessLevel.public, self._health),
            ("GET", "/ready", AccessLevel.public, self._ready),
            ("GET", "/health_generate", AccessLevel.public, self._ready),
            ("GET", "/v1/models", AccessLevel.read, self._models),
            ("GET", "/model_info", AccessLevel.read, self._model_info),
            ("GET", "/get_model_info", AccessLevel.read, self._model_info),
            ("GET", "/metrics", AccessLevel.read, self._metrics),
            ("GET", "/status", AccessLevel.read, self._status),
            ("GET", "/story/{name:path}", AccessLevel.read, self._story),
            ("GET", "/workers", AccessLevel.read, self._list),
            ("GET", "/list_workers", AccessLevel.read, self._urls),
            ("POST", "/workers", AccessLevel.write, self._add),
            ("POST", "/add_worker", AccessLevel.write, self._add_by_query),
            ("POST", "/remove_worker", AccessLevel.write, self._remove_by_query),
            ("POST", "/workers/{name:path}/drain", AccessLevel.write, self._drain),
            ("POST", "/workers/{name:path}/resume", AccessLevel.write, self._resume),
            ("GET", "/workers/{name:path}", AccessLevel.read, self._worker),
            ("DELETE", "/workers/{name:path}", AccessLevel.write, self._remove),
            ("POST", "/scale", AccessLevel.write, self._scale),
            ("DELETE", "/scale", AccessLevel.write, self._release_scale),
        )
        return [Route(path, _RouteApp(self, answer, kind), methods=[method]) for method, path, kind, answer in routes]

    async def _health(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json({"status": "ok"})

    async def _ready(self, exchange: HttpExchange, request: Request) -> None:
        if self.serving.stopping:
            raise Refusal(503, STOPPING, code="stopping")
        views = self.pool.workers()
        serving = sum(view.state is WorkerState.active for view in views)
        if not serving:
            why = "; ".join(f"{view.worker} is {view.state.value}: {view.reason.sentence}" for view in views[:8])
            raise Refusal(
                503, f"no worker could serve: {why or 'there is none'}", code="no_worker", headers={"retry-after": "1"}
            )
        await exchange.json({"status": "ready", "healthy_workers": serving, "total_workers": len(views)})

    async def _models(self, exchange: HttpExchange, request: Request) -> None:
        model = {"id": await self._openai.model(), "object": "model", "created": 0, "owned_by": "trimtab"}
        adapters = [{**model, "id": name, "parent": model["id"]} for name in self.pool.adapters]
        await exchange.json({"object": "list", "data": [model, *adapters]})

    async def _model_info(self, exchange: HttpExchange, request: Request) -> None:
        info = {"model_path": await self._openai.model(), "is_generation": True}
        await exchange.json({**info, "weight_version": str(self.pool.version)})

    async def _metrics(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.raw(self.metrics.text(), 200, [(b"content-type", CONTENT_TYPE.encode())])

    async def _status(self, exchange: HttpExchange, request: Request) -> None:
        gateway = {
            "open": self.serving.open, "limit": self.settings.max_concurrent, "stopping": self.serving.stopping,
            "faults": self.workers.faults,
        }  # fmt: skip
        await exchange.json({**self.pool.status(), "gateway": gateway})

    async def _story(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json({"chapters": self.workers.story(request.path_params["name"])})

    async def _list(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(self.workers.listed())

    async def _urls(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(self.workers.urls())

    async def _worker(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(self.workers.get(request.path_params["name"]))

    async def _add(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.add(await self._body(exchange)), 202)

    async def _add_by_query(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.add(dict(request.query_params)))

    async def _remove_by_query(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.remove(request.query_params.get("url", ""), None))

    async def _remove(self, exchange: HttpExchange, request: Request) -> None:
        fields = BodyFields({name: _number(value) for name, value in request.query_params.items()})
        deadline_s = seconds(fields, "deadline_s")
        require_only(fields, "deadline_s")
        await exchange.json(await self.workers.remove(request.path_params["name"], deadline_s), 202)

    async def _drain(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.drain(request.path_params["name"], await self._body(exchange)))

    async def _resume(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.resume(request.path_params["name"]))

    async def _scale(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.scale(await self._body(exchange)))

    async def _release_scale(self, exchange: HttpExchange, request: Request) -> None:
        await exchange.json(await self.workers.release_scale())

    async def _body(self, exchange: HttpExchange) -> Any:
        return await self.serving.bodies.parsed(await self.guard.body(exchange.headers, exchange.receive) or b"{}")


class _RouteApp:
    """A route other than a generation: plain ASGI, so that Starlette does not wrap it."""

    def __init__(self, app: GatewayApp, handler: RouteHandler, access: AccessLevel) -> None:
        self._app, self._handler, self._access = app, handler, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks access, and answers within a deadline."""
        app = self._app
        exchange = HttpExchange(scope, receive, send, app.settings.write_s)
        exchange.closing = app.serving.stopping
        try:
            if self._access is AccessLevel.write or (
                self._access is AccessLevel.read and not app.settings.allows_anonymous
            ):
                app.guard.check_token(exchange.headers)
            if self._access is AccessLevel.write and app.serving.stopping:
                raise Refusal(503, STOPPING, code="stopping")
            within_s = app.settings.change_s + app.settings.body_s
            await asyncio.wait_for(self._handler(exchange, Request(scope, receive)), within_s)
        except Refusal as refusal:
            await _refuse(exchange, refusal)
        except TrimtabError as error:
            await _refuse(exchange, refusal_for_error(error))
        except asyncio.TimeoutError:
            await _refuse(exchange, Refusal(504, f"not done within {within_s:g} s", code="timeout"))
        except ClientLeft:
            return


async def _refuse(exchange: HttpExchange, refusal: Refusal) -> None:
    if not exchange.status:
        headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
        await exchange.json(refusal.plain(), refusal.status, headers)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
