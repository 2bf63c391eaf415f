"""Finds processes on this machine that use a GPU and were not started by Ray.

Reads NVIDIA's driver and /proc of this machine only. If the driver is not available, or has other pids (containers),
the file named by TRIMTAB_GPU_PROCESSES is read instead: `[{"gpu": 0, "pid": 4711, "used_bytes": 64e9, "of_bytes":
80e9}]`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.machines.diagnose.snapshot import NonRayGpuUser
from trimtab.runtime.procs.gpus import GpuProcess, gpu_processes
from trimtab.runtime.procs.processes import command, environment, row, table

FILE_VARIABLE = "TRIMTAB_GPU_PROCESSES"
COMMAND_LENGTH = 60


@dataclass(frozen=True)
class Raylet:
    """A raylet on this machine, and the GPUs it was given."""

    node: str
    pid: int
    gpus: tuple[int, ...] | None  # machine indices in Ray's order; None: all


def find_non_ray_gpu_users(nodes: Mapping[str, int]) -> tuple[NonRayGpuUser, ...]:
    """Processes outside Ray on GPUs of this machine. `nodes`: number of GPUs by alive node."""
    named = os.environ.get(FILE_VARIABLE)
    uses = _from_file(Path(named)) if named else gpu_processes()
    if not uses:
        return ()
    raylets = [raylet for raylet in _raylets() if raylet.node in nodes]
    found = []
    for use in uses:
        if _started_by_ray(use.pid, {raylet.pid for raylet in raylets}):
            continue
        node, index = _owner(use.gpu, raylets, nodes)
        used, of = use.used_bytes or 0, use.of_bytes or 0  # 0: unknown
        found.append(NonRayGpuUser(node, use.gpu, use.pid, _command(use.pid), used, of, index))
    return tuple(found)


def _from_file(path: Path) -> list[GpuProcess]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [
            GpuProcess(int(row["gpu"]), int(row["pid"]), int(row.get("used_bytes", 0)), int(row.get("of_bytes", 0)))
            for row in listed
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise InputError(
            f"{FILE_VARIABLE} names no list of processes: {fault}",
            where=str(path),
            hint='[{"gpu": 0, "pid": 4711, "used_bytes": 1000000, "of_bytes": 2000000}]',
        ) from None


def _owner(gpu: int, raylets: Iterable[Raylet], nodes: Mapping[str, int]) -> tuple[str | None, int | None]:
    """The node that has a GPU of this machine, and Ray's index of it there."""
    for raylet in raylets:
        gpus = raylet.gpus if raylet.gpus is not None else tuple(range(nodes[raylet.node]))
        if gpu in gpus[: nodes[raylet.node]]:
            return raylet.node, gpus.index(gpu)
    return None, None


def _raylets() -> list[Raylet]:
    found = []
    for pid in table():
        words = command(pid)
        if words and Path(words[0]).name == "raylet":
            node = next((word.partition("=")[2] for word in words if word.startswith("--node_id=")), "")
            found.append(Raylet(node, pid, _visible_gpus(pid)))
    return found


def _visible_gpus(pid: int) -> tuple[int, ...] | None:
    """GPU indices in a process's CUDA_VISIBLE_DEVICES; None if it is unset or not by index."""
    value = environment(pid).get("CUDA_VISIBLE_DEVICES")
    parts = [part.strip() for part in value.split(",") if part.strip()] if value is not None else ["unset"]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def _started_by_ray(pid: int, raylets: set[int]) -> bool:
    """Whether a raylet is an ancestor of the process, by its environment or its parents."""
    if environment(pid).get("RAY_RAYLET_PID") in {str(raylet) for raylet in raylets}:
        return True
    while pid not in raylets:
        found = row(pid)
        if found is None or found.parent <= 1:
            return False
        pid = found.parent
    return True


def _command(pid: int) -> str:
    words = " ".join(command(pid))
    return words if len(words) <= COMMAND_LENGTH else f"{words[: COMMAND_LENGTH - 4]} ..."
