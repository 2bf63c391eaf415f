"""The controller actor: RPCs of clients about pools and tasks.

A named, detached, restartable actor on the head node. `ControllerLoop` runs the pool machine behind these RPCs. After a
crash Ray restarts it and it recovers its state from the journal. It never runs user code (worker processes do) and
never waits without a deadline. Clients use `trimtab.runtime.client.session`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.core.codec import encode
from trimtab.core.errors import InputError, UnreachableError, meant
from trimtab.core.reasons import StoryEntry
from trimtab.machines.pool.events import CancelRequested, PolicySet, PoolEnsured, PoolEvent, TaskSubmitted
from trimtab.model.nodes import NodeView
from trimtab.model.pool import ENDED, PoolSpec, PreemptionPolicy, TaskExplanation, TaskSpec, TaskState
from trimtab.runtime.controller.clients import LEASE_S, ClientProcess
from trimtab.runtime.controller.controller_loop import USER_EVENTS, ControllerLoop, log_failure
from trimtab.runtime.controller.rpc import ClientUpdate, ControllerSettings, TaskSnapshot, read_payload, rpc_method
from trimtab.runtime.rayapi.private import session_dir
from trimtab.runtime.store.blobs import NO_ROOM_HINT, header_of

START_RETRY_S = 5.0  # after a failed start
_LARGE = 2**20  # bytes; larger payloads are written in a thread


class Controller:
    """The controller actor. Clients read the result of an RPC with `rpc.value_of`."""

    def __init__(
        self, name: str, journal_dir: str | None, state_dir: str | None, settings: Mapping[str, Any] | None = None
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._name = name
        self._directories = (journal_dir, state_dir)
        self._settings = ControllerSettings(**(settings or {}))
        self._loop: ControllerLoop
        self._started = False
        self._closing = False
        self._begin_start()

    # ---- start ------------------------------------------------------------------------------------------

    def _begin_start(self) -> None:
        self._start_tried_at = time.monotonic()
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._starting.add_done_callback(self._start_done)

    def _start_done(self, start: asyncio.Task[None]) -> None:
        log_failure(start)
        if (
            not start.cancelled() and start.exception() is not None
        ):  # running tasks need the controller even without a client
            asyncio.get_running_loop().call_later(2 * START_RETRY_S, self._retry_start, start)

    def _retry_start(self, failed: asyncio.Task[None]) -> None:
        if self._starting is failed and not self._closing:
            self._begin_start()

    async def _start(self) -> None:
        import ray

        journal_dir, state_dir = self._directories
        directory = Path(journal_dir) if journal_dir else session_dir(ray) / "trimtab" / self._name
        self._loop = ControllerLoop(self._name, directory, state_dir, ray, self._settings)
        await self._loop.start()
        self._started = True

    async def _ready_loop(self, *, again: bool = False) -> ControllerLoop:
        """The loop, once started. After a failed start it is retried, at most every START_RETRY_S unless `again`."""
        if self._closing:
            raise UnreachableError(f"the controller {self._name} is shutting down", hint="connect again for a new one")
        failed = self._starting.done() and not self._started
        if failed and (again or time.monotonic() - self._start_tried_at > START_RETRY_S):
            self._begin_start()
        await asyncio.shield(self._starting)
        return self._loop

    @rpc_method
    async def ready(self, journal_dir: str | None = None, state_dir: str | None = None) -> dict[str, Any]:
        """Wait until the controller has started. After a failed start, retry it with these settings."""
        if self._starting.done() and not self._started:
            self._directories = (journal_dir or self._directories[0], state_dir or self._directories[1])
        loop = await self._ready_loop(again=True)
        for word, wanted, has in (
            ("journal_dir", journal_dir, str(loop.directory)),
            ("state_dir", state_dir, self._directories[1]),
        ):
            if wanted is not None and (has is None or Path(wanted) != Path(has)):
                raise InputError(
                    f"the controller {self._name} runs with {word} {has}, not {wanted}",
                    hint="connect without it, or give this controller another name",
                )
        return {"name": self._name, "journal_dir": str(loop.directory), "notes": list(loop.journal.notes)}

    # ---- requests ---------------------------------------------------------------------------------------------

    @rpc_method
    async def ensure_pool(self, spec: PoolSpec, runtime_env: str = "", paths: Collection[str] = ()) -> None:
        """Create a pool, or accept one with the same settings; keep warm workers for this runtime environment."""
        loop = await self._ready_loop()
        loop.handle(PoolEnsured(spec))
        await loop.environments.set_pool(spec.name, runtime_env, tuple(paths))
        loop.update_warm_workers()
        if spec.client:
            loop.leases.touch(spec.client)

    @rpc_method
    async def set_state_handlers(self, pool: str, handlers: bytes) -> None:
        """Set the pool's functions that save and restore task state; used from the next task start on."""
        loop = await self._ready_loop()
        self._known_pool(pool)
        loop.blobs.put("handlers", pool, handlers)

    @rpc_method
    async def set_policy(self, policy: PreemptionPolicy) -> list[str]:
        """Set the preemption policy; returns warnings."""
        loop = await self._ready_loop()
        loop.handle(PolicySet(policy))
        labels = {key for task in loop.machine.tasks.values() for key, _ in task.spec.labels}
        labels |= {key for pool in loop.machine.pools.values() for key, _ in pool.spec.labels}
        return [
            f"no task or pool has the label {label} yet, which a rule names"
            for label, _ in policy.label_rules
            if label not in labels
        ]

    @rpc_method
    async def submit(self, spec: TaskSpec, payload: bytes) -> TaskSnapshot:
        """Submit a task. Idempotent: a submission that is sent again (its answer was lost) is accepted once."""
        loop = await self._ready_loop()
        header = header_of(payload)
        if spec.id in loop.machine.tasks:
            stored = loop.blobs.header("payloads", spec.id)
            if stored is not None and stored["token"] == header["token"]:
                return self._snapshot(spec.id)
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
        except UnreachableError:  # the task would be lost if this process died
            loop.feed(CancelRequested(spec.id))
            raise
        if len(payload) < _LARGE:
            loop.executor.submitted(spec.id, read_payload(payload, handlers))
        if spec.client:
            loop.leases.touch(spec.client)
        await loop.environments.submitted(spec.id, header["runtime_env"])
        return self._snapshot(spec.id)

    @rpc_method
    async def ask(self, event: PoolEvent) -> None:
        """Apply a user event: cancel, complete, evict, take a turn, drain, drop, cordon."""
        loop = await self._ready_loop()
        if not isinstance(event, USER_EVENTS):
            raise InputError(f"{type(event).__name__} is not a request of a client")
        loop.handle(event)

    @rpc_method
    async def renew(self, client: str, lease_s: float = LEASE_S, process: ClientProcess | None = None) -> bool:
        """Renew a client's lease; false if the lease has ended already."""
        return (await self._ready_loop()).leases.renew(client, lease_s, process)

    @rpc_method
    async def leave(self, client: str) -> None:
        (await self._ready_loop()).end_tasks_of(client)

    @rpc_method
    async def drain_node(self, node: str, deadline_s: float | None, cause: str) -> NodeView:
        """Drain a node by a deadline, in Ray too; `node` is its id, an id prefix, its name or its address."""
        loop = await self._ready_loop()
        found = await loop.node_monitor.drain(node, deadline_s, cause)
        return next(view for view in loop.node_monitor.views(gone=True) if view.node == found)

    @rpc_method
    async def publish(self, kind: str, id: str, facts: dict[str, Any] | None, client: str) -> None:
        """Publish facts about an object of a client for the lifetime of its lease; None removes them."""
        loop = await self._ready_loop()
        loop.leases.touch(client)
        if facts is None:
            loop.client_registry.remove(kind, id)
        else:
            loop.client_registry.put(kind, id, facts, client)
            loop.node_metrics.observe(kind, id, facts)

    @rpc_method
    async def want(self, client: str, bundles: list[dict[str, float]]) -> None:
        """Set the resources that a client could use; the sum over all clients is requested from Ray's autoscaler."""
        loop = await self._ready_loop()
        loop.leases.touch(client)
        loop.client_registry.want(client, bundles)

    @rpc_method
    async def beside(self, task: str, method: str, timeout_s: float) -> tuple[str, str]:
        """Call a method on the control thread of the first worker: (returned|raised|timed out|not called, note)."""
        loop = await self._ready_loop()
        self._known_task(task)
        members = loop.executor.running.get(task, ())
        if not members:
            return "not called", "the task is not running"
        return await loop.workers.call_on_control_thread(members[0], method, timeout_s)

    @rpc_method
    async def shutdown(self, destroy: bool = True, timeout_s: float = 30.0) -> None:
        """Close the journal; with `destroy`, first end all tasks, slots and processes. The caller kills the actor."""
        loop = await self._ready_loop()
        try:
            await loop.close(destroy, timeout_s)
        finally:
            self._closing = True

    # ---- queries --------------------------------------------------------------------------------------------

    @rpc_method
    async def explain(self, task: str) -> TaskExplanation:
        loop = await self._ready_loop()
        self._known_task(task)
        return loop.machine.explain(task, loop.now())

    @rpc_method
    async def node_story(self, node: str) -> tuple[str, tuple[StoryEntry, ...]]:
        """A node's id and story, by id, id prefix or name."""
        loop = await self._ready_loop()
        stories = loop.machine.node_stories
        named = {view.node for view in loop.node_monitor.views(gone=True) if node and node == view.facts.name}
        found = named or {id for id in (*stories, *loop.node_monitor.machine.nodes) if node and id.startswith(node)}
        if len(found) != 1:
            raise InputError(f"{len(found) or 'no'} nodes begin with {node}", hint="`trimtab pool show` lists nodes")
        (id,) = found
        own, of_pools = loop.node_monitor.machine.story(id), stories.get(id, ())
        more = [entry for entry in of_pools if entry.state == "emptied"]  # other entries are in both stories
        return id, tuple(sorted([*own, *more], key=lambda entry: entry.at)) if own else tuple(of_pools)

    @rpc_method
    async def news(self, tasks: dict[str, tuple[TaskState, int]], version: int, timeout_s: float) -> ClientUpdate:
        """Long poll: returns when a task differs from the given state and attempt, the nodes change, or on timeout."""
        loop = await self._ready_loop()
        deadline = time.monotonic() + timeout_s
        while True:
            known = loop.machine.tasks
            changed = [
                id
                for id, before in tasks.items()
                if id in known and (known[id].state, known[id].attempt) != tuple(before)
            ]
            machine, left_s = loop.node_monitor.machine, deadline - time.monotonic()
            if changed or machine.version != version or left_s <= 0 or loop.closing:
                seen = tuple(self._snapshot(id) for id in changed)
                return ClientUpdate(machine.version, loop.node_monitor.views(), machine.last_change, seen)
            await loop.client_registry.wait(left_s)

    @rpc_method
    async def see(self, task: str) -> TaskSnapshot:
        await self._ready_loop()
        return self._snapshot(task)

    @rpc_method
    async def tasks(self, pool: str | None = None) -> list[TaskSnapshot]:
        """Snapshots of all known tasks, or of one pool."""
        loop = await self._ready_loop()
        if pool is not None:
            self._known_pool(pool)
        known = loop.machine.tasks.values()
        return [self._snapshot(task.id, handles=False) for task in known if pool in (None, task.spec.pool)]

    @rpc_method
    async def pool(self, name: str) -> PoolSpec:
        loop = await self._ready_loop()
        self._known_pool(name)
        return loop.machine.pools[name].spec

    @rpc_method
    async def wait(
        self, task: str, states: Collection[TaskState], timeout_s: float, with_result: bool = False
    ) -> TaskSnapshot:
        """Wait until the task is in one of these states, has ended, or the timeout has passed."""
        loop = await self._ready_loop()
        self._known_task(task)
        await loop.wait(task, frozenset(states).union(ENDED), timeout_s)
        seen = self._snapshot(task)
        if with_result and seen.state in ENDED:
            return replace(seen, result=await asyncio.to_thread(loop.blobs.get, "results", task))
        return seen

    @rpc_method
    async def would_evict(self, spec: TaskSpec) -> Any:
        """Dry run: the preemption plan if this task were submitted now."""
        loop = await self._ready_loop()
        return loop.machine.would_evict(spec, loop.now())

    @rpc_method
    async def status(self) -> dict[str, Any]:
        """The state of the controller, as plain data."""
        loop = await self._ready_loop()
        machine, journal = loop.machine, loop.journal
        return {
            "controller": self._name,
            "pid": os.getpid(),
            "time": loop.now(),
            "journal": {"dir": str(loop.directory), "fault": journal.fault, "notes": list(journal.notes)},
            "nodes": [
                {"node": node.node, "total": node.total.floats(), "outside": node.outside.floats()}
                for node in loop.node_monitor.known.values()
            ],
            "fleet": [encode(view) for view in loop.node_monitor.views(gone=True)],
            "groups": [
                {"id": notice.id, "client": notice.client, **notice.facts}
                for notice in loop.client_registry.notices("group")
            ],
            "wanted": loop.client_registry.wanted,
            "desired_workers": loop.desired_workers(),
            "autoscaler": loop.client_registry.fault,
            "ray": loop.node_monitor.fault,
            "pools": {name: encode(machine.pool_view(name)) for name in machine.pools},
            "totals": encode(machine.totals()),
            "tasks": dict(Counter(record.state.value for record in machine.tasks.values())),
            "warm_hosts": loop.workers.warm_counts(),
            "clients": len(loop.leases),
            "silent_clients": loop.leases.status(),
            "background": loop.background.status(),
            "redone": loop.redone,
            "faults": loop.faults[-20:],
            "metrics": loop.pool_metrics.fault,
        }

    # ---- helpers --------------------------------------------------------------------------------------

    def _snapshot(self, task: str, *, handles: bool = True) -> TaskSnapshot:
        self._known_task(task)
        record = self._loop.machine.tasks[task]
        running = record.state in (TaskState.running, TaskState.parked, TaskState.cancelling)
        members = tuple(self._loop.executor.running.get(task, ())) if running else ()
        return TaskSnapshot(
            id=record.id,
            pool=record.spec.pool,
            state=record.state,
            reason=record.reason,
            priority=record.spec.priority,
            labels=record.spec.labels,
            attempt=record.attempt,
            evictions=record.evictions,
            how=record.how,
            members=members,
            handles=tuple(self._loop.workers.known_handle(member) for member in members) if handles else (),
        )

    def _known_task(self, task: str) -> None:
        known = self._loop.machine.tasks
        if task not in known:
            lost = " (history was lost)" if self._loop.journal.notes else ""
            hint = meant(task, known, "`session.tasks()` lists those that are")
            raise InputError(f"no task {task} is known here{lost}", hint=hint)

    def _known_pool(self, pool: str) -> None:
        pools = self._loop.machine.pools
        if pool not in pools:
            raise InputError(f"there is no pool {pool}", hint=f"pools: {', '.join(sorted(pools)) or 'none yet'}")

    def _check_journal(self, loop: ControllerLoop) -> None:
        """Refuse new tasks while the journal cannot be written."""
        if not loop.journal.catch_up():
            raise UnreachableError(str(loop.journal.fault), hint=NO_ROOM_HINT)
