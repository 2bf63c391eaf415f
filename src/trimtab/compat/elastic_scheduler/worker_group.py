"""Calls to a trainer's worker group, synchronous or async, each with a deadline.

An exception, a late answer or a malformed one becomes an UnreachableError that names the call, and nothing is assumed:
a status that cannot be read is no status, never "no requests". A synchronous method runs in its own thread, so that one
that hangs blocks no other; such a thread ends with the process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.frozen import Frozen

WorkerId = int | str  # as the group names its workers

STATUSES = ("active", "draining", "inactive", "starting")


class WorkerGroup(Protocol):
    """Required methods of a worker group. Optional, all synchronous or async:

    `world_size: int` (workers 0 .. world_size - 1; without it the workers are those of the first status),
    `abort_request(request_id, worker_id)` and `assign_request(request_id, worker_id)`.
    """

    def get_worker_status(self) -> Mapping[Any, Mapping[str, Any]] | Awaitable[Mapping[Any, Mapping[str, Any]]]:
        """By worker: `active_requests`, `total_processed`, `status` (active, draining, inactive or starting)."""

    def flush_worker_cache(self, worker_id: Any) -> Any:
        """Release a worker's cache and memory; it has no request then."""

    def resume_worker_memory(self, worker_id: Any) -> Any:
        """Restore a worker's memory; it can serve when this returns."""


class WorkerStatus(Frozen):
    """The status of one worker, as the group reports it."""

    active_requests: int
    total_processed: int = 0
    status: str = "active"


class NotIdleError(UnreachableError):
    """A worker has requests, or may have; nothing was done to it."""


class WorkerGroupCalls:
    """The calls of one worker group."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        for name in ("flush_worker_cache", "resume_worker_memory"):
            if not callable(getattr(group, name, None)):
                hint = "without it no worker can be released or resumed; see docs/guides/rollout-tuning.md"
                raise InputError(f"{type(group).__name__} has no {name}(worker_id)", where="worker_group", hint=hint)
        self.timeout_s = timeout_s
        self.has_status = callable(getattr(group, "get_worker_status", None))
        self.can_abort = callable(getattr(group, "abort_request", None))
        self.is_told = callable(getattr(group, "assign_request", None))
        self._group = group
        size = getattr(group, "world_size", None)
        if size is None and not self.has_status:
            raise InputError(
                f"{type(group).__name__} does not say which workers it has",
                where="worker_group",
                hint="world_size, or get_worker_status()",
            )
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InputError(f"world_size is {size!r}: a whole number, 1 or more", where="worker_group")
        self.workers: tuple[WorkerId, ...] | None = None if size is None else tuple(range(size))

    async def status(self) -> dict[WorkerId, WorkerStatus]:
        """Status of the workers. A worker that the group leaves out is missing here too."""
        answer = await self._call("get_worker_status")
        if not isinstance(answer, Mapping):
            raise UnreachableError(f"get_worker_status answered {_short(answer)}, not a mapping of workers")
        return {worker: _status(worker, fields) for worker, fields in answer.items()}

    async def flush(self, worker: WorkerId) -> None:
        """Release a worker's memory if it reports no request; NotIdleError if it does."""
        if self.has_status:
            try:
                status = (await self.status()).get(worker)
            except UnreachableError as error:
                raise NotIdleError(f"worker {worker} is not flushed: {error.what}") from error
            if status is None:
                raise NotIdleError(f"worker {worker} is not flushed: get_worker_status says nothing of it")
            if status.active_requests:
                raise NotIdleError(
                    f"worker {worker} is not flushed: it says that it has {status.active_requests} requests"
                )
        await self._call("flush_worker_cache", worker)

    async def resume(self, worker: WorkerId) -> None:
        await self._call("resume_worker_memory", worker)

    async def abort(self, request: str, worker: WorkerId) -> None:
        await self._call("abort_request", request, worker)

    async def assign(self, request: str, worker: WorkerId) -> None:
        await self._call("assign_request", request, worker)

    async def _call(self, name: str, *arguments: Any) -> Any:
        shown = f"{name}({', '.join(map(str, arguments))})"
        method = getattr(self._group, name)
        try:
            return await in_time(_answer(method, *arguments), self.timeout_s)
        except CallTimeoutError:
            raise UnreachableError(f"{shown} has not returned after {self.timeout_s:g} s") from None
        except Exception as error:  # whatever the group's code raises
            raise UnreachableError(f"{shown} raised {type(error).__name__}: {_short(error)}") from error


class CallTimeoutError(Exception):
    """A call did not return in time."""


async def in_time(coroutine: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
    """Its result, or CallTimeoutError. Unlike `asyncio.wait_for` before 3.12 it never swallows its own cancellation."""
    task = asyncio.ensure_future(coroutine)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        if not task.cancel() and not task.cancelled():
            task.exception()  # mark the exception as retrieved
        raise
    if not done:
        task.cancel()
        raise CallTimeoutError
    return task.result()


async def _answer(method: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    answer = await _in_thread(method, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


async def _in_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a synchronous method, from a daemon thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(answer: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    def run() -> None:
        answer, error = None, None
        try:
            answer = method(*arguments)
        except BaseException as raised:  # passed on to the caller
            # A StopIteration cannot be raised into a future.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=run, name=f"worker-group-{getattr(method, '__name__', 'call')}", daemon=True).start()
    return await future


def _status(worker: WorkerId, fields: Any) -> WorkerStatus:
    if not isinstance(fields, Mapping) or "active_requests" not in fields:
        raise UnreachableError(f"get_worker_status says nothing of worker {worker}'s active_requests: {_short(fields)}")
    counts = [fields["active_requests"], fields.get("total_processed", 0)]
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UnreachableError(f"get_worker_status says {count!r} of worker {worker}, which is no count")
    status = str(fields.get("status", "active")).lower()
    if status not in STATUSES:
        raise UnreachableError(f"get_worker_status says {status!r} of worker {worker}", hint=f"one of {STATUSES}")
    return WorkerStatus(counts[0], counts[1], status)


def _short(value: object) -> str:
    text = " ".join(str(value).split()) or repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."
