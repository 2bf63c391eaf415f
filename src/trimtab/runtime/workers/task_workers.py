"""Starts task processes in their slots, reports their deaths, and stops them.

Executes requests of the controller. A start or a placement group that fails leaves nothing behind; when a stop returns,
the process is gone; a death is reported once. User code is never loaded here. All coroutines run on the controller's
event loop, and no slow Ray call blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import CreatePlacementGroup
from trimtab.model.pool import BundlePlacement
from trimtab.runtime.controller import rpc
from trimtab.runtime.procs.background import Background, first_line
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.rayapi.nodes import live_nodes
from trimtab.runtime.workers.environments import WarmWorkerKind, worker_kind
from trimtab.runtime.workers.node_agent import EXIT_WAIT_S, NodeAgents
from trimtab.runtime.workers.placement_groups import (
    FoundPlacementGroup,
    PlacementGroupError,
    PlacementGroups,
    ray_resources,
)
from trimtab.runtime.workers.warm_pool import WarmPool, WarmWorker, WorkerSetupError
from trimtab.runtime.workers.worker_process import WorkerIdentity, WorkerStartSpec, actor_options, end_named

_ANSWER_S = 15.0  # for the answer of a node agent, beyond its own waiting
_END_S = EXIT_WAIT_S + _ANSWER_S
_CAPTURE = "placement_group_capture_child_tasks"


class TaskWorkerManager:
    """All processes of one controller, on all nodes."""

    def __init__(
        self,
        controller: str,
        state_dir: str | None,
        on_death: Callable[[rpc.TaskWorker, str], None],
        background: Background | None = None,
        worker_start_s: float = rpc.ControllerSettings.worker_start_s,
    ) -> None:
        rpc.check_controller_name(controller)
        self.state_dir = state_dir
        self._controller = controller
        self._on_death = on_death
        self.background = background or Background()
        self.agents = NodeAgents(controller, self._died, self.background)
        self._warm_pool = WarmPool(controller, self.agents, self.background, worker_start_s)
        self._placement_groups = PlacementGroups(controller, self.agents.all_gpus)
        self._lost: set[str] = set()  # lost nodes, though Ray may still list them
        self._live: dict[rpc.ProcessKey, rpc.TaskWorker] = {}  # bound to a task; not dead, not being stopped
        self._settled: set[rpc.ProcessKey] = set()  # of those: completely started, so that a death is reported
        self._handles: dict[rpc.ProcessKey, Any] = {}  # of worker processes
        self._entries: dict[rpc.ProcessKey, Any] = {}  # Ray references of entry results of worker processes

    # ---- nodes and warm workers

    async def node_joined(self, node: str, expected: Mapping[WarmWorkerKind, int] | None = None) -> None:
        """Create the node's agent, and adopt warm workers of an earlier controller. UnreachableError on failure.

        `expected` warm workers are started meanwhile, by kind.
        """
        self._lost.discard(node)
        joining = asyncio.ensure_future(self.agents.join(node))
        await asyncio.sleep(0)  # the agents know the node from here on
        self._warm_pool.expect(node, expected or {})
        if await joining:
            await self._warm_pool.adopt(node, await self.agents.request(node, "records", timeout_s=_ANSWER_S))

    async def node_returned(self, node: str) -> None:
        """Create the node's agent again, and end all processes that were given up with the node."""
        self._lost.discard(node)
        await self.agents.join(node)
        await self._clear(node)

    async def node_left(self, node: str) -> None:
        """End all processes of this controller on a node without tasks, so that Ray can remove it."""
        self._warm_pool.lost(node)
        await self._clear(node)
        await self.agents.leave(node)
        self._lost.add(node)

    async def node_lost(self, node: str) -> None:
        """Forget the node and its processes; their deaths are not reported."""
        self._lost.add(node)
        self.agents.lost(node)
        self._warm_pool.lost(node)
        for key in [key for key in self._live if key[0] == node]:
            self._forget(key)

    async def warm(self, targets: Mapping[str, Mapping[WarmWorkerKind, int]]) -> None:
        """Set the number of warm workers by node and kind; started in the background."""
        self._warm_pool.set_targets(targets)

    def warm_counts(self) -> dict[str, dict[str, int]]:
        return self._warm_pool.counts()

    # ---- placement groups

    async def create_group(self, instruction: CreatePlacementGroup, now: Callable[[], float]) -> None:
        """Create the placement group on its nodes; PlacementGroupError on failure."""
        await self._placement_groups.create(instruction, instruction.deadline - now())

    async def remove_group(self, group: str, pool: str) -> None:
        await self._placement_groups.remove(group, pool)

    async def groups(self) -> dict[str, FoundPlacementGroup]:
        return await self._placement_groups.existing()

    # ---- members

    async def start(
        self,
        task: str,
        attempt: int,
        pool: str,
        places: Sequence[BundlePlacement],
        bundles: Sequence[Resources],
        payload: rpc.TaskPayload,
        state: Mapping[int, bytes | str] | None,
        timeout_s: float,
        *,
        preload: tuple[str, ...] = (),
        facts: str = "",
        wide: bool = False,
    ) -> tuple[list[rpc.TaskWorker], str]:
        """Start a worker in each place, and begin the entry once all are constructed; returns them and how.

        `wide`: the group has several bundles, any of which may hold actors that the workers create.
        TaskStartError on failure.
        """
        deadline = time.monotonic() + timeout_s
        taken: list[rpc.TaskWorker] = []
        specs = [
            WorkerStartSpec(
                WorkerIdentity(task, attempt, rank, len(places), pool, places[rank].group, facts, wide),
                (),
                payload.actor,
                payload.entry,
                payload.entry_args,
                payload.handlers,
                (state or {}).get(rank),
                payload.sys_path,
                uuid.uuid4().hex,
            )
            for rank in range(len(places))
        ]
        try:
            members_to_start = zip(specs, places, bundles, strict=True)
            if payload.plain is None:
                kind = worker_kind(preload, payload.runtime_env, payload.sys_path)
                capture = bool(payload.ray_options.get(_CAPTURE, True))
                works = [self._bind_host(*member, kind, capture, taken) for member in members_to_start]
            else:
                works = [self._create_actor(*member, payload, deadline, taken) for member in members_to_start]
            hows = await asyncio.wait_for(_gather_or_cancel(works), timeout_s)
            members = sorted(taken, key=lambda member: member.rank)
            await self._begin(members, payload)
            for member in members:
                if member.key not in self._live:
                    raise rpc.TaskStartError(f"process {member.pid} died while the others were starting", fatal=False)
        except BaseException as fault:
            await asyncio.shield(self._end(taken))
            if isinstance(fault, asyncio.TimeoutError):
                late = f"it was not constructed within {timeout_s:.3g} s"
                raise rpc.TaskStartError(late, fatal=False, timed_out=True) from None
            if isinstance(fault, (UnreachableError, PlacementGroupError, WorkerSetupError)):
                raise rpc.TaskStartError(str(fault), fatal=isinstance(fault, WorkerSetupError)) from None
            raise
        self._settled.update(member.key for member in members)
        return members, "; ".join(sorted(set(hows)))

    async def ready(self, member: rpc.TaskWorker, timeout_s: float) -> bool:
        """Wait until an adopted worker is constructed; false on failure, death or timeout."""
        with contextlib.suppress(UnreachableError):
            request = self.agents.request(
                member.node, "ready", member.pid, member.born, timeout_s, timeout_s=timeout_s + _ANSWER_S
            )
            return bool(await request)
        return False

    async def outcome(self, member: rpc.TaskWorker) -> rpc.EntryOutcome:
        """Wait for the result of the entry method; WorkerDiedError if the process is gone."""
        from ray.exceptions import RayError

        try:
            if member.kind == "host":
                entry = self._entries.get(member.key)
                if entry is None:  # after a recovery
                    handle = await asyncio.to_thread(self.handle, member)
                    entry = self._entries[member.key] = handle.run_entry.options(name=f"{member.task}.entry").remote()
                return rpc.EntryOutcome(*await entry)
            await self._begin_entry(member)
            found = await self.agents.request(member.node, "outcome", member.pid, member.born, timeout_s=float("inf"))
        except (RayError, UnreachableError, ValueError) as fault:
            raise rpc.WorkerDiedError(f"process {member.pid} of {member.task} is gone: {first_line(fault)}") from None
        if found is None:
            raise rpc.WorkerDiedError(f"process {member.pid} of {member.task} is gone")
        return rpc.EntryOutcome(*found)

    async def stop(
        self,
        member: rpc.TaskWorker,
        cancel_grace_s: float,
        notice: bool,
        checkpoint_timeout_s: float,
        state_path: str | None,
    ) -> rpc.WorkerStopResult:
        """Cancel, save and end a worker. On return the process is gone, whatever happened.

        UnreachableError only if its node is present but its agent does not answer.
        """
        self._forget(member.key)
        keep_as = rpc.saved_state_name(member)
        try:
            answer = await self.agents.request(
                member.node, "stop", member.pid, member.born,
                cancel_grace_s, notice, checkpoint_timeout_s, state_path, keep_as,
                timeout_s=max(0.0, cancel_grace_s) + max(0.0, checkpoint_timeout_s) + _END_S,
            )  # fmt: skip
        except UnreachableError as fault:
            if member.node not in self.agents.nodes:
                return rpc.WorkerStopResult("not called", note=fault.what)
            await self.agents.renew(member.node)  # it hangs
            answer = await self.agents.request(
                member.node, "stop", member.pid, member.born, 0.0, False, 0.0, None, keep_as, timeout_s=2 * _END_S
            )
            return replace(rpc.WorkerStopResult(*answer), note=fault.what)
        await self._end_elsewhere([member])
        return rpc.WorkerStopResult(*answer)

    async def saved_states(self) -> dict[str, str]:
        """Saved states that no controller has acknowledged: by name, the node that keeps it."""
        kept: dict[str, str] = {}
        for node in self.agents.nodes:
            with contextlib.suppress(UnreachableError):
                kept |= dict.fromkeys(await self.agents.request(node, "saved_states", timeout_s=_ANSWER_S), node)
        return kept

    async def saved_state(self, node: str, name: str, timeout_s: float) -> bytes | None:
        """A saved state; UnreachableError if its node does not answer."""
        state: bytes | None = await self.agents.request(node, "saved_state", name, timeout_s=timeout_s)
        return state

    async def drop_saved_state(self, node: str, name: str) -> None:
        with contextlib.suppress(UnreachableError):
            await self.agents.request(node, "drop", name, timeout_s=_ANSWER_S)

    async def park(self, member: rpc.TaskWorker, timeout_s: float) -> None:
        """Have it release its devices."""
        await self._call_hook(member, "park", timeout_s)

    async def unpark(self, member: rpc.TaskWorker, timeout_s: float) -> None:
        """Have it acquire its devices again."""
        await self._call_hook(member, "unpark", timeout_s)

    async def call_on_control_thread(self, member: rpc.TaskWorker, method: str, timeout_s: float) -> tuple[str, str]:
        """Call a method on the control thread: (returned|raised|timed out|not called, note)."""
        try:
            word, note = await self.agents.request(
                member.node, "call_hook", member.pid, member.born, method, timeout_s, timeout_s=timeout_s + _ANSWER_S
            )
        except UnreachableError as fault:
            return "timed out", fault.what
        return str(word), str(note)

    def handle(self, member: rpc.TaskWorker) -> Any:
        """Ray handle of a worker process: `handle.call.remote(method, ...)`. Plain actors are looked up by name."""
        import ray

        if member.key not in self._handles:
            self._handles[member.key] = ray.get_actor(member.actor, member.namespace)
        return self._handles[member.key]

    def known_handle(self, member: rpc.TaskWorker) -> Any:
        return self._handles.get(member.key)

    # ---- recovery and shutdown

    async def existing(self) -> list[rpc.TaskWorker]:
        return list(await self.identities())

    async def identities(self) -> dict[rpc.TaskWorker, WorkerIdentity]:
        """All alive workers, with their identities."""
        await self._join_all()
        found = {}
        for node in self.agents.nodes:
            for record in await self._records(node):
                if record["kind"] != "creating" and record.get("identity"):
                    found[rpc.TaskWorker.from_record(record)] = WorkerIdentity(**record["identity"])
        return found

    async def sweep(self, keep: Collection[rpc.TaskWorker]) -> int:
        """End all workers but those to keep, and watch these; the death of one is reported."""
        await self._join_all()
        keys = {member.key for member in keep} | set(self._live)
        ends = []
        for node in self.agents.nodes:
            for record in await self._records(node):
                if record["kind"] == "creating":
                    ends.append(self._end_created(node, record))
                elif "pid" in record and "identity" not in record:  # of a trimtab of before
                    ends.append(self._end_process(node, record["pid"], record["born"]))
                elif record.get("identity") and rpc.TaskWorker.from_record(record).key not in keys:
                    ends.append(self._end([rpc.TaskWorker.from_record(record)]))
        await asyncio.gather(*ends)
        for member in keep:
            if member.key not in self._live:
                self._live[member.key] = member
                self._settled.add(member.key)
                with contextlib.suppress(UnreachableError):
                    await self.agents.watch(member.node, member.pid, member.born)
        return len(ends)

    async def close(self) -> None:
        """End all processes and placement groups of this controller."""
        await self._join_all()
        await self._warm_pool.close()
        self._live.clear()
        self._settled.clear()
        await asyncio.gather(*(self._clear(node) for node in self.agents.nodes))
        groups = await self.groups()
        await asyncio.gather(*(self.remove_group(pg.group, pg.pool) for pg in groups.values()))
        await self.agents.close()
        await asyncio.to_thread(_end_by_prefix, f"trimtab:{self._controller}:host:")

    # ---- the steps of a start

    async def _bind_host(
        self,
        spec: WorkerStartSpec,
        place: BundlePlacement,
        bundle: Resources,
        kind: WarmWorkerKind,
        capture: bool,
        taken: list[rpc.TaskWorker],
    ) -> str:
        from ray.exceptions import RayError

        identity = spec.identity
        async with self._warm_pool.take(place.node, kind) as (host, ahead):
            member = rpc.TaskWorker(
                identity.task, identity.attempt, identity.rank, identity.world, "host", host.actor, NAMESPACE,
                host.node, host.pid, host.born, spec.mark, identity.wide,
            )  # fmt: skip
            taken.append(member)
            self._live[member.key] = member
            self._handles[member.key] = host.handle
            devices = await self._placement_groups.devices(place, identity.pool, bundle)
            slot = await self._placement_groups.view(place, identity.pool, bundle, identity.world, capture)
            try:
                bind = host.handle.bind.options(name=f"{identity.task}.start")
                fault = await bind.remote(replace(spec, devices=devices, slot=slot))
            except RayError as died:
                raise rpc.TaskStartError(
                    f"its process died while it was constructed: {first_line(died)}", fatal=False
                ) from None
        if fault is not None:
            why, trace = fault
            raise rpc.TaskStartError(why, fatal=True, trace=trace)
        return "a warm host" if ahead else "a host started for it: none was warm"

    async def _create_actor(
        self,
        spec: WorkerStartSpec,
        place: BundlePlacement,
        bundle: Resources,
        payload: rpc.TaskPayload,
        deadline: float,
        taken: list[rpc.TaskWorker],
    ) -> str:
        from ray.exceptions import RayError

        identity, user_options = spec.identity, payload.ray_options
        name, namespace = user_options.get("name"), payload.namespace
        if name is None:
            name, namespace = f"trimtab:{self._controller}:actor:{uuid.uuid4().hex[:8]}", NAMESPACE
        elif identity.world > 1:
            name = f"{name}.{identity.rank}"
        amounts = ray_resources(bundle)
        cpus, gpus = amounts.pop("CPU", 0), amounts.pop("GPU", 0)
        leaves_room = "num_cpus" in user_options or "num_gpus" in user_options
        options = {
            **actor_options(user_options, identity, payload.runtime_env, spec.mark),
            "num_cpus": min(user_options.get("num_cpus", cpus), cpus),
            "num_gpus": min(user_options.get("num_gpus", gpus), gpus),
            "memory": amounts.pop("memory", None),
            "resources": amounts,
            "lifetime": "detached",
            "max_restarts": 0,
            "scheduling_strategy": await self._placement_groups.strategy(
                place, identity.pool, bool(user_options.get(_CAPTURE, leaves_room))
            ),
        }
        facts = None
        async with self._warm_pool.take(place.node, WarmWorkerKind((), payload.runtime_env)) as (creator, _):
            left = deadline - time.monotonic()
            create = creator.handle.create_actor.options(name=f"{identity.task}.make")
            try:
                facts, why, fatal, trace = await create.remote(
                    self._controller, place.node, spec, name, namespace or NAMESPACE, options, left
                )
            except RayError as died:
                raise rpc.TaskStartError(
                    f"its process died while it was created: {first_line(died)}", fatal=False
                ) from None
            finally:
                await asyncio.shield(self._end_creator(creator, None if facts else identity))
        if facts is None:
            timed_out = not fatal and time.monotonic() >= deadline
            raise rpc.TaskStartError(why, fatal=fatal, timed_out=timed_out, trace=trace)
        member = rpc.TaskWorker.from_record({**facts, "identity": vars(identity)})
        taken.append(member)
        self._live[member.key] = member
        await self.agents.watch(member.node, member.pid, member.born)
        return f"a plain Ray actor: {payload.plain}"

    async def _begin(self, members: Sequence[rpc.TaskWorker], payload: rpc.TaskPayload) -> None:
        """Let the entry methods run: all members are constructed."""
        if payload.entry is None:
            return
        for member in members:
            if member.kind == "host":
                name = f"{member.task}.{payload.entry}"
                self._entries[member.key] = self._handles[member.key].run_entry.options(name=name).remote()
            else:
                await self._begin_entry(member)

    async def _begin_entry(self, member: rpc.TaskWorker) -> None:
        await self.agents.request(member.node, "begin", member.pid, member.born, _ANSWER_S, timeout_s=2 * _ANSWER_S)

    # ---- ends

    def _died(self, node: str, pid: int, born: float) -> None:
        key = (node, pid, born)
        member, settled = self._live.get(key), key in self._settled
        self._forget(key)
        if member is None:
            self._warm_pool.died(node, pid, born)
        elif settled:
            self._on_death(member, f"process {pid} on node {node[:12]} died")

    def _forget(self, key: rpc.ProcessKey) -> None:
        self.agents.unwatch(*key)
        self._live.pop(key, None)
        self._settled.discard(key)
        self._handles.pop(key, None)
        self._entries.pop(key, None)

    async def _end(self, members: Sequence[rpc.TaskWorker]) -> None:
        for member in members:
            self._forget(member.key)
        await asyncio.gather(*(self._end_process(*member.key) for member in members))
        await self._end_elsewhere(members)

    async def _end_elsewhere(self, members: Sequence[rpc.TaskWorker]) -> None:
        """End what these workers started in bundles on other nodes."""

        async def end(node: str, mark: str) -> None:
            with contextlib.suppress(UnreachableError):
                await self.agents.request(node, "end_marked", mark, timeout_s=_END_S)

        wide = [member for member in members if member.wide]
        others = [(node, member.mark) for member in wide for node in self.agents.nodes if node != member.node]
        await asyncio.gather(*(end(*other) for other in others))

    async def _end_process(self, node: str, pid: int, born: float) -> None:
        with contextlib.suppress(UnreachableError):
            await self.agents.request(node, "end", pid, born, timeout_s=_END_S)

    async def _clear(self, node: str) -> None:
        """End every process of this controller on a node."""
        for record in await self._records(node):
            if record["kind"] == "creating":
                await self._end_created(node, record)
        left = [record for record in await self._records(node) if "pid" in record]
        await asyncio.gather(*(self._end_process(node, record["pid"], record["born"]) for record in left))

    async def _end_created(self, node: str, record: dict[str, Any]) -> None:
        """End an actor whose creation was in progress when its controller was lost."""
        import ray

        await self._end_process(node, *record["creator"])
        ender = ray.remote(max_calls=1)(end_named).options(num_cpus=0)
        await ender.remote(record["actor"], record["namespace"])
        with contextlib.suppress(UnreachableError):
            await self.agents.request(node, "drop", record["file"], timeout_s=_ANSWER_S)

    async def _end_creator(self, creator: WarmWorker, failed: WorkerIdentity | None) -> None:
        """End the process that created an actor, and the actor itself if `failed` is its identity."""
        self.agents.unwatch(creator.node, creator.pid, creator.born)
        await self._end_process(creator.node, creator.pid, creator.born)
        for record in await self._records(creator.node) if failed else ():
            if record.get("identity") == vars(failed):
                made = record["kind"] != "creating"
                await (
                    self._end([rpc.TaskWorker.from_record(record)]) if made else self._end_created(creator.node, record)
                )

    async def _call_hook(self, member: rpc.TaskWorker, do: str, timeout_s: float) -> None:
        word, note = await self.call_on_control_thread(member, do, timeout_s)
        if word != "returned":
            raise rpc.ParkError(f"{do}() {word}: {note}" if note else f"{do}() {word}")

    async def _join_all(self) -> None:
        import ray

        nodes = await asyncio.to_thread(live_nodes, ray)
        alive = [node.node_id for node in nodes if node.node_id not in self._lost]
        joins = [self.agents.join(node) for node in alive]
        for joined in await asyncio.gather(*joins, return_exceptions=True):
            if isinstance(joined, BaseException) and not isinstance(joined, UnreachableError):
                raise joined  # an unreachable node is lost, or will be

    async def _records(self, node: str) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = await self.agents.request(node, "records", timeout_s=_ANSWER_S)
        except UnreachableError:
            return []
        return found


async def _gather_or_cancel(works: list[Coroutine[Any, Any, str]]) -> list[str]:
    """Gather; when one fails, the others are cancelled before the exception is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_by_prefix(prefix: str) -> None:
    """End worker processes that were still starting, unknown to any agent."""
    import ray

    for known in ray.util.list_named_actors(all_namespaces=True):
        if known["namespace"] == NAMESPACE and known["name"].startswith(prefix):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(known["name"], NAMESPACE))
