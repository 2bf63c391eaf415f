"""The dashboard as a server on loopback, in its own thread, so that it does not delay a run.

If a port is in use, the next ones are tried, and `port` says which it is. The token is in a file that only its owner
can read, or in the environment; it is never printed. Clients get the final state before `close` ends their streams;
browsers reconnect when there is a server again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.dashboard.app import EVERY_S, DashboardApp, PageSource
from trimtab.runtime.http import tokens
from trimtab.runtime.http.listening import allow_files, listening, quiet_server
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background

log = logging.getLogger("trimtab.dashboard")

HOST = "127.0.0.1"
PORT = 8270
PORTS_TRIED = 20  # consecutive ports, before any free one
START_S = 20.0
STOP_S = 5.0
FINAL_STATE_S = 2.0  # for the final state to be sent
MAX_OPEN_FILES = 6_000  # a thousand tabs, and more


class DashboardServer:
    """One page for one source; a context manager."""

    def __init__(
        self,
        source: PageSource,
        port: int | None = None,
        *,
        every_s: float = EVERY_S,
        environment: Mapping[str, str] | None = None,
        token_file: Path | None = None,
    ) -> None:
        self._source = source
        self._requested_port = port
        self._every_s = every_s
        self._environment = os.environ if environment is None else environment
        self._token_file = token_file
        self.token_source = ""  # a sentence
        self.port = 0
        self.app: DashboardApp | None = None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.background = Background(prefix="trimtab-dashboard")
        self._started = threading.Event()
        self._stop_event: asyncio.Event | None = None
        self._fault: BaseException | None = None
        self._exit_stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    @property
    def announcement(self) -> str:
        """Where it listens, as a sentence, also if that is not the requested port."""
        requested = self._requested_port if self._requested_port is not None else PORT
        moved = f" (port {requested} is in use)" if requested and requested != self.port else ""
        return f"dashboard: {self.url}{moved}"

    def __enter__(self) -> DashboardServer:
        allow_files(MAX_OPEN_FILES)
        self._socket = _first_free(PORT if self._requested_port is None else self._requested_port)
        self.port = int(self._socket.getsockname()[1])
        try:
            given = tokens.token(self._environment, tokens.DASHBOARD, self._token_file, f"dashboard-{self.port}")
            token, kept_in = self._exit_stack.enter_context(given)
            self.token_source = tokens.told(kept_in, tokens.DASHBOARD, "the token to change something")
            self._thread = threading.Thread(target=self._run, args=(token,), name="trimtab-dashboard", daemon=True)
            self._thread.start()
            if not self._started.wait(START_S) or self._fault is not None:
                raise UnreachableError(f"the dashboard did not start: {self._fault or f'not within {START_S:g} s'}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop. Harmless if it never started or has stopped."""
        if self._thread is not None:
            if self._loop is not None and self._stop_event is not None:
                with contextlib.suppress(RuntimeError):  # its loop has ended already
                    self._loop.call_soon_threadsafe(self._stop_event.set)
            self._thread.join(FINAL_STATE_S + STOP_S + 2)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._exit_stack.close()

    def _run(self, token: str) -> None:
        try:
            asyncio.run(self._serve(token))
        except BaseException as fault:  # a dashboard that fails ends no run
            self._fault = fault
            log.warning("the dashboard ended: %s", fault)
        finally:
            self._started.set()

    async def _serve(self, token: str) -> None:
        assert self._socket is not None
        self._loop, self._stop_event = asyncio.get_running_loop(), asyncio.Event()
        self.app = DashboardApp(self._source, token, every_s=self._every_s)
        server = quiet_server(self.app, timeout_graceful_shutdown=1)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        self.background.start("follow", self.app.follow, policy=NEVER_GIVE_UP)
        stopping = asyncio.create_task(self._stop_event.wait())
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._started.set()
        try:
            done, _ = await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.app.send_final_state(), FINAL_STATE_S)
        finally:
            self.app.feed.end()  # streams do not end by themselves
            server.should_exit = True
            stopping.cancel()
            await self.background.close()
            await asyncio.gather(stopping, return_exceptions=True)
            await asyncio.wait({serving}, timeout=STOP_S)


def _first_free(port: int) -> socket.socket:
    """A socket on this port or, if it is in use, on one of the next; at last on any."""
    if not 0 <= port <= 65_535:
        raise InputError(f"port is {port}", hint="1 to 65535, or 0 for any that is free")
    tried = [*range(port, min(port + PORTS_TRIED, 65_536)), 0] if port else [0]
    for candidate in tried[:-1]:
        with contextlib.suppress(InputError):
            return listening(HOST, candidate)
    return listening(HOST, tried[-1])
