"""The members of an elastic group as tasks of a pool, their clients, and the state that must not be lost.

Submits and ends member tasks, makes calls beside a step, and keeps a copy of the state if no other member has it. Used
on the group controller's event loop; calls to the pool controller run on threads, each with a deadline. Ray needs about
15 s to report that a call to a killed node will never return. So every call of a member waits for its answer or for the
controller's update on the member's task, whichever comes first. Nothing is decided here, and no process ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import Resources
from trimtab.model.pool import ENDED, TaskState
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.task import Task
from trimtab.runtime.controller.rpc import TaskSnapshot
from trimtab.runtime.elastic.member import MemberMethods, MemberWrapper, PartLostError

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


log = logging.getLogger("trimtab")

ANSWER_S = 30.0
LEAVE_S = 1.0
LET_GO_S = 2.0
NO_TIMEOUT_S = 1e7  # a member's task waits in its pool; the group decides how long


class KeptState(Frozen):
    """A state kept in this process, since no other member has it: its step, and a reference to it."""

    step: int
    state: Any


class MemberSpec(Frozen):
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
