"""Worker groups to schedule over, and a clock that jumps, so that hours of scheduling take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

# ---- time that jumps -------------------------------------------------------------------------------------------------


class Jumps(selectors.DefaultSelector):
    """Where nothing is to be read, the time that would have been waited has passed."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        assert ready or timeout is not None, "everybody waits for ever"
        if not ready:
            self.now += timeout or 0.0
        return ready


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it under a clock that jumps from one event to the next. Nothing may be left running."""
    selector = Jumps()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:

        async def whole() -> None:
            try:
                await asyncio.wait_for(story(), 10_000)
                left = [one.get_name() for one in asyncio.all_tasks() if one is not asyncio.current_task()]
                assert left == [], "left running"
            finally:
                for one in asyncio.all_tasks() - {asyncio.current_task()}:
                    one.cancel()
                await asyncio.sleep(0)

        loop.run_until_complete(whole())
    finally:
        loop.close()


def clock() -> float:
    return asyncio.get_running_loop().time()


# ---- a worker group --------------------------------------------------------------------------------------------------


class Group:
    """Engines that count their requests and die of a flush with requests running, as real ones do."""

    def __init__(self, size: int = 4, flush_s: float = 0.0, resume_s: float = 0.0) -> None:
        self.world_size = size
        self.on: dict[int, set[str]] = {worker: set() for worker in range(size)}
        self.awake = set(range(size))
        self.flush_s, self.resume_s = flush_s, resume_s
        self.flushes: list[int] = []
        self.resumes: list[int] = []
        self.killed: list[int] = []
        self.outside = [0] * size  # requests that the scheduler was never told of
        self.silent = False  # status raises
        self.unsaid: set[int] = set()  # workers that status leaves out
        self.broken: set[int] = set()  # workers whose memory does not come back

    async def get_worker_status(self) -> dict[int, dict[str, Any]]:
        if self.silent:
            raise ConnectionError("no route to the workers")
        return {
            worker: {"active_requests": len(on) + self.outside[worker], "total_processed": 0,
                     "status": "active" if worker in self.awake else "inactive"}
            for worker, on in self.on.items() if worker not in self.unsaid
        }  # fmt: skip

    async def flush_worker_cache(self, worker_id: int) -> None:
        await asyncio.sleep(self.flush_s)
        self.flushes.append(worker_id)
        self.awake.remove(worker_id)
        if self.on[worker_id] or self.outside[worker_id]:
            self.killed.append(worker_id)

    async def resume_worker_memory(self, worker_id: int) -> None:
        await asyncio.sleep(self.resume_s)
        if worker_id in self.broken:
            raise MemoryError("out of memory")
        self.resumes.append(worker_id)
        self.awake.add(worker_id)


class Movable(Group):
    """A group that can cut requests, and is told where they go."""

    def __init__(self, size: int = 4, **others: float) -> None:
        super().__init__(size, **others)
        self.aborts: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []

    async def abort_request(self, request_id: str, worker_id: int) -> None:
        self.on[worker_id].discard(request_id)
        self.aborts.append((request_id, worker_id))

    async def assign_request(self, request_id: str, worker_id: int) -> None:
        assert worker_id in self.awake, "sent to a worker that is off"
        self.on[worker_id].add(request_id)
        self.told.append((request_id, worker_id))
