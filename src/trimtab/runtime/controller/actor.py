"""The controller: the one actor of a cluster that clients ask about pools and tasks.

Named, detached, restartable, on the head node. These are its doors; behind them the driver drives the machine. Killed
at any moment it comes back by itself, with all it knew. It runs nobody's code (hosts do) and never waits without a
deadline. Clients reach it through `trimtab.runtime.client.session`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.core.codec import encode
from trimtab.core.errors import InputError, UnreachableError, nearest
from trimtab.core.reasons import StoryEntry
from trimtab.machines.pool.events import CancelRequested, PolicySet, PoolEnsured, PoolEvent, TaskSubmitted
from trimtab.machines.pool.records import PoolTask
from trimtab.model.nodes import NodeView
from trimtab.model.pool import ENDED, PoolSpec, PreemptionPolicy, TaskExplanation, TaskSpec, TaskState
from trimtab.runtime.controller.controller_loop import ASKS, RECONCILE_S, ControllerLoop, log_failure
from trimtab.runtime.controller.executor import read_payload
from trimtab.runtime.controller.leases import LEASE_S, ClientProcess
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot, door
from trimtab.runtime.store.blobs import NO_ROOM_HINT, header_of

TRY_AGAIN_S = 5.0  # after a failed attempt to come up
_LARGE = 2**20  # bytes that are written beside the loop


class Controller:
    """The actor. Its public methods are doors for clients; answers are read with `doors.value_of`."""

    def __init__(
        self, name: str, journal_dir: str | None, state_dir: str | None, reconcile_s: float = RECONCILE_S
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._name = name
        self._settings = (journal_dir, state_dir)
        self._reconcile_s = reconcile_s
        self._driver: ControllerLoop
        self._is_there = False
        self._closing = False
        self._try_to_come_up()

    # ---- coming up ------------------------------------------------------------------------------------------

    def _try_to_come_up(self) -> None:
        self._tried = time.monotonic()
        self._up = asyncio.get_running_loop().create_task(self._come_up())
        self._up.add_done_callback(self._tried_to_come_up)

    def _tried_to_come_up(self, up: asyncio.Task[None]) -> None:
        log_failure(up)
        if not up.cancelled() and up.exception() is not None:  # tasks need it, also where no client asks for it
            asyncio.get_running_loop().call_later(2 * TRY_AGAIN_S, self._come_up_again, up)

    def _come_up_again(self, failed: asyncio.Task[None]) -> None:
        if self._up is failed and not self._closing:
            self._try_to_come_up()

    async def _come_up(self) -> None:
        import ray

        journal_dir, state_dir = self._settings
        directory = Path(journal_dir) if journal_dir else session_dir(ray) / "trimtab" / self._name
        self._driver = ControllerLoop(self._name, directory, state_dir, ray, self._reconcile_s)
        await self._driver.come_up()
        self._is_there = True

    async def _up_now(self, *, again: bool = False) -> ControllerLoop:
        """The driver, once it is up. One that could not come up tries again, now and then or as asked."""
        if self._closing:
            raise UnreachableError(f"the controller {self._name} is shutting down", hint="connect again for a new one")
        failed = self._up.done() and not self._is_there
        if failed and (again or time.monotonic() - self._tried > TRY_AGAIN_S):
            self._try_to_come_up()
        await asyncio.shield(self._up)
        return self._driver

    @door
    async def ready(self, journal_dir: str | None = None, state_dir: str | None = None) -> dict[str, Any]:
        """Wait until the controller is up; after a failed start, try once more with these settings."""
        if self._up.done() and not self._is_there:
            self._settings = (journal_dir or self._settings[0], state_dir or self._settings[1])
        driver = await self._up_now(again=True)
        for word, asked, has in (
            ("journal_dir", journal_dir, str(driver.directory)),
            ("state_dir", state_dir, self._settings[1]),
        ):
            if asked is not None and (has is None or Path(asked) != Path(has)):
                raise InputError(
                    f"the controller {self._name} runs with {word} {has}, not {asked}",
                    hint="connect without it, or give this controller another name",
                )
        return {"name": self._name, "journal_dir": str(driver.directory), "notes": list(driver.journal.notes)}

    # ---- asking ---------------------------------------------------------------------------------------------

    @door
    async def ensure_pool(self, spec: PoolSpec, runtime_env: str = "", paths: Collection[str] = ()) -> None:
        """Have a pool, with warm hosts for tasks of this runtime environment."""
        driver = await self._up_now()
        driver.handle(PoolEnsured(spec))
        await driver.environments.set_pool(spec.name, runtime_env, tuple(paths))
        driver.warm_hosts()
        if spec.client:
            driver.leases.heard(spec.client)

    @door
    async def set_state_handlers(self, pool: str, handlers: bytes) -> None:
        """Keep what saves and restores the tasks of a pool that do not do so themselves; counts from the next start."""
        driver = await self._up_now()
        self._known_pool(pool)
        driver.shelf.put("handlers", pool, handlers)

    @door
    async def set_policy(self, policy: PreemptionPolicy) -> list[str]:
        """Decide who may evict whom; warnings come back."""
        (await self._up_now()).handle(PolicySet(policy))
        return self._rules_nobody_has(policy)

    @door
    async def submit(self, spec: TaskSpec, payload: bytes) -> TaskSnapshot:
        """Take a task. The same submission sent twice (its answer was lost) is taken once."""
        driver = await self._up_now()
        if spec.id in driver.machine.tasks and self._token_of(spec.id) == header_of(payload)["token"]:
            return self._seen(spec.id)
        self._check_journal(driver)
        handlers = driver.shelf.get("handlers", spec.pool)
        if handlers is not None:
            spec = replace(spec, saves=True)
        if len(payload) < _LARGE:
            staged = driver.shelf.stage("payloads", spec.id, payload)
        else:
            staged = await asyncio.to_thread(driver.shelf.stage, "payloads", spec.id, payload)
        try:
            driver.handle(TaskSubmitted(spec), staged)
        except BaseException:
            staged.discard()
            raise
        try:
            self._check_journal(driver)
        except UnreachableError:  # it would be forgotten with this process
            driver.feed(CancelRequested(spec.id))
            raise
        if len(payload) < _LARGE:
            driver.deeds.submitted(spec.id, read_payload(payload, handlers))
        if spec.client:
            driver.leases.heard(spec.client)
        await driver.environments.submitted(spec.id, header_of(payload)["runtime_env"])
        return self._seen(spec.id)

    @door
    async def ask(self, event: PoolEvent) -> None:
        """Something else that users ask: to cancel, complete, evict, take a turn, drain, drop, cordon."""
        driver = await self._up_now()
        if not isinstance(event, ASKS):
            raise InputError(f"{type(event).__name__} is nothing to ask for")
        driver.handle(event)

    @door
    async def renew(self, client: str, lease_s: float = LEASE_S, process: ClientProcess | None = None) -> bool:
        """A client says that it is alive, and for how long to believe that; false where it was given up already."""
        return (await self._up_now()).leases.renew(client, lease_s, process)

    @door
    async def leave(self, client: str) -> None:
        """A client goes: what was to end with it ends."""
        (await self._up_now()).end_tasks_of(client)

    @door
    async def drain_node(self, node: str, deadline_s: float | None, cause: str) -> NodeView:
        """Have a node emptied by a deadline, and tell Ray; by its id, the beginning of it, its name or address."""
        driver = await self._up_now()
        found = await driver.watch.drain(node, deadline_s, cause)
        return next(one for one in driver.watch.views(gone=True) if one.node == found)

    @door
    async def publish(self, kind: str, id: str, facts: dict[str, Any] | None, client: str) -> None:
        """Let others know of something that a client runs, as long as it lives; without facts: not any more."""
        driver = await self._up_now()
        driver.leases.heard(client)
        if facts is None:
            driver.board.take_down(kind, id)
        else:
            driver.board.put(kind, id, facts, client)
            driver.node_meter.heard(kind, id, facts)

    @door
    async def want(self, client: str, bundles: list[dict[str, float]]) -> None:
        """What a client could use in all: what all want together is asked of Ray's autoscaler."""
        driver = await self._up_now()
        driver.leases.heard(client)
        driver.board.want(client, bundles)

    @door
    async def beside(self, task: str, method: str, timeout_s: float) -> tuple[str, str]:
        """Call a method of a task's object beside its work: returned, raised, timed out or not called, and a note."""
        driver = await self._up_now()
        self._known_task(task)
        members = driver.deeds.running.get(task, ())
        if not members:
            return "not called", "it does not run"
        return await driver.members.beside(members[0], method, timeout_s)

    @door
    async def shutdown(self, destroy: bool = True, timeout_s: float = 30.0) -> None:
        """Let go of the journal; with `destroy` first end every task, slot and process. The caller ends the actor."""
        driver = await self._up_now()
        try:
            await driver.close(destroy, timeout_s)
        finally:
            self._closing = True

    # ---- looking --------------------------------------------------------------------------------------------

    @door
    async def explain(self, task: str) -> TaskExplanation:
        """Why a task is where it is."""
        driver = await self._up_now()
        self._known_task(task)
        return driver.machine.explain(task, driver.now())

    @door
    async def node_story(self, node: str) -> tuple[str, tuple[StoryEntry, ...]]:
        """A node's id and history, by its id, the beginning of it, or its name."""
        driver = await self._up_now()
        stories = driver.machine.node_stories
        named = {one.node for one in driver.watch.views(gone=True) if node and node == one.facts.name}
        found = named or {one for one in (*stories, *driver.watch.machine.nodes) if node and one.startswith(node)}
        if len(found) != 1:
            raise InputError(f"{len(found) or 'no'} nodes begin with {node}", hint="`trimtab status` lists nodes")
        (id,) = found
        own, of_pools = driver.watch.machine.story(id), stories.get(id, ())
        more = [one for one in of_pools if one.state == "emptied"]  # the rest is said by both
        return id, tuple(sorted([*own, *more], key=lambda chapter: chapter.at)) if own else tuple(of_pools)

    @door
    async def news(self, tasks: dict[str, tuple[TaskState, int]], version: int, timeout_s: float) -> ClientUpdate:
        """Nodes, and those tasks that are in another state or attempt than given, as soon as there is anything new."""
        driver = await self._up_now()
        deadline = time.monotonic() + timeout_s
        while True:
            known = driver.machine.tasks
            changed = [one for one, before in tasks.items() if one in known and _stand(known[one]) != tuple(before)]
            machine, left_s = driver.watch.machine, deadline - time.monotonic()
            if changed or machine.version != version or left_s <= 0 or driver.closing:
                seen = tuple(self._seen(one) for one in changed)
                return ClientUpdate(machine.version, driver.watch.views(), machine.last_change, seen)
            await driver.board.wait(left_s)

    @door
    async def see(self, task: str) -> TaskSnapshot:
        """Where a task is, and the members to call."""
        await self._up_now()
        return self._seen(task)

    @door
    async def tasks(self, pool: str | None = None) -> list[TaskSnapshot]:
        """All tasks that are remembered, or those of one pool."""
        driver = await self._up_now()
        if pool is not None:
            self._known_pool(pool)
        known = driver.machine.tasks.values()
        return [self._seen(one.id, handles=False) for one in known if pool in (None, one.spec.pool)]

    @door
    async def pool(self, name: str) -> PoolSpec:
        """A pool's specification."""
        driver = await self._up_now()
        self._known_pool(name)
        return driver.machine.pools[name].spec

    @door
    async def wait(self, task: str, states: Collection[TaskState], timeout_s: float) -> TaskSnapshot:
        """The task, as soon as it is in one of these states or ended, or as it is after so long."""
        driver = await self._up_now()
        self._known_task(task)
        await driver.wait(task, frozenset(states).union(ENDED), timeout_s)
        return self._seen(task)

    @door
    async def result(self, task: str) -> bytes | None:
        """What came out of an ended task, packed; None where it had nothing to say."""
        driver = await self._up_now()
        self._known_task(task)
        return await asyncio.to_thread(driver.shelf.get, "results", task)

    @door
    async def would_evict(self, spec: TaskSpec) -> Any:
        """Who would be evicted if this were submitted now; nobody is."""
        driver = await self._up_now()
        return driver.machine.would_evict(spec, driver.now())

    @door
    async def status(self) -> dict[str, Any]:
        """How everything stands; plain data."""
        driver = await self._up_now()
        machine, journal = driver.machine, driver.journal
        states: dict[str, int] = {}
        for one in machine.tasks.values():
            states[one.state.value] = states.get(one.state.value, 0) + 1
        return {
            "controller": self._name,
            "pid": os.getpid(),
            "time": driver.now(),
            "journal": {"dir": str(driver.directory), "fault": journal.fault, "notes": list(journal.notes)},
            "nodes": [
                {"node": one.node, "total": one.total.floats(), "outside": one.outside.floats()}
                for one in driver.watch.known.values()
            ],
            "fleet": [encode(one) for one in driver.watch.views(gone=True)],
            "groups": [{"id": one.id, "client": one.client, **one.facts} for one in driver.board.notices("group")],
            "wanted": driver.board.wanted,
            "desired_workers": driver.desired_workers(),
            "autoscaler": driver.board.fault,
            "ray": driver.watch.fault,
            "pools": {name: encode(machine.pool_view(name)) for name in machine.pools},
            "totals": encode(machine.totals()),
            "tasks": states,
            "warm_hosts": driver.members.warm_counts(),
            "clients": len(driver.leases),
            "silent_clients": driver.leases.status(),
            "background": driver.background.status(),
            "redone": driver.redone,
            "faults": driver.faults[-20:],
            "metrics": driver.meter.fault,
        }

    # ---- what is known --------------------------------------------------------------------------------------

    def _seen(self, task: str, *, handles: bool = True) -> TaskSnapshot:
        self._known_task(task)
        one = self._driver.machine.tasks[task]
        running = one.state in (TaskState.running, TaskState.parked, TaskState.cancelling)
        members = tuple(self._driver.deeds.running.get(task, ())) if running else ()
        return TaskSnapshot(
            id=one.id,
            pool=one.spec.pool,
            state=one.state,
            reason=one.reason,
            priority=one.spec.priority,
            labels=one.spec.labels,
            attempt=one.attempt,
            evictions=one.evictions,
            how=one.how,
            members=members,
            handles=tuple(self._driver.members.known_handle(member) for member in members) if handles else (),
        )

    def _known_task(self, task: str) -> None:
        known = self._driver.machine.tasks
        if task not in known:
            lost = " (history was lost)" if self._driver.journal.notes else ""
            near = nearest(task, known)
            hint = f"did you mean {near}?" if near else "`session.tasks()` lists those that are"
            raise InputError(f"no task {task} is known here{lost}", hint=hint)

    def _known_pool(self, pool: str) -> None:
        pools = self._driver.machine.pools
        if pool not in pools:
            raise InputError(f"there is no pool {pool}", hint=f"pools: {', '.join(sorted(pools)) or 'none yet'}")

    def _check_journal(self, driver: ControllerLoop) -> None:
        """Nothing new is taken that the journal cannot hold."""
        if not driver.journal.catch_up():
            raise UnreachableError(str(driver.journal.fault), hint=NO_ROOM_HINT)

    def _token_of(self, task: str) -> str | None:
        header = self._driver.shelf.header("payloads", task)
        return None if header is None else str(header["token"])

    def _rules_nobody_has(self, policy: PreemptionPolicy) -> list[str]:
        machine = self._driver.machine
        labels = {key for task in machine.tasks.values() for key, _ in task.spec.labels}
        labels |= {key for pool in machine.pools.values() for key, _ in pool.spec.labels}
        return [
            f"no task or pool has the label {label} yet, which a rule names"
            for label, _ in policy.label_rules
            if label not in labels
        ]


def _stand(task: PoolTask) -> tuple[TaskState, int]:
    return task.state, task.attempt


def session_dir(ray: Any) -> Path:
    """Where this Ray cluster keeps its own files on this node: a fresh cluster begins with a fresh journal."""
    return Path(ray._private.worker._global_node.get_session_dir_path())
