"""Adds engines to a rollout pool: as local processes, or on slots of a pool of a Ray cluster.

Both add startable workers, which the rollout pool starts and stops on demand. Their number on slots may follow the
nodes of the cluster, and tasks that wait for slots are reported to the rollout pool.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import Resources
from trimtab.machines.rollout.policies.load import Taker
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.pool import TaskExplanation
from trimtab.model.rollout import WorkerSpec, WorkerState
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.rollout.launch.launcher import EngineCommand, LauncherCallbacks
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.launch.slots import SlotLauncher

log = logging.getLogger("trimtab.rollout")

INTERVAL_S = 1.0
MAX_WAITERS = 32  # explained at each check, in queue order

MakeSpec = Callable[[str], WorkerSpec]


def engines_as_processes(
    pool: LauncherCallbacks,
    command: EngineCommand,
    workers: int,
    *,
    name: str = "engine",
    limit: int = 64,
    **settings: Any,
) -> ProcessLauncher:
    """Adds `workers` local processes. Further settings are those of `ProcessLauncher`."""
    _checked(workers)
    launcher = ProcessLauncher(pool, command, **settings)
    # An engine that cannot sleep is stopped when it is not needed.
    sleeps = command.kind in ("vllm", "sglang")
    for number in range(1, workers + 1):
        # Answers come in pieces: after a pause, which weights made the tokens still to arrive would be unknown.
        spec = WorkerSpec(f"{name}-{number}", limit=limit, startable=True, can_sleep=sleeps)
        pool.add_startable(spec, launcher)
    return launcher


def engines_on_slots(
    pool: LauncherCallbacks,
    session: Session,
    slots: Pool | str,
    command: EngineCommand,
    *,
    resources: Mapping[str, float],
    workers: int | None = None,
    min_workers: int = 0,
    max_workers: int = 64,
    per_node: int | None = None,
    name: str = "engine",
    limit: int = 64,
    size: int = 1,
    lends: bool = True,
    use_s: float = 600.0,
    **settings: Any,
) -> SlotLauncher:
    """Adds workers on slots of the pool `slots`: `workers` of them, or as many as fit on the nodes.

    `lends`: tasks that wait for resources held by engines are reported to the rollout pool's scaling, with `use_s` as
    the duration of those without an estimate. Further settings are those of `SlotLauncher`.
    """
    launcher = SlotLauncher(pool, session, slots, command, resources=resources, **settings)

    def spec(worker: str) -> WorkerSpec:
        return slot_worker(worker, limit=limit, size=size)

    if workers is None:
        follower = EnginesPerNode(
            launcher, min_workers=min_workers, max_workers=max_workers, per_node=per_node, name=name, spec=spec
        )
        launcher.on_nodes.append(follower.update)
    else:
        _checked(workers)
        for number in range(1, workers + 1):
            pool.add_startable(spec(f"{name}-{number}"), launcher)
    launcher.listen()
    if lends:
        launcher.add_loop(DemandWatch(launcher, use_s).watch_demand)
    return launcher


def _checked(workers: int) -> None:
    if workers < 1:
        raise InputError(f"{workers} workers", where="engines to start", hint="at least 1")


def slot_worker(worker: str, **settings: object) -> WorkerSpec:
    """A worker on a slot: stopped instead of put to sleep, because a sleeping engine would keep its slot."""
    return WorkerSpec(worker, startable=True, can_sleep=False, **settings)  # type: ignore[arg-type]


def engines_that_fit(node: NodeView, unit: Resources, per_node: int | None = None) -> int:
    """Number of engines, or parts of engines, that fit on a node, beside what is used outside trimtab."""
    if node.state not in (NodeState.ready, NodeState.suspect) or not node.announced:
        return 0  # a suspect node keeps its workers
    free = node.facts.total.minus(node.outside)
    fit = min((free.get(name) // units for name, units in unit), default=0)
    return fit if per_node is None else min(fit, per_node)


def engines_over(parts: Sequence[int], nodes: int) -> int:
    """Number of engines that have a part on each of `nodes` nodes, if so many parts fit on each node there is."""
    engines = sum(parts) // nodes
    while sum(min(fit, engines) for fit in parts) < engines * nodes:
        engines -= 1
    return engines


class EnginesPerNode:
    """As many workers as engines fit on the nodes, within `min_workers` and `max_workers`.

    A joining node adds workers, which are started on demand; a draining or lost node removes as many, its own first.
    How many of them serve is decided by the pool. What must never happen: a worker that serves on a staying node is
    removed while a worker without a node could be removed instead.
    """

    def __init__(
        self,
        launcher: SlotLauncher,
        *,
        min_workers: int = 0,
        max_workers: int = 64,
        per_node: int | None = None,
        name: str = "engine",
        spec: MakeSpec = slot_worker,
    ) -> None:
        if not 0 <= min_workers <= max_workers or (per_node is not None and per_node < 1):
            raise InputError(
                f"min_workers {min_workers}, max_workers {max_workers}, per_node {per_node}", where="engines per node",
                hint="0 <= min_workers <= max_workers, and per_node at least 1",
            )  # fmt: skip
        self._launcher = launcher
        self._min_workers, self._max_workers, self._per_node = min_workers, max_workers, per_node
        self._name, self._spec = name, spec
        self._numbers = itertools.count(1)
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self.workers: list[str] = []

    def update(self, nodes: Iterable[NodeView]) -> None:
        """Adds or removes workers for these nodes."""
        by_name = {node.node: node for node in nodes}
        parts = [engines_that_fit(node, self._launcher.unit, self._per_node) for node in by_name.values()]
        fit = engines_over(parts, self._launcher.nodes)
        wanted = max(self._min_workers, min(self._max_workers, fit))
        while len(self.workers) < wanted:
            worker = f"{self._name}-{next(self._numbers)}"
            self._launcher.pool.add_startable(self._spec(worker), self._launcher)
            self.workers.append(worker)
        surplus = len(self.workers) - wanted
        if surplus > 0:
            for worker in sorted(self.workers, key=lambda worker: self._removal_rank(worker, by_name))[:surplus]:
                self._remove(worker)

    def _removal_rank(self, worker: str, nodes: dict[str, NodeView]) -> int:
        """Removed first: workers of which a node leaves or is gone, then those without a node."""
        slot = self._launcher.worker_slots.get(worker)
        if slot is None or not slot.nodes:
            return 1
        ready = all(name in nodes and nodes[name].state is NodeState.ready for name in slot.nodes)
        return 2 if ready and not slot.node_leaving else 0

    def _remove(self, worker: str) -> None:
        self.workers.remove(worker)

        async def go() -> None:
            try:
                await self._launcher.pool.remove(worker, why="there are fewer nodes")
            except TrimtabError as fault:
                log.warning("%s was not removed: %s", worker, fault.what)
            finally:
                del self._leaving[worker]

        self._leaving[worker] = self._launcher.background.once(f"remove {worker}", go())


class DemandWatch:
    """Reports tasks that wait for resources held by rollout engines, so that the rollout pool may give up engines.

    A waiting task counts if only rollout engines would have to end for it to start. Tasks that may evict by priority do
    so themselves and do not count. Engines that are already draining are subtracted: otherwise more would be given up
    than needed.
    """

    def __init__(self, launcher: SlotLauncher, use_s: float = 600.0, every_s: float = INTERVAL_S) -> None:
        if not use_s > 0 or not every_s > 0:
            raise InputError(f"use_s {use_s:g}, every_s {every_s:g}", where="takers", hint="above 0 seconds")
        self._launcher = launcher
        self._use_s, self._every_s = use_s, every_s
        self._reported: tuple[Taker, ...] = ()

    async def watch_demand(self) -> None:
        while True:
            try:
                found = await self.find()
                if found != self._reported:
                    self._reported = found
                    self._launcher.pool.takers(found)
            except TrimtabError as fault:
                log.warning("demand for slots could not be read: %s", fault.what)
            await asyncio.sleep(self._every_s)

    async def find(self) -> tuple[Taker, ...]:
        """Tasks that could use workers now, and how many workers each."""
        launcher = self._launcher
        own = {slot.member.task.id for slot in launcher.worker_slots.values()}
        held = {slot.member.task.id for slot in launcher.worker_slots.values() if slot.up}
        pools = (await launcher.ask("status"))["pools"].values()
        waiting = [task for pool in pools for task in pool["queue"] if task not in own]
        leaving = self._leaving()
        takers = []
        for task in waiting[:MAX_WAITERS] if held else ():
            explanation: TaskExplanation = await launcher.ask("explain", task)
            wanted = self._wanted(explanation, held)
            subtracted = min(wanted, leaving)
            leaving -= subtracted
            if wanted > subtracted:
                use_s = getattr(explanation, "estimate_s", 0.0) or self._use_s
                takers.append(Taker(task, wanted - subtracted, use_s))
        return tuple(takers)

    def _wanted(self, explanation: TaskExplanation, held: set[str]) -> int:
        """Number of workers that would have to leave; 0 if that would not help, or they are leaving already."""
        needs = set(explanation.needs)
        if explanation.reason.code is ReasonCode.evicting or not needs <= held:
            return 0
        return len(needs)

    def _leaving(self) -> int:
        """Workers that are giving up their slots, except those evicted by the slots' pool."""
        slots = self._launcher.worker_slots
        draining = (view.worker for view in self._launcher.pool.workers() if view.state is WorkerState.draining)
        return sum(worker in slots and not slots[worker].taken for worker in draining)
