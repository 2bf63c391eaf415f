"""Adds engines to a rollout pool: as local processes, or on slots of a pool of a Ray cluster.

Both add startable workers, which the rollout pool starts and stops on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError
from trimtab.model.rollout import WorkerSpec
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.rollout.launch.demand import DemandWatch
from trimtab.runtime.rollout.launch.engines_per_node import EnginesPerNode, slot_worker
from trimtab.runtime.rollout.launch.launcher import EngineCommand, LauncherCallbacks
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.launch.slots import SlotLauncher


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
