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
from trimtab.runtime.controller.controller_loop import USER_EVENTS, RECONCILE_S, ControllerLoop, log_failure
from trimtab.runtime.controller.executor import read_payload
from trimtab.runtime.controller.leases import LEASE_S, ClientProcess
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot, rpc_method
from trimtab.runtime.store.blobs import NO_ROOM_HINT, header_of

START_RETRY_S = 5.0  # after a failed attempt to come up
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
        self._loop: ControllerLoop
        self._started = False
        self._closing = False
        self._begin_start()

    # ---- coming up ------------------------------------------------------------------------------------------

    def _begin_start(self) -> None:
        self._start_tried_at = time.monotonic()
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._starting.add_done_callback(self._start_done)

    def _start_done(self, up: asyncio.Task[None]) -> None:
        log_failure(up)
        if not up.cancelled() and up.exception() is not None:  # tasks need it, also where no client asks for it
            asyncio.get_running_loop().call_later(2 * START_RETRY_S, self._retry_start, up)

    def _retry_start(self, failed: asyncio.Task[None]) -> None:
        if self._starting is failed and not self._closing:
            self._begin_start()

    async def _start(self) -> None:
        import ray

        journal_dir, state_dir = self._settings
        directory = Path(journal_dir) if journal_dir else session_dir(ray) / "trimtab" / self._name
        self._loop = ControllerLoop(self._name, directory, state_dir, ray, self._reconcile_s)
        await self._loop.start()
        self._started = True

    async def _ready_loop(self, *, again: bool = False) -> ControllerLoop:
        """The driver, once it is up. One that could not come up tries again, now and then or as asked."""
        if self._closing:
            raise UnreachableError(f"the controller {self._name} is shutting down", hint="connect again for a new one")
        failed = self._starting.done() and not self._started
        if failed and (again or time.monotonic() - self._start_tried_at > START_RETRY_S):
            self._begin_start()
        await asyncio.shield(self._starting)
        return self._loop

    @rpc_method
    async def ready(self, journal_dir: str | None = None, state_dir: str | None = None) -> dict[str, Any]:
        """Wait until the controller is up; after a failed start, try once more with these settings."""
        if self._starting.done() and not self._started:
            self._settings = (journal_dir or self._settings[0], state_dir or self._settings[1])
        loop = await self._ready_loop(again=True)
        for word, wanted, has in (
            ("journal_dir", journal_dir, str(loop.directory)),
            ("state_dir", state_dir, self._settings[1]),
        ):
            if wanted is not None and (has is None or Path(wanted) != Path(has)):
                raise InputError(
                    f"the controller {self._name} runs with {word} {has}, not {wanted}",
                    hint="connect without it, or give this controller another name",
                )
        return {"name": self._name, "journal_dir": str(loop.directory), "notes": list(loop.journal.notes)}

    # ---- asking ---------------------------------------------------------------------------------------------

    @rpc_method
    async def ensure_pool(self, spec: PoolSpec, runtime_env: str = "", paths: Collection[str] = ()) -> None:
        """Have a pool, with warm hosts for tasks of this runtime environment."""
        loop = await self._ready_loop()
        loop.handle(PoolEnsured(spec))
        await loop.environments.set_pool(spec.name, runtime_env, tuple(paths))
        loop.update_warm_workers()
        if spec.client:
            loop.leases.touch(spec.client)

    @rpc_method
    async def set_state_handlers(self, pool: str, handlers: bytes) -> None:
        """Keep what saves and restores the tasks of a pool that do not do so themselves; counts from the next start."""
        loop = await self._ready_loop()
        self._known_pool(pool)
        loop.blobs.put("handlers", pool, handlers)

    @rpc_method
    async def set_policy(self, policy: PreemptionPolicy) -> list[str]:
        """Decide who may evict whom; warnings come back."""
        (await self._ready_loop()).handle(PolicySet(policy))
        return self._unmatched_rules(policy)

    @rpc_method
    async def submit(self, spec: TaskSpec, payload: bytes) -> TaskSnapshot:
        """Take a task. The same submission sent twice (its answer was lost) is taken once."""
        loop = await self._ready_loop()
        if spec.id in loop.machine.tasks and self._token_of(spec.id) == header_of(payload)["token"]:
            return self._seen(spec.id)
        self._check_journal(loop)
        handlers = loop.blobs.get("handlers", spec.pool)
        if handlers is not None:
            spec = replace(spec, saves=True)
        if len(payload) < _LARGE:
            staged = loop.blobs.stage("payloads", spec.id, payload)
        else:
            staged = await asyncio.to_thread(loop.blobs.stage, "payloads", spec.id, payload)
        try:
            loop.handle(TaskSubmitted(spec), staged)
        except BaseException:
            staged.discard()
            raise
        try:
            self._check_journal(loop)
        except UnreachableError:  # it would be forgotten with this process
            loop.feed(CancelRequested(spec.id))
            raise
        if len(payload) < _LARGE:
            loop.executor.submitted(spec.id, read_payload(payload, handlers))
        if spec.client:
            loop.leases.touch(spec.client)
        await loop.environments.submitted(spec.id, header_of(payload)["runtime_env"])
        return self._seen(spec.id)

    @rpc_method
    async def ask(self, event: PoolEvent) -> None:
        """Something else that users ask: to cancel, complete, evict, take a turn, drain, drop, cordon."""
        loop = await self._ready_loop()
        if not isinstance(event, USER_EVENTS):
            raise InputError(f"{type(event).__name__} is nothing to ask for")
        loop.handle(event)

    @rpc_method
    async def renew(self, client: str, lease_s: float = LEASE_S, process: ClientProcess | None = None) -> bool:
        """A client says that it is alive, and for how long to believe that; false where it was given up already."""
        return (await self._ready_loop()).leases.renew(client, lease_s, process)

    @rpc_method
    async def leave(self, client: str) -> None:
        """A client goes: what was to end with it ends."""
        (await self._ready_loop()).end_tasks_of(client)

    @rpc_method
    async def drain_node(self, node: str, deadline_s: float | None, cause: str) -> NodeView:
        """Have a node emptied by a deadline, and tell Ray; by its id, the beginning of it, its name or address."""
        loop = await self._ready_loop()
        found = await loop.node_monitor.drain(node, deadline_s, cause)
        return next(one for one in loop.node_monitor.views(gone=True) if one.node == found)

    @rpc_method
    async def publish(self, kind: str, id: str, facts: dict[str, Any] | None, client: str) -> None:
        """Let others know of something that a client runs, as long as it lives; without facts: not any more."""
        loop = await self._ready_loop()
        loop.leases.touch(client)
        if facts is None:
            loop.client_registry.remove(kind, id)
        else:
            loop.client_registry.put(kind, id, facts, client)
            loop.node_metrics.observe(kind, id, facts)

    @rpc_method
    async def want(self, client: str, bundles: list[dict[str, float]]) -> None:
        """What a client could use in all: what all want together is asked of Ray's autoscaler."""
        loop = await self._ready_loop()
        loop.leases.touch(client)
        loop.client_registry.want(client, bundles)

    @rpc_method
    async def beside(self, task: str, method: str, timeout_s: float) -> tuple[str, str]:
        """Call a method of a task's object beside its work: returned, raised, timed out or not called, and a note."""
        loop = await self._ready_loop()
        self._known_task(task)
        members = loop.executor.running.get(task, ())
        if not members:
            return "not called", "it does not run"
        return await loop.workers.beside(members[0], method, timeout_s)

    @rpc_method
    async def shutdown(self, destroy: bool = True, timeout_s: float = 30.0) -> None:
        """Let go of the journal; with `destroy` first end every task, slot and process. The caller ends the actor."""
        loop = await self._ready_loop()
        try:
            await loop.close(destroy, timeout_s)
        finally:
            self._closing = True

    # ---- looking --------------------------------------------------------------------------------------------

    @rpc_method
    async def explain(self, task: str) -> TaskExplanation:
        """Why a task is where it is."""
        loop = await self._ready_loop()
        self._known_task(task)
        return loop.machine.explain(task, loop.now())

    @rpc_method
    async def node_story(self, node: str) -> tuple[str, tuple[StoryEntry, ...]]:
        """A node's id and history, by its id, the beginning of it, or its name."""
        loop = await self._ready_loop()
        stories = loop.machine.node_stories
        named = {one.node for one in loop.node_monitor.views(gone=True) if node and node == one.facts.name}
        found = named or {one for one in (*stories, *loop.node_monitor.machine.nodes) if node and one.startswith(node)}
        if len(found) != 1:
            raise InputError(f"{len(found) or 'no'} nodes begin with {node}", hint="`trimtab status` lists nodes")
        (id,) = found
        own, of_pools = loop.node_monitor.machine.story(id), stories.get(id, ())
        more = [one for one in of_pools if one.state == "emptied"]  # the rest is said by both
        return id, tuple(sorted([*own, *more], key=lambda chapter: chapter.at)) if own else tuple(of_pools)

    @rpc_method
    async def news(self, tasks: dict[str, tuple[TaskState, int]], version: int, timeout_s: float) -> ClientUpdate:
        """Nodes, and those tasks that are in another state or attempt than given, as soon as there is anything new."""
        loop = await self._ready_loop()
        deadline = time.monotonic() + timeout_s
        while True:
            known = loop.machine.tasks
            changed = [one for one, before in tasks.items() if one in known and _version(known[one]) != tuple(before)]
            machine, left_s = loop.node_monitor.machine, deadline - time.monotonic()
            if changed or machine.version != version or left_s <= 0 or loop.closing:
                seen = tuple(self._seen(one) for one in changed)
                return ClientUpdate(machine.version, loop.node_monitor.views(), machine.last_change, seen)
            await loop.client_registry.wait(left_s)

    @rpc_method
    async def see(self, task: str) -> TaskSnapshot:
        """Where a task is, and the members to call."""
        await self._ready_loop()
        return self._seen(task)

    @rpc_method
    async def tasks(self, pool: str | None = None) -> list[TaskSnapshot]:
        """All tasks that are remembered, or those of one pool."""
        loop = await self._ready_loop()
        if pool is not None:
            self._known_pool(pool)
        known = loop.machine.tasks.values()
        return [self._seen(one.id, handles=False) for one in known if pool in (None, one.spec.pool)]

    @rpc_method
    async def pool(self, name: str) -> PoolSpec:
        """A pool's specification."""
        loop = await self._ready_loop()
        self._known_pool(name)
        return loop.machine.pools[name].spec

    @rpc_method
    async def wait(self, task: str, states: Collection[TaskState], timeout_s: float) -> TaskSnapshot:
        """The task, as soon as it is in one of these states or ended, or as it is after so long."""
        loop = await self._ready_loop()
        self._known_task(task)
        await loop.wait(task, frozenset(states).union(ENDED), timeout_s)
        return self._seen(task)

    @rpc_method
    async def result(self, task: str) -> bytes | None:
        """What came out of an ended task, packed; None where it had nothing to say."""
        loop = await self._ready_loop()
        self._known_task(task)
        return await asyncio.to_thread(loop.blobs.get, "results", task)

    @rpc_method
    async def would_evict(self, spec: TaskSpec) -> Any:
        """Who would be evicted if this were submitted now; nobody is."""
        loop = await self._ready_loop()
        return loop.machine.would_evict(spec, loop.now())

    @rpc_method
    async def status(self) -> dict[str, Any]:
        """How everything stands; plain data."""
        loop = await self._ready_loop()
        machine, journal = loop.machine, loop.journal
        states: dict[str, int] = {}
        for one in machine.tasks.values():
            states[one.state.value] = states.get(one.state.value, 0) + 1
        return {
            "controller": self._name,
            "pid": os.getpid(),
            "time": loop.now(),
            "journal": {"dir": str(loop.directory), "fault": journal.fault, "notes": list(journal.notes)},
            "nodes": [
                {"node": one.node, "total": one.total.floats(), "outside": one.outside.floats()}
                for one in loop.node_monitor.known.values()
            ],
            "fleet": [encode(one) for one in loop.node_monitor.views(gone=True)],
            "groups": [
                {"id": one.id, "client": one.client, **one.facts} for one in loop.client_registry.notices("group")
            ],
            "wanted": loop.client_registry.wanted,
            "desired_workers": loop.desired_workers(),
            "autoscaler": loop.client_registry.fault,
            "ray": loop.node_monitor.fault,
            "pools": {name: encode(machine.pool_view(name)) for name in machine.pools},
            "totals": encode(machine.totals()),
            "tasks": states,
            "warm_hosts": loop.workers.warm_counts(),
            "clients": len(loop.leases),
            "silent_clients": loop.leases.status(),
            "background": loop.background.status(),
            "redone": loop.redone,
            "faults": loop.faults[-20:],
            "metrics": loop.pool_metrics.fault,
        }

    # ---- what is known --------------------------------------------------------------------------------------

    def _seen(self, task: str, *, handles: bool = True) -> TaskSnapshot:
        self._known_task(task)
        one = self._loop.machine.tasks[task]
        running = one.state in (TaskState.running, TaskState.parked, TaskState.cancelling)
        members = tuple(self._loop.executor.running.get(task, ())) if running else ()
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
            handles=tuple(self._loop.workers.known_handle(member) for member in members) if handles else (),
        )

    def _known_task(self, task: str) -> None:
        known = self._loop.machine.tasks
        if task not in known:
            lost = " (history was lost)" if self._loop.journal.notes else ""
            near = nearest(task, known)
            hint = f"did you mean {near}?" if near else "`session.tasks()` lists those that are"
            raise InputError(f"no task {task} is known here{lost}", hint=hint)

    def _known_pool(self, pool: str) -> None:
        pools = self._loop.machine.pools
        if pool not in pools:
            raise InputError(f"there is no pool {pool}", hint=f"pools: {', '.join(sorted(pools)) or 'none yet'}")

    def _check_journal(self, loop: ControllerLoop) -> None:
        """Nothing new is taken that the journal cannot hold."""
        if not loop.journal.catch_up():
            raise UnreachableError(str(loop.journal.fault), hint=NO_ROOM_HINT)

    def _token_of(self, task: str) -> str | None:
        header = self._loop.blobs.header("payloads", task)
        return None if header is None else str(header["token"])

    def _unmatched_rules(self, policy: PreemptionPolicy) -> list[str]:
        machine = self._loop.machine
        labels = {key for task in machine.tasks.values() for key, _ in task.spec.labels}
        labels |= {key for pool in machine.pools.values() for key, _ in pool.spec.labels}
        return [
            f"no task or pool has the label {label} yet, which a rule names"
            for label, _ in policy.label_rules
            if label not in labels
        ]


def _version(task: PoolTask) -> tuple[TaskState, int]:
    return task.state, task.attempt


def session_dir(ray: Any) -> Path:
    """Where this Ray cluster keeps its own files on this node: a fresh cluster begins with a fresh journal."""
    return Path(ray._private.worker._global_node.get_session_dir_path())
