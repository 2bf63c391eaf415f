"""HTTP hook: external callers announce that a node will be terminated, and read how many workers are wanted.

`POST /nodes/NODE/drain` is for sources of termination notices (a spot notice, a cloud webhook, a batch system); `GET
/desired` and `GET /metrics` are for autoscalers. The server only authenticates and validates requests and calls the
given functions. Changes require the token, also on loopback; reads require it elsewhere. A Host header of another name
is refused, so that a web page in a browser on this machine cannot call it. The token must never be logged.

Behind it, `NodeHookCalls` drains through the controller if one runs, else directly in Ray. A controller that exists but
does not answer is an error: a node must never be drained without its knowledge.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.runtime.client.connection import ControllerConnection
from trimtab.runtime.controller.rpc import controllers
from trimtab.runtime.http.head_limits import limited
from trimtab.runtime.http.listening import host_name
from trimtab.runtime.http.tokens import checked
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.draining import HeadNodeError, PastDeadlineError, UnknownNodeError
from trimtab.runtime.rayapi.nodes import live_nodes

log = logging.getLogger("trimtab.hook")

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_BODY_BYTES = 4096
MAX_HEAD_BYTES = 16 * 1024
MAX_CAUSE_LENGTH = 200
BODY_S = 10.0
ANSWER_S = 30.0
STOP_S = 5.0

DrainCall = Callable[[str, float | None, str], Mapping[str, Any]]
"""Drains (node, seconds from now or None, cause) and returns what was done; raises a TrimtabError."""


class WantedNodes(Frozen):
    """Number of wanted worker nodes (None: unknown), and of nodes by state."""

    desired: int | None
    nodes: Mapping[str, int]


class DrainRequestBody(Frozen):
    """A parsed request body."""

    deadline_s: float | None
    cause: str


class NodeHookServer:
    """A server on a listening socket; `serve` blocks until `stop`, Ctrl-C or SIGTERM."""

    def __init__(
        self,
        drain: DrainCall,
        look: Callable[[], WantedNodes],
        *,
        token: str,
        listening: socket.socket,
        names: tuple[str, ...] = (),
    ) -> None:
        self._drain = drain
        self._look = look
        self._token = checked(token, "the hook's token", "TRIMTAB_HOOK_TOKEN; without it one is made").encode()
        self._socket = listening
        self.host, self.port = listening.getsockname()[:2]
        self._open_reads = self.host in LOOPBACK
        self._names = LOOPBACK | {self.host, *(name.lower() for name in names)}
        self._drains: Counter[str] = Counter()  # drains by response status
        settings = uvicorn.Config(
            self._application(),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(STOP_S),
            limit_concurrency=64,
            http=limited(BODY_S, MAX_HEAD_BYTES),
            ws="none",
        )
        self._server = uvicorn.Server(settings)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def serve(self) -> None:
        """Serve until stopped; requests in progress are finished."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `serve` return. Thread-safe."""
        self._server.should_exit = True

    # ---- routes ---------------------------------------------------------------------------------------------

    def _application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/nodes/{node}/drain", self._guarded(self._post_drain, changes=True), methods=["POST"]),
                Route("/desired", self._guarded(self._desired), methods=["GET"]),
                Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refused, TrimtabError: _failed, Exception: _broken},
        )

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]], *, changes: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            self._check_host(request)
            if changes or not self._open_reads:
                self._check_token(request)
            return await answer(request)

        return guarded

    def _check_host(self, request: Request) -> None:
        if host_name(request.headers.get("host", "")) not in self._names:
            raise HTTPException(421, "this Host is not served here; --allow-host adds one")

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._token)
        if scheme.lower() != "bearer" or not right:
            raise HTTPException(401, "a token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    async def _post_drain(self, request: Request) -> Response:
        node = request.path_params["node"]
        response: Response
        try:
            body = read_body(await _body(request, BODY_S))
            done = await _within(lambda: self._drain(node, body.deadline_s, body.cause))
            response = JSONResponse({"node": node, "deadline_s": body.deadline_s, "cause": body.cause, **done})
        except HTTPException as fault:
            response = await _refused(request, fault)
        except TrimtabError as fault:
            response = await _failed(request, fault)
        self._drains[str(response.status_code)] += 1
        log.info("drain of %r: %s", node, response.status_code)
        return response

    async def _desired(self, request: Request) -> Response:
        wanted = await _within(self._look)
        return JSONResponse({"desired_workers": wanted.desired, "nodes": dict(wanted.nodes)})

    async def _metrics(self, request: Request) -> Response:
        wanted = await _within(self._look)
        return PlainTextResponse(metrics_text(wanted, self._drains), media_type="text/plain; version=0.0.4")


def read_body(body: bytes) -> DrainRequestBody:
    """Parse a drain request, `{"deadline_s": 120, "cause": "spot"}`, both optional. HTTPException 422 if invalid."""
    try:
        data = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(422, "the body is not JSON") from None
    if not isinstance(data, dict) or not set(data) <= {"deadline_s", "cause"}:
        raise HTTPException(422, 'the body is {"deadline_s": seconds, "cause": "why"}')
    deadline_s, cause = data.get("deadline_s"), data.get("cause", "asked over HTTP")
    if deadline_s is not None:
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not math.isfinite(deadline_s):
            raise HTTPException(422, "deadline_s is a number of seconds from now, or null")
        if deadline_s <= 0:
            raise HTTPException(422, f"a deadline {deadline_s:g} s from now has passed already")
    if not isinstance(cause, str) or not cause.isprintable() or not 0 < len(cause) <= MAX_CAUSE_LENGTH:
        raise HTTPException(422, f"cause is a line of at most {MAX_CAUSE_LENGTH} characters")
    return DrainRequestBody(None if deadline_s is None else float(deadline_s), cause)


def metrics_text(wanted: WantedNodes, drains: Mapping[str, int]) -> str:
    lines = []
    if wanted.desired is not None:
        lines += _metric("trimtab_desired_workers", "gauge", "Worker nodes that the run could use.")
        lines.append(f"trimtab_desired_workers {wanted.desired}")
    lines += _metric("trimtab_nodes", "gauge", "Nodes by state.")
    lines += [f'trimtab_nodes{{state="{state}"}} {count}' for state, count in sorted(wanted.nodes.items())]
    lines += _metric("trimtab_hook_drains_total", "counter", "Drains asked of the hook, by status of the answer.")
    lines += [f'trimtab_hook_drains_total{{status="{status}"}} {count}' for status, count in sorted(drains.items())]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, means: str) -> list[str]:
    return [f"# HELP {name} {means}", f"# TYPE {name} {kind}"]


