"""Elastic groups: as many members as fit, in lockstep, while nodes come and go.

    with trimtab.ElasticGroup(Trainer, per_node={"gpu": 1}, min=1, max=8) as group:
        for batch in batches:
            result = group.step(batch)

One member per unit of resources, each a task of a pool, so priorities and quotas hold. The group grows at the step
boundary after a join, shrinks before a drain's deadline and replaces lost members; an interrupted step is redone. This
module is the public API; the machine decides (`machines/elastic`), the group controller drives it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.resources import Resources
from trimtab.model.nodes import ElasticSpec, World
from trimtab.runtime.client.session import Pool, Session, connect
from trimtab.runtime.client.task import class_of
from trimtab.runtime.controller.rpc import controller_name
from trimtab.runtime.elastic.group_controller import GroupController, GroupError, GroupGaveUpError, StepFailedError
from trimtab.runtime.elastic.member import MemberWorld, find_member_methods
from trimtab.runtime.elastic.member_tasks import MemberSpec, MemberTasks
from trimtab.runtime.elastic.view import GroupLogEntry, StepResult
from trimtab.runtime.procs.interrupts import reliable_interrupts
from trimtab.runtime.rayapi.connect import NAMESPACE, RayConnection

__all__ = [
    "ElasticGroup", "GroupError", "GroupGaveUpError", "GroupLogEntry", "MemberWorld", "StepFailedError", "StepResult",
]  # fmt: skip

LOOK_S = 0.2  # between checks for Ctrl-C
MANY = 10_000  # members that the quota of a pool allows without a stated maximum


class ElasticGroup:
    """A group of actors that grows and shrinks with the cluster, and works in steps.

    A member's class has `compute(step, batch)`, which returns a part and changes nothing that is kept, and
    `commit(step, parts)`, which applies the parts of all members, by rank. It may have `enter(world)` (rank, size,
    epoch, step), `save()` and `load(state)` (new members get the current state), `health()` (raises or returns False if
    unhealthy), `merge(states)` (states of removed members without a successor) and `cancel()`. A class with only
    `compute` or `step` has no second half: what it returns is the step's value, and an interrupted step runs again.

    With fewer than `min` members the group waits, says why, and gives up after `wait_s`; `max` is the upper limit.
    Without a `session` it connects by itself, and closes what it started; without a `pool` it has its own. `keep_state`
    keeps a copy of the state in this process after every step, in case all members are lost at once. `tell` is called
    with every GroupLogEntry, on a thread of the group.
    """

    def __init__(
        self,
        actor_class: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        per_node: Mapping[str, float] | None = None,
        min: int = 1,
        max: int | None = None,
        session: Session | None = None,
        pool: Pool | str | None = None,
        name: str | None = None,
        address: str | None = None,
        priority: float = 5.0,
        labels: Mapping[str, str] | None = None,
        wait_s: float = 600.0,
        step_timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
        health_every_s: float = 5.0,
        health_timeout_s: float = 5.0,
        restarts: int = 10,
        restart_window_s: float = 600.0,
        back_off_s: float = 0.5,
        handover_s: float = 5.0,
        notice_s: float = 15.0,
        preload: Sequence[str] = (),
        keep_state: bool = False,
        tell: Callable[[GroupLogEntry], None] | None = None,
    ) -> None:
        kind = class_of(actor_class, "an elastic group")
        name = name or f"{kind.__name__.lower()}-{uuid.uuid4().hex[:6]}"
        where = f"group {name}"
        if notice_s <= handover_s:
            raise InputError(f"notice_s {notice_s:g} leaves no time beyond handover_s {handover_s:g}", where=where)
        self.spec = ElasticSpec(
            name=name,
            unit=Resources.of(per_node if per_node is not None else {"gpu": 1}, where=where),
            min_members=min,
            max_members=max,
            wait_s=wait_s,
            step_timeout_s=step_timeout_s,
            health_every_s=health_every_s,
            health_timeout_s=health_timeout_s,
            restarts=restarts,
            restart_window_s=restart_window_s,
            back_off_s=back_off_s,
            handover_s=handover_s,
        )
        member_spec = MemberSpec(
            kind=kind,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            unit=self.spec.unit,
            member_methods=find_member_methods(kind),
            priority=priority,
            labels=dict(labels or {}),
            notice_s=notice_s,
            start_timeout_s=start_timeout_s,
            step_timeout_s=step_timeout_s,
            keep_state=keep_state,
        )
        self._closing = contextlib.ExitStack()
        try:
            self._session = session or self._connected(address)
            if any(group["id"] == name for group in self._session.status()["groups"]):
                hint = "give it another name; one whose driver died is forgotten after some seconds"
                raise InputError("there is a group of this name already", where=where, hint=hint)
            members = MemberTasks(self._session, self._pool_of(pool, preload), member_spec)
            self._controller = GroupController(self.spec, members, tell or (lambda _: None))
            self._closing.callback(self._controller.close)
            self._controller.start()
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> ElasticGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def session(self) -> Session:
        return self._session

    @property
    def steps(self) -> int:
        return self._controller.steps

    @property
    def world(self) -> World | None:
        """The current world; None while it changes, or before the first step."""
        return self._controller.world

    def view(self) -> dict[str, Any]:
        return self._controller.view()

    def step(self, batch: Any = None, timeout: float | None = None) -> StepResult:
        """Run the next step on all members.

        Waits while there are too few members and redoes the step if one is lost. Raises GroupGaveUpError if the group
        cannot go on, StepFailedError if a member's own code raised, TimeoutError after `timeout` seconds; the step then
        goes on, and the group can only be closed.
        """
        if batch is not None:
            batch = self._session._ray.put(batch)  # once, for all members and every attempt
        return self._wait(self._controller.request_step(batch), timeout)

    def resize(self, size: int | None) -> None:
        """Set the number of members from the next step boundary on; None: as many as fit."""
        self._controller.request_size(size)

    def close(self) -> None:
        """End the members and everything started for this group."""
        self._closing.close()

    @property
    def _own_pool(self) -> str:
        return f"group-{self.name}"

    def _wait(self, result: concurrent.futures.Future[StepResult], timeout: float | None) -> StepResult:
        """The result; Ctrl-C interrupts the wait."""
        left_s = timeout
        with reliable_interrupts() as heed:
            while True:
                heed()
                wait_s = LOOK_S if left_s is None or left_s > LOOK_S else left_s
                try:
                    return result.result(wait_s)
                except concurrent.futures.TimeoutError:
                    left_s = None if left_s is None else left_s - wait_s
                    if left_s is not None and left_s <= 0:
                        raise TimeoutError(f"the step is not complete after {timeout:.3g} s") from None

    def _connected(self, address: str | None) -> Session:
        """A session of its own. A controller created for it ends with it, unless others use it by then."""
        connection = RayConnection(address)
        self._closing.callback(connection.close)
        there_before = _has_controller(connection.ray)
        session = connect()  # to the Ray that this process is connected to by now

        def close_session() -> None:
            with contextlib.suppress(TrimtabError):
                status = session.status()
                others = status["clients"] > 1 or set(status["pools"]) - {self._own_pool}
                if not there_before and not others:
                    session.shutdown()
            session.close()

        self._closing.callback(close_session)
        return session

    def _pool_of(self, pool: Pool | str | None, preload: Sequence[str]) -> Pool:
        if isinstance(pool, Pool):
            return pool
        if isinstance(pool, str):
            return self._session.pool(pool)
        max_members = self.spec.max_members or MANY
        quota = {name: amount * max_members for name, amount in self.spec.unit.floats().items()}
        own = self._session.pool(self._own_pool, quota, reuse=False, warm_each=1, preload=preload, ends_with_me=True)

        def drop() -> None:
            with contextlib.suppress(TrimtabError):
                own.drop()

        self._closing.callback(drop)
        return own


def _has_controller(ray: Any) -> bool:
    try:
        ray.get_actor(controller_name("trimtab"), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
