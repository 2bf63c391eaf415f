"""Leases: a worker's URL for callers that talk to engines directly, until released or revoked.

To the machine a lease is a request without token events: it counts as load, it is routed by the same rules, and a drain
waits for it. When its worker leaves, the lease is revoked, and the holder has until the abort deadline to release it. A
lease is never moved: only its holder knows the request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType

from trimtab.core.errors import UnreachableError
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import RequestSpec
from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.rollout.sampling import RefusedError


@dataclass
class Lease:
    """A worker that may be used until `release`, or until `revoked` is set."""

    id: str
    url: str
    worker: str
    version: int
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    _leases: EngineLeases | None = None
    _attempt: int = 0

    async def release(self, tokens: int = 0) -> None:
        """Releases the worker after this number of tokens. Idempotent."""
        if self._leases is not None:
            self._leases.release(self, tokens)

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class EngineLeases:
    """Held and pending leases. The dispatcher passes on the instructions for requests that are leases."""

    def __init__(self, core: RolloutCore) -> None:
        self._core = core
        self._waiting: dict[str, asyncio.Future[Lease]] = {}
        self._held: dict[str, Lease] = {}

    async def acquire(self, spec: RequestSpec, wait_s: float) -> Lease:
        """Waits for a worker."""
        core = self._core
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[spec.id] = granted
        try:
            core.handle_event(e.RequestArrived(spec))
            done, _ = await asyncio.wait({granted}, timeout=wait_s)
            if done:
                return granted.result()
            view = core.machine.request(spec.id)
            why = "" if view is None else f": {view.reason.sentence}"
            raise UnreachableError(f"no worker in {wait_s:g} s{why}", hint="see `trimtab engine list`")
        except BaseException:
            if self._held.pop(spec.id, None) is None and not granted.done():
                granted.cancel()
            core.handle_event(e.RequestCancelled(spec.id, "its caller stopped waiting"))
            raise
        finally:
            self._waiting.pop(spec.id, None)

    def is_lease(self, request: str) -> bool:
        return request in self._waiting or request in self._held

    def release(self, lease: Lease, tokens: int) -> None:
        if self._held.pop(lease.id, None) is not None:
            self._core.handle_event(e.AttemptFinished(lease.id, lease._attempt, tokens))

    def revoke(self, name: str, why: str) -> None:
        lease = self._held.get(name)
        if lease is not None and not lease.revoked.is_set():
            lease.why = why
            lease.revoked.set()

    # ---- instructions ----------------------------------------------------------------------------------------------

    def send(self, send: e.SendRequest) -> None:
        if send.request in self._held:  # its worker was lost; leases are never moved
            self.revoke(send.request, send.reason.sentence)
            del self._held[send.request]
            self._core.handle_event_soon(e.RequestCancelled(send.request, "its worker was lost"))
            return
        granted = self._waiting[send.request]
        handle = self._core.handles.get(send.worker)
        lease = Lease(send.request, "" if handle is None else handle.url, send.worker, send.version)
        lease._leases, lease._attempt = self, send.attempt
        if granted.done():  # its caller has just left
            self._core.handle_event_soon(e.AttemptFinished(send.request, send.attempt, 0))
            return
        self._held[send.request] = lease
        granted.set_result(lease)

    def abort(self, abort: e.AbortAttempt) -> bool:
        """Whether it is a lease, which its holder releases soon."""
        lease = self._held.get(abort.request)
        if lease is None:
            return False
        self.revoke(abort.request, abort.reason.sentence)
        self._core.spawn(self._await_release(lease, abort), f"lease-{lease.id}")
        return True

    async def _await_release(self, lease: Lease, abort: e.AbortAttempt) -> None:
        """Waits for the release until the abort deadline. A busy engine refuses to sleep."""
        core = self._core
        left_s = max(0.0, 0.9 * (abort.deadline - core.clock()))
        await core.until(lambda: lease.id not in self._held, left_s)
        if self._held.pop(lease.id, None) is not None:
            core.warn(lease.worker, f"lease {lease.id} was revoked and not released: {lease.why}")
            core.handle_event(e.RequestCancelled(lease.id, lease.why))
            core.handle_event(e.AbortDone(lease.id, abort.attempt, 0))

    def answer(self, answer: e.AnswerRequest) -> None:
        waiting = self._waiting.get(answer.request)
        self.revoke(answer.request, answer.reason.sentence)  # its worker stays occupied until the release
        if waiting is not None and not waiting.done():
            waiting.set_exception(UnreachableError(answer.reason.sentence))

    def refuse(self, refuse: e.RefuseRequest) -> None:
        waiting = self._waiting[refuse.request]
        if not waiting.done():
            waiting.set_exception(RefusedError(refuse.reason, refuse.retry_after_s))
