"""Base of adapters for engines over HTTP, on private addresses only: streams, forwarded requests, LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, ClassVar

import aiohttp

from trimtab.runtime.engines.engine import (
    Engine,
    EngineDeadlines,
    EngineFailedError,
    EngineRefusedError,
    ForwardRequest,
    GenerateRequest,
    NotSupportedError,
    StreamDelta,
)
from trimtab.runtime.engines.gated import GatedEngine
from trimtab.runtime.engines.open_stream import EventStream, OpenStream
from trimtab.runtime.engines.served_calls import ServedCalls
from trimtab.runtime.engines.wire import EngineHttpClient, NoSuchPathError, require_private


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
        """Models and adapters of the server by name, with their paths."""
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
