"""The crew of an elastic group: its members as tasks of a pool, the lines to them, and the state that must not be lost.

Submits, calls beside a step, keeps a copy of the state where nobody else has it, and ends. It is told what to do by the
conductor, on whose loop it lives; questions to the controller are asked on threads beside, each with a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.resources import Resources
from trimtab.model.pool import ENDED, TaskState
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.controller.rpc import TaskSnapshot
from trimtab.runtime.elastic.collectives import KeptState
from trimtab.runtime.elastic.member import MemberMethods, MemberWrapper
from trimtab.runtime.elastic.member_client import MemberClient, MemberGoneError, MemberHungError, MemberRaisedError

log = logging.getLogger("trimtab")

ANSWER_S = 30.0
LEAVE_S = 1.0
LET_GO_S = 2.0
NO_TIMEOUT_S = 1e7  # a member's task waits in its pool; how long that is worth is the group's business


@dataclass(frozen=True)
class MemberSpec:
    """How members are made."""

    kind: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    unit: Resources
    member_methods: MemberMethods
    priority: float
    labels: Mapping[str, str]
    notice_s: float
    start_timeout_s: float
    step_timeout_s: float
    keeps: bool  # a copy of the state in this process after every step


class MemberTasks:
    """The members of one group."""

    def __init__(self, session: Session, pool: Pool, plan: MemberSpec) -> None:
        self.plan = plan
        self.pool = pool
        self.session = session
        self.lines: dict[str, MemberClient] = {}  # by member
        self.tasks: dict[str, MemberClient] = {}  # by the id of its task; also of those that are no members any more
        self.kept: KeptState | None = None
        self._run_id = uuid.uuid4().hex[:6]
        self._submitting: dict[str, asyncio.Event] = {}  # members whose task is on its way to the pool
        self._threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="trimtab-group")

    async def submit(self, member: str) -> MemberClient:
        """A member's task, submitted; raises what the controller says against it."""
        plan = self.plan
        submit = functools.partial(
            self.pool.submit,
            MemberWrapper,
            (plan.kind, plan.args, dict(plan.kwargs)),
            resources=plan.unit.floats(),
            id=f"{member}.{self._run_id}",
            priority=plan.priority,
            labels=plan.labels,
            ends_with_me=True,
            notice_s=plan.notice_s,
            restarts=0,
            saves=plan.member_methods.state,
            wait_s=NO_TIMEOUT_S,
            awaits_node=True,
            start_timeout_s=plan.start_timeout_s,
        )
        submitted = self._submitting[member] = asyncio.Event()
        try:
            line = MemberClient(member, await self._beside(submit))
            self.lines[member] = self.tasks[line.task.id] = line
            return line
        finally:
            submitted.set()
            del self._submitting[member]

    async def line_of(self, member: str) -> MemberClient | None:
        """The line to a member, also to one whose task is on its way; None: it is gone."""
        if member in self._submitting:
            await self._submitting[member].wait()
        return self.lines.get(member)

    async def handle_of(self, seen: TaskSnapshot) -> Any:
        """Ray's handle of a task that runs; None where it is gone again."""
        if seen.handles and seen.handles[0] is not None:
            return seen.handles[0]
        actor = seen.members[0]
        find = functools.partial(self.session._ray.get_actor, actor.actor, namespace=actor.namespace)
        with contextlib.suppress(ValueError):
            return await self._beside(find)
        return None

    def current(self, steps: int) -> list[MemberClient]:
        """Those that are there to stay and have the state of the last step."""
        return [client for client in self.lines.values() if client.there and not client.ending and client.committed == steps]

    # ---- ends ----------------------------------------------------------------------------------------------------

    async def release(self, line: MemberClient) -> None:
        """One that was given notice by the pool need not stay until that is over."""
        if line.seen[0] is TaskState.cancelling:
            with contextlib.suppress(MemberGoneError, MemberHungError, MemberRaisedError):
                await line.call("beside_leave", within_s=LEAVE_S)

    async def complete(self, line: MemberClient) -> None:
        """Have a task end, whatever its process does."""
        try:
            await self._beside(functools.partial(line.task.complete, keep_slot=False))
        except InputError:
            pass  # it has ended already
        except TrimtabError as fault:
            log.warning("%s could not be ended: %s", line.member, fault.what)

    def forget(self, line: MemberClient) -> None:
        """Its task has ended."""
        line.down("it ended")
        self.tasks.pop(line.task.id, None)
        if self.lines.get(line.member) is line:
            del self.lines[line.member]

    async def end_all(self, timeout_s: float) -> None:
        """Every task ends, also of those that are no members any more."""
        lines = list(self.tasks.values())
        for line in lines:
            line.ending = True
        await asyncio.gather(*(self.complete(line) for line in lines))
        await asyncio.gather(*(self.asked("wait", line.task.id, ENDED, timeout_s) for line in lines))

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- the state -----------------------------------------------------------------------------------------------

    async def keep_last(self, leaver: MemberClient, steps: int) -> None:
        """Keep the state of a leaver here where nobody else has it."""
        if not any(client is not leaver for client in self.current(steps)):
            await self._keep(leaver, steps)

    async def keep_any(self, steps: int) -> None:
        """Keep the state here while somebody has it."""
        has = self.current(steps)
        if has and (self.kept is None or self.kept.step != steps):
            await self._keep(has[0], steps)

    async def _keep(self, line: MemberClient, steps: int) -> None:
        if not self.plan.member_methods.replicated or not steps:
            return
        with contextlib.suppress(MemberGoneError, MemberHungError, MemberRaisedError, asyncio.TimeoutError):
            committed, state = await line.call_with_refs("give", within_s=self.plan.step_timeout_s, returns=2)
            value = await asyncio.wait_for(asyncio.wrap_future(state.future()), ANSWER_S)
            if committed == steps:
                self.kept = KeptState(committed, self.session._ray.put(value))

    # ---- beside a step -------------------------------------------------------------------------------------------

    async def health(self, line: MemberClient, timeout_s: float) -> str | None:
        """What is wrong with a member, if anything; UnreachableError says nothing about it."""
        asked = self.asked("beside", line.task.id, "beside_health", timeout_s, within_s=timeout_s + ANSWER_S)
        word, note = await asked
        if word == "raised":
            return f"its health call raised {note}"
        return f"its health call did not return within {timeout_s:.3g} s" if word == "timed out" else None

    async def let_go(self, line: MemberClient) -> None:
        """Have a member wait no longer for parts of those who are gone."""
        with contextlib.suppress(TrimtabError):
            await self.asked("beside", line.task.id, "beside_let_go", LET_GO_S)

    async def asked(self, door: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        """Ask the controller."""
        return await self._beside(functools.partial(self.session.ask, door, *args, timeout_s=within_s))

    async def _beside(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