async def _within(call: Callable[[], Any]) -> Any:
    """Run a blocking call in a thread, with a deadline."""
    try:
        return await asyncio.wait_for(run_in_threadpool(call), ANSWER_S)
    except asyncio.TimeoutError:
        raise UnreachableError(f"no answer within {ANSWER_S:g} s") from None


async def _body(request: Request, within_s: float) -> bytes:
    async def read() -> bytes:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        return body

    try:
        return await asyncio.wait_for(read(), within_s)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body was not there within {within_s:g} s") from None


async def _refused(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    return JSONResponse({"error": fault.detail}, fault.status_code, headers=fault.headers)


async def _failed(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, TrimtabError)
    return JSONResponse({"error": fault.what, "hint": fault.hint}, status_of(fault))


async def _broken(request: Request, fault: Exception) -> Response:
    return JSONResponse({"error": f"this is a fault in trimtab: {type(fault).__name__}"}, 500)


def status_of(fault: TrimtabError) -> int:
    if isinstance(fault, UnknownNodeError):
        return 404
    if isinstance(fault, (HeadNodeError, InfeasibleError)):
        return 409
    if isinstance(fault, (PastDeadlineError, InputError)):
        return 422
    return 503 if isinstance(fault, UnreachableError) else 500


CONTROLLER_S = 20.0


class NodeHookCalls:
    """Calls on a Ray cluster. `name` is the controller's; default: the only one, if any."""

    def __init__(self, ray: Any, name: str | None = None) -> None:
        self._ray = ray
        self._name = name

    def how(self) -> str:
        """Where a drain would go now, as a sentence."""
        found = self._found()
        return f"drains go through the controller {found}" if found else "no controller runs: drains go to Ray"

    def drain(self, node: str, deadline_s: float | None, cause: str) -> Mapping[str, Any]:
        """Drain a node, given by id, id prefix, name or address."""
        draining.checked_deadline(deadline_s)
        node_id = draining.found(self._ray, node)
        controller = self._controller()
        if controller is None:
            draining.drain(self._ray, node_id, deadline_s, cause)
        else:
            controller.ask("drain_node", node_id, deadline_s, cause, timeout_s=CONTROLLER_S)
        return {"node_id": node_id, "through": f"controller {controller.name}" if controller else "ray"}

    def look(self) -> WantedNodes:
        """Number of wanted worker nodes, and of nodes by state."""
        controller = self._controller()
        if controller is not None:
            status = controller.ask("status", timeout_s=CONTROLLER_S)
            return WantedNodes(status.get("desired_workers"), Counter(node["state"] for node in status["fleet"]))
        going = draining.draining(self._ray)
        alive = [node.node_id for node in live_nodes(self._ray)]
        return WantedNodes(None, Counter("draining" if node in going else "ready" for node in alive))

    def _controller(self) -> ControllerConnection | None:
        name = self._found()
        return ControllerConnection(self._ray, name, None, None, CONTROLLER_S, make=False) if name else None

    def _found(self) -> str | None:
        if not self._ray.is_initialized():
            raise UnreachableError("Ray is gone: this process has left it", hint="start the hook again")
        try:
            names = controllers(self._ray)
        except Exception as fault:
            raise UnreachableError(f"Ray does not answer: {first_line(fault)}") from None
        if self._name is not None or len(names) <= 1:
            return self._name or next(iter(names), None)
        raise UnreachableError(
            f"this Ray has several controllers: {', '.join(names)}", hint="start the hook with --name"
        )
