"""What is known of a worker's task in the slots' pool, and the calls to it.

Kept by `SlotLauncher`, on whose loop it lives; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.model.pool import TaskState
from trimtab.runtime.elastic.member_client import MemberClient, MemberGoneError, MemberHungError, MemberRaisedError

ANSWER_S = 30.0


class WorkerSlot:
    """A worker's task in the slots' pool."""

    def __init__(self, worker: str, line: MemberClient) -> None:
        self.worker = worker
        self.line = line
        self.reason = "it was submitted a moment ago"
        self.node_leaving = False
        self.starting = False  # `start` is at work on it
        self.up = False  # its engine was given to the rollout pool, and was not stopped since
        self.taken = False  # the rollout pool was told that it may not use the worker
        self.idle_since = time.monotonic()
        self.changed = asyncio.Event()
        self.watching: asyncio.Task[None] | None = None

    @property
    def state(self) -> TaskState:
        """Of its task, as last heard."""
        return self.line.seen[0]

    def stop_watching(self) -> None:
        """Its engine is no longer the rollout pool's."""
        self.up = False
        if self.watching is not None:
            self.watching.cancel()
            self.watching = None

    async def call(self, method: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        """Call the task; UnreachableError where it is gone, hangs or raises."""
        try:
            return await self.line.call(method, *args, within_s=within_s)
        except (MemberGoneError, MemberHungError, MemberRaisedError) as fault:
            raise UnreachableError(str(fault), where=f"worker {self.worker}") from fault
