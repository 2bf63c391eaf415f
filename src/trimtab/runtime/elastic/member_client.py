"""Client of one member of an elastic group: calls with deadlines that end at once when the member is lost.

Ray needs about 15 s to report that a call to a killed node will never return. So every call waits for its answer or for
the controller's update on the member's task, whichever comes first. Clients live on the group controller's event loop;
they decide nothing and end no process.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trimtab.core.reasons import ReasonCode
from trimtab.model.pool import TaskState
from trimtab.runtime.client.task import Task
from trimtab.runtime.elastic.member import PartLostError

LOSSES = (  # a task that stops for one of these is lost: it was not asked to leave
    ReasonCode.node_lost,
    ReasonCode.slot_lost,
    ReasonCode.process_died,
    ReasonCode.gang_broken,
    ReasonCode.start_timeout,
    ReasonCode.restarts_used,
)


class MemberError(Exception):
    """A call of a member failed."""


class MemberGoneError(MemberError):
    """The member's process is gone, or was never there."""


class MemberHungError(MemberError):
    """The member did not answer in time."""


class MemberRaisedError(MemberError):
    """User code raised; `fault` is what it raised."""

    def __init__(self, member: str, method: str, fault: BaseException) -> None:
        lines = str(getattr(fault, "cause", None) or fault).strip().splitlines()
        kind = type(getattr(fault, "cause", None) or fault).__name__
        super().__init__(f"{method} of {member} raised {kind}{': ' + lines[-1] if lines else ''}")
        self.fault = fault


class MemberClient:
    """One member, as its group reaches it."""

    def __init__(self, member: str, task: Task) -> None:
        self.member = member
        self.task = task
        self.seen: tuple[TaskState, int] = (TaskState.waiting, 0)  # state and attempt of the last update
        self.attempt = 0  # the current or last one
        self.node = ""
        self.committed = 0  # the last step that its state is known to include
        self.ending = False  # it was told to end
        self.lost = False  # it is gone unexpectedly, and that was reported
        self._handle: Any = None
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def there(self) -> bool:
        """Whether it can be called."""
        return self._handle is not None and not self._gone.done()

    def up(self, handle: Any, node: str, attempt: int) -> None:
        """It runs: constructed, on this node."""
        self._handle, self.node, self.attempt, self.committed = handle, node, attempt, 0
        if self._gone.done():
            self._gone = asyncio.get_running_loop().create_future()

    def down(self, why: str) -> None:
        """It does not run any more: pending calls end."""
        if not self._gone.done():
            self._gone.set_result(why)

    async def call(self, method: str, *args: Any, within_s: float) -> Any:
        return (await self.call_with_refs(method, *args, within_s=within_s, returns=1))[0]

    async def call_with_refs(self, method: str, *args: Any, within_s: float, returns: int) -> tuple[Any, ...]:
        """The first return value of a method, and references to the others, which stay where they are."""
        from ray import exceptions

        if not self.there:
            raise MemberGoneError(self._gone.result() if self._gone.done() else f"{self.member} does not run yet")
        options = self._handle.call.options(name=f"{self.task.id}.{method}", num_returns=returns)
        refs = options.remote(method, *args)
        first, *others = refs if returns > 1 else [refs]
        answer = asyncio.wrap_future(first.future())
        try:
            await asyncio.wait({answer, self._gone}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return (answer.result(), *others)
            if self._gone.done():
                raise MemberGoneError(self._gone.result())
            raise MemberHungError(f"{method} of {self.member} did not return within {within_s:.3g} s")
        except exceptions.RayActorError as fault:
            self.down(f"{self.member}: {type(fault).__name__}")
            raise MemberGoneError(self._gone.result()) from None
        except (MemberError, PartLostError, asyncio.CancelledError):
            raise
        except Exception as fault:
            raise MemberRaisedError(self.member, method, fault) from fault
        finally:
            answer.cancel()  # a no-op if it is done; else no longer awaited
