"""Gateway server: a socket, uvicorn on the caller's event loop, and a graceful stop.

It starts no thread and handles no signal. A stop refuses new requests at once, lets open ones finish until the
deadline, then answers them with what they have; no connection is left silent. The pool belongs to the caller and is
neither started nor stopped here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import TracebackType

import uvicorn

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.gateway.app import GatewayApp
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.http.head_limits import limited
from trimtab.runtime.http.listening import allow_files, listening, quiet_server
from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.gateway")

FILES_BESIDE = 512
FILES_FEW = 4_096  # fewer: log a warning
KEEP_ALIVE_S = 75
ABORT_WRITE_S = 5.0  # to write aborted responses
START_S = 10.0


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
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=int(ABORT_WRITE_S),
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
                await serving.until_empty(ABORT_WRITE_S)
            self._server.should_exit = True
            await asyncio.wait({running}, timeout=ABORT_WRITE_S + 1)
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
