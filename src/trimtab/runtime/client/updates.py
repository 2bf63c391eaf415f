"""Listens to a controller: one long poll after another for changes of its nodes and of some tasks.

It decides nothing. While the controller is unreachable it retries, and says so once. An update whose callback raised is
delivered again: the version counts only after the callback, whose exception is for `Background` to log and restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from trimtab.core.errors import TrimtabError
from trimtab.model.pool import TaskState
from trimtab.runtime.controller.rpc import ClientUpdate

log = logging.getLogger("trimtab")

KnownTasks = dict[str, tuple[TaskState, int]]
"""By task: the state and attempt that were heard of last."""


class ControllerListener:
    """Calls `on_update(update, nodes_changed)` for each answer of `poll(known(), version)` that is not None."""

    def __init__(
        self,
        what: str,
        poll: Callable[[KnownTasks, int], Awaitable[ClientUpdate | None]],
        known: Callable[[], KnownTasks],
        on_update: Callable[[ClientUpdate, bool], Awaitable[None]],
        retry_s: float,
    ) -> None:
        self._what = what
        self._poll, self._known, self._on_update = poll, known, on_update
        self._retry_s = retry_s
        self._version = -1  # of the nodes, as last received
        self._fault = ""

    async def run(self, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Listen until closed."""
        while not is_closed():
            try:
                update = await self._poll(self._known(), self._version)
            except TrimtabError as fault:
                if fault.what != self._fault:
                    self._fault = fault.what
                    log.warning("no updates of %s: %s; retrying", self._what, self._fault)
                await asyncio.sleep(self._retry_s)
                continue
            except Exception:  # retried, whatever it is: without updates all would be kept as it is for ever
                log.exception("no updates of %s", self._what)
                await asyncio.sleep(self._retry_s)
                continue
            if self._fault:
                self._fault = ""
                log.info("updates of %s again", self._what)
            if update is not None:
                await self._on_update(update, update.version != self._version)
                self._version = update.version
