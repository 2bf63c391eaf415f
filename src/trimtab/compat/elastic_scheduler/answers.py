"""Awaitable answers of the elastic scheduler: placement and completion of a request.

One call serves a synchronous and an asynchronous loop; an answer need not be awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from trimtab.compat.elastic_scheduler.worker_group import WorkerId
from trimtab.core.errors import TrimtabError


class Placement:
    """The worker of a request: await it, or read `worker`, which is None while the request waits."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.worker: WorkerId | None = None
        self.error: TrimtabError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def __await__(self) -> Generator[Any, None, WorkerId]:
        while self.worker is None and self.error is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            yield from future
        if self.error is not None:
            raise self.error
        assert self.worker is not None
        return self.worker

    def settle(self, worker: WorkerId | None, error: TrimtabError | None = None) -> None:
        """Set the worker or the error, and wake those that await it."""
        self.worker, self.error = worker, error
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class RequestCompletion:
    """Whether the request was open. Known at once; may be awaited too."""

    def __init__(self, was_open: bool) -> None:
        self.was_open = was_open

    def __bool__(self) -> bool:
        return self.was_open

    def __await__(self) -> Generator[Any, None, bool]:
        yield from ()
        return self.was_open
