"""Worker API as in sglang-router, with drain, resume and scale.

Access was checked before. A removed worker gets no new requests at once, and its requests continue until the deadline,
in the background.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl
from weakref import WeakValueDictionary

from trimtab.core.codec import encode
from trimtab.core.errors import TrimtabError
from trimtab.model.rollout import WorkerState, WorkerView
from trimtab.runtime.engines.http_engine import addresses
from trimtab.runtime.gateway.exchange import HttpExchange, Refusal
from trimtab.runtime.gateway.fields import BodyFields, BodyParser
from trimtab.runtime.gateway.guard import GatewayGuard
from trimtab.runtime.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

HEALTHY = (WorkerState.active, WorkerState.draining)
MAX_WHY_CHARS = 200
MAX_NAME_CHARS = 100


class WorkerApi:
    """Queries and changes of the workers of a pool: each method answers a route."""

    def __init__(
        self,
        pool: RolloutPool,
        settings: GatewaySettings,
        guard: GatewayGuard,
        bodies: BodyParser,
        abort_all: Callable[[str], int],
    ) -> None:
        self._pool, self._settings, self._guard, self._bodies = pool, settings, guard, bodies
        self._abort_all = abort_all
        self._leaving: set[asyncio.Task[None]] = set()
        # A lock per joining address: an unresponsive one delays no other.
        self._joining: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self.faults: list[str] = []  # last errors in the background

    # ---- queries ---------------------------------------------------------------------------------------------------

    async def listed(self, exchange: HttpExchange) -> dict[str, Any]:
        """All workers, in sglang-router's format."""
        workers = [self._shown(view) for view in self._pool.workers()]
        counts = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        return {"workers": workers, "total": len(workers), "stats": counts}

    async def urls(self, exchange: HttpExchange) -> dict[str, Any]:
        """In the format of older routers."""
        return {"urls": [url for view in self._pool.workers() if (url := self._pool.url(view.worker))]}

    async def get(self, exchange: HttpExchange) -> dict[str, Any]:
        return self._shown(self._view(_name(exchange)))

    def _shown(self, view: WorkerView) -> dict[str, Any]:
        engine = self._pool.engine(view.worker)
        return {
            "id": view.worker,
            "url": self._pool.url(view.worker),
            "model_id": self._settings.model_name or None,
            "worker_type": "regular",
            "connection_mode": "http",
            "priority": 50,
            "cost": 1.0,
            "is_healthy": view.state in HEALTHY,
            "load": view.running,
            "runtime_type": engine.kind if engine is not None else None,
            "state": view.state.value,
            "reason": {"code": view.reason.code.value, "sentence": view.reason.sentence},
            "weight_version": view.version,
            "outstanding_tokens": view.outstanding_tokens,
            "limit": view.spec.limit,
            "served": view.served,
        }

    def _view(self, name: str) -> WorkerView:
        for view in self._pool.workers():
            if name in (view.worker, self._pool.url(view.worker)):
                return view
        raise Refusal(404, f"there is no worker {name!r}", code="unknown_worker")

    async def story(self, exchange: HttpExchange) -> dict[str, Any]:
        """History of a worker or request."""
        chapters = self._pool.story(_name(exchange))
        if not chapters:
            raise Refusal(404, f"there is no story of {_name(exchange)!r}", code="unknown_name")
        return {"chapters": [encode(chapter) for chapter in chapters]}

    # ---- changes ---------------------------------------------------------------------------------------------------

    async def add(self, exchange: HttpExchange) -> dict[str, Any]:
        return await self._add(await self._fields(exchange))

    async def add_by_query(self, exchange: HttpExchange) -> dict[str, Any]:
        return await self._add(BodyFields(_query(exchange)))

    async def _add(self, fields: BodyFields) -> dict[str, Any]:
        """Attaches a running engine; harmless if it is attached already."""
        url = self._guard.check_worker(fields.take("url"))
        kind = fields.text("worker_type", "regular")
        if kind != "regular":
            raise fields.wrong("worker_type", f"{kind!r} workers are not served here; only regular ones")
        name, limit = fields.text("name"), fields.integer("limit", None, 1)
        version, size = fields.integer("version", None, 0), fields.integer("size", 1, 1)
        if len(name) > MAX_NAME_CHARS or not name.isascii() or not name.isprintable() or "," in name:
            raise fields.wrong("name", f"at most {MAX_NAME_CHARS} printable characters of ASCII, without commas")
        model = fields.text("model_id")
        if model and self._settings.model_name and model != self._settings.model_name:
            raise fields.wrong("model_id", f"this gateway serves {self._settings.model_name!r}")
        require_only(fields, "url", "name", "limit", "version", "size", "worker_type")
        found_at = await addresses(url)
        joining = self._joining.setdefault(min(found_at), asyncio.Lock())
        async with joining:  # two calls for one address add one worker
            worker = self._pool.worker_at(found_at)
            if worker is None:
                worker = await self._attach(url, name or None, limit, version, size)
        return {
            "status": "accepted", "worker_id": worker, "url": url, "location": f"/workers/{worker}",
            "state": self._view(worker).state.value,
        }  # fmt: skip

    async def _attach(self, url: str, name: str | None, limit: int | None, version: int | None, size: int) -> str:
        try:
            attaching = self._pool.attach(url, name=name, limit=limit, version=version, size=size)
            return await asyncio.wait_for(attaching, self._settings.change_s)
        except asyncio.TimeoutError:
            raise Refusal(504, f"{url} did not answer within {self._settings.change_s:g} s", code="timeout") from None

    async def remove(self, exchange: HttpExchange) -> dict[str, Any]:
        fields = BodyFields({name: _number(value) for name, value in _query(exchange).items()})
        deadline_s = _seconds(fields, "deadline_s")
        require_only(fields, "deadline_s")
        return await self._remove(_name(exchange), deadline_s)

    async def remove_by_query(self, exchange: HttpExchange) -> dict[str, Any]:
        return await self._remove(_query(exchange).get("url", ""), None)

    async def _remove(self, name: str, deadline_s: float | None) -> dict[str, Any]:
        """Removes a worker; its requests continue until the deadline."""
        worker = self._view(name).worker
        task = self._pool.background.once(f"remove {worker}", self._removed(worker, deadline_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        await asyncio.sleep(0)  # its first step: nothing new is routed there from now on
        return {"status": "accepted", "worker_id": worker}

    async def _removed(self, worker: str, deadline_s: float | None) -> None:
        try:
            await self._pool.remove(worker, deadline_s, "requested at the gateway")
        except TrimtabError as fault:
            self.faults = [*self.faults[-9:], fault.what]

    async def drain(self, exchange: HttpExchange) -> dict[str, Any]:
        """Routes nothing new to it until it is resumed."""
        fields = await self._fields(exchange)
        worker = self._view(_name(exchange)).worker
        deadline_s, why = _seconds(fields, "deadline_s"), _why(fields)
        require_only(fields, "deadline_s", "why")
        self._pool.drain(worker, deadline_s, why)
        return self._shown(self._view(worker))

    async def resume(self, exchange: HttpExchange) -> dict[str, Any]:
        worker = self._view(_name(exchange)).worker
        self._pool.resume(worker)
        return self._shown(self._view(worker))

    async def scale(self, exchange: HttpExchange) -> dict[str, Any]:
        fields = await self._fields(exchange)
        workers = fields.integer("workers", None, 0)
        if workers is None:
            raise fields.wrong("workers", "is missing: how many")
        for_s, why = _seconds(fields, "for_s"), _why(fields)
        require_only(fields, "workers", "for_s", "why")
        self._pool.scale(workers, for_s, why)
        return {"workers": workers, "for_s": for_s, "status": self._pool.status().get("scaling")}

    async def release_scale(self, exchange: HttpExchange) -> dict[str, Any]:
        self._pool.release_scale()
        return {"status": self._pool.status().get("scaling")}

    async def abort(self, exchange: HttpExchange) -> dict[str, Any]:
        """SGLang's `/abort_request`, for all requests of the gateway, those that wait included."""
        fields = await self._fields(exchange)
        if fields.text("rid"):
            raise fields.wrong("rid", "a single request is aborted by closing its connection")
        if not fields.boolean("abort_all"):
            raise fields.wrong("abort_all", "true is expected")
        require_only(fields, "abort_all")
        return {"aborted": self._abort_all("aborted by a client of the gateway")}

    async def _fields(self, exchange: HttpExchange) -> BodyFields:
        return BodyFields(await self._bodies.parsed(exchange.body or b"{}"))

    async def close(self) -> None:
        """Cancels removals in progress: the workers leave with the pool."""
        for task in list(self._leaving):
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)


def _name(exchange: HttpExchange) -> str:
    return exchange.name


def _query(exchange: HttpExchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.query, keep_blank_values=True))


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _seconds(fields: BodyFields, name: str) -> float | None:
    """Seconds of 0 or more; None if absent."""
    value = fields.number(name, math.nan, 0.0)
    return None if math.isnan(value) else value


def _why(fields: BodyFields) -> str:
    why = fields.text("why")
    if len(why) > MAX_WHY_CHARS or not why.isprintable():
        raise fields.wrong("why", f"at most {MAX_WHY_CHARS} printable characters")
    return why or "requested at the gateway"


def require_only(fields: BodyFields, *names: str) -> None:
    for left in fields.rest:
        raise fields.wrong(left, f"unknown field; known: {', '.join(names)}")
