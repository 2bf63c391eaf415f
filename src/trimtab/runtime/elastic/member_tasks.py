"""The members of an elastic group as tasks of a pool, their clients, and the state that must not be lost.

Submits and ends member tasks, makes calls beside a step, and keeps a copy of the state if no other member has it. Used
on the group controller's event loop; calls to the pool controller run on threads, each with a deadline.
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
from trimtab.runtime.elastic.member_client import MemberClient, MemberError

log = logging.getLogger("trimtab")

ANSWER_S = 30.0
LEAVE_S = 1.0
LET_GO_S = 2.0
NO_TIMEOUT_S = 1e7  # a member's task waits in its pool; the group decides how long


@dataclass(frozen=True)
class MemberSpec:
    """How members are created."""

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
    keep_state: bool  # a copy of the state in this process after every step


class MemberTasks:
    """The members of one group."""

    def __init__(self, session: Session, pool: Pool, spec: MemberSpec) -> None:
        self.spec = spec
        self.pool = pool
        self.session = session
        self.clients: dict[str, MemberClient] = {}  # by member
        self.tasks: dict[str, MemberClient] = {}  # by task id; also of former members
        self.kept: KeptState | None = None
        self._run_id = uuid.uuid4().hex[:6]
        self._submitting: dict[str, asyncio.Event] = {}  # members whose task is being submitted
        self._threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="trimtab-group")

    async def submit(self, member: str) -> MemberClient:
        """Submit a member's task; raises what the controller refuses."""
        spec = self.spec
        submit = functools.partial(
            self.pool.submit,
            MemberWrapper,
            (spec.kind, spec.args, dict(spec.kwargs)),
            resources=spec.unit.floats(),
            id=f"{member}.{self._run_id}",
            priority=spec.priority,
            labels=spec.labels,
            ends_with_me=True,
            notice_s=spec.notice_s,
            restarts=0,
            saves=spec.member_methods.state,
            wait_s=NO_TIMEOUT_S,
            awaits_node=True,
            start_timeout_s=spec.start_timeout_s,
        )
        submitted = self._submitting[member] = asyncio.Event()
        try:
            client = MemberClient(member, await self._in_thread(submit))
            self.clients[member] = self.tasks[client.task.id] = client
            return client
        finally:
            submitted.set()
            del self._submitting[member]

    async def client_of(self, member: str) -> MemberClient | None:
        """The client of a member, also of one whose task is being submitted; None: it is gone."""
        if member in self._submitting:
            await self._submitting[member].wait()
        return self.clients.get(member)

    async def handle_of(self, seen: TaskSnapshot) -> Any:
        """Ray's handle of a running task; None if it is gone again."""
        if seen.handles and seen.handles[0] is not None:
            return seen.handles[0]
        actor = seen.members[0]
        find = functools.partial(self.session._ray.get_actor, actor.actor, namespace=actor.namespace)
        with contextlib.suppress(ValueError):
            return await self._in_thread(find)
        return None

    def current(self, steps: int) -> list[MemberClient]:
        """Live members that stay and have the state of the last step."""
        return [
            client
            for client in self.clients.values()
            if client.there and not client.ending and client.committed == steps
        ]

    async def release(self, client: MemberClient) -> None:
        """End the notice of a preempted member early."""
        if client.seen[0] is TaskState.cancelling:
            with contextlib.suppress(MemberError):
                await client.call("beside_leave", within_s=LEAVE_S)

    async def complete(self, client: MemberClient) -> None:
        """End a task, whatever its process does."""
        try:
            await self._in_thread(functools.partial(client.task.complete, keep_slot=False))
        except InputError:
            pass  # it has ended already
        except TrimtabError as fault:
            log.warning("%s could not be ended: %s", client.member, fault.what)

    def forget(self, client: MemberClient) -> None:
        client.down("it ended")
        self.tasks.pop(client.task.id, None)
        if self.clients.get(client.member) is client:
            del self.clients[client.member]

    async def end_all(self, timeout_s: float) -> None:
        """End every task, also of former members."""
        clients = list(self.tasks.values())
        for client in clients:
            client.ending = True
        await asyncio.gather(*(self.complete(client) for client in clients))
        await asyncio.gather(*(self.ask_controller("wait", client.task.id, ENDED, timeout_s) for client in clients))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- state ---------------------------------------------------------------------------------------------------

    async def keep_last(self, leaver: MemberClient, steps: int) -> None:
        """Keep the state of a leaving member here if no other has it."""
        if not any(client is not leaver for client in self.current(steps)):
            await self._keep(leaver, steps)

    async def keep_any(self, steps: int) -> None:
        """Keep the state here while a member has it."""
        current = self.current(steps)
        if current and (self.kept is None or self.kept.step != steps):
            await self._keep(current[0], steps)

    async def _keep(self, client: MemberClient, steps: int) -> None:
        if not self.spec.member_methods.replicated or not steps:
            return
        with contextlib.suppress(MemberError, asyncio.TimeoutError):
            committed, state = await client.call_with_refs("give", within_s=self.spec.step_timeout_s, returns=2)
            value = await asyncio.wait_for(asyncio.wrap_future(state.future()), ANSWER_S)
            if committed == steps:
                self.kept = KeptState(committed, self.session._ray.put(value))

    # ---- beside a step -------------------------------------------------------------------------------------------

    async def health(self, client: MemberClient, timeout_s: float) -> str | None:
        """What is wrong with a member, if anything; UnreachableError says nothing about it."""
        call = self.ask_controller("beside", client.task.id, "beside_health", timeout_s, within_s=timeout_s + ANSWER_S)
        word, note = await call
        if word == "raised":
            return f"its health call raised {note}"
        return f"its health call did not return within {timeout_s:.3g} s" if word == "timed out" else None

    async def stop_waiting(self, client: MemberClient) -> None:
        """Have a member stop waiting for parts of lost members."""
        with contextlib.suppress(TrimtabError):
            await self.ask_controller("beside", client.task.id, "beside_let_go", LET_GO_S)

    async def ask_controller(self, method: str, *args: Any, within_s: float = ANSWER_S) -> Any:
        return await self._in_thread(functools.partial(self.session.ask, method, *args, timeout_s=within_s))

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
