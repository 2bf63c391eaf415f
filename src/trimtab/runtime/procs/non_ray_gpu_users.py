"""Finds processes on this machine that use a GPU and were not started by Ray.

Reads NVIDIA's driver and /proc of this machine only. If the driver is not available, or has other pids (containers),
the file named by TRIMTAB_GPU_PROCESSES is read instead: `[{"gpu": 0, "pid": 4711, "used_bytes": 64e9, "of_bytes":
80e9}]`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.machines.diagnose.snapshot import NonRayGpuUser
from trimtab.runtime.procs import nvml

FILE_VARIABLE = "TRIMTAB_GPU_PROCESSES"
COMMAND_LENGTH = 60
PROC = Path("/proc")


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU of this machine."""

    gpu: int
    pid: int
    used_bytes: int = 0
    of_bytes: int = 0


@dataclass(frozen=True)
class Raylet:
    """A raylet on this machine, and the GPUs it was given."""

    node: str
    pid: int
    gpus: tuple[int, ...] | None  # machine indices in Ray's order; None: all


def find_non_ray_gpu_users(nodes: Mapping[str, int]) -> tuple[NonRayGpuUser, ...]:
    """Processes outside Ray on GPUs of this machine. `nodes`: number of GPUs by alive node."""
    uses = gpu_uses()
    if not uses:
        return ()
    raylets = [raylet for raylet in _raylets() if raylet.node in nodes]
    found = []
    for use in uses:
        if _started_by_ray(use.pid, {raylet.pid for raylet in raylets}):
            continue
        node, index = _owner(use.gpu, raylets, nodes)
        found.append(NonRayGpuUser(node, use.gpu, use.pid, _command(use.pid), use.used_bytes, use.of_bytes, index))
    return tuple(found)


def gpu_uses() -> list[GpuProcess]:
    named = os.environ.get(FILE_VARIABLE)
    return _from_file(Path(named)) if named else _from_driver()


def is_visible(pid: int) -> bool:
    """Whether the pid can be seen from here."""
    return (PROC / str(pid)).exists()


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


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _from_driver() -> list[GpuProcess]:
    driver = nvml.driver()
    devices = ctypes.c_uint()
    if driver is None or driver.nvmlDeviceGetCount_v2(ctypes.byref(devices)):
        return []
    uses = []
    for index in range(devices.value):
        device, count, memory = ctypes.c_void_p(), ctypes.c_uint(nvml.MAX_PROCESSES), _NvmlMemory()
        listed = (nvml.NvmlProcess * nvml.MAX_PROCESSES)()
        if driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) or (
            driver.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), listed)
        ):
            continue
        whole = 0 if driver.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else memory.total
        for process in listed[: count.value]:
            known = process.used_bytes <= whole  # "not available" is the maximum integer
            uses.append(GpuProcess(index, process.pid, process.used_bytes if known else 0, whole))
    return uses


def _owner(gpu: int, raylets: Iterable[Raylet], nodes: Mapping[str, int]) -> tuple[str | None, int | None]:
    """The node that has a GPU of this machine, and Ray's index of it there."""
    for raylet in raylets:
        gpus = raylet.gpus if raylet.gpus is not None else tuple(range(nodes[raylet.node]))
        if gpu in gpus[: nodes[raylet.node]]:
            return raylet.node, gpus.index(gpu)
    return None, None


def _raylets() -> list[Raylet]:
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        words = _words(entry / "cmdline")
        if not words or Path(words[0]).name != "raylet":
            continue
        node = next((word.partition("=")[2] for word in words if word.startswith("--node_id=")), "")
        found.append(Raylet(node, int(entry.name), _visible_gpus(entry)))
    return found


def _visible_gpus(process: Path) -> tuple[int, ...] | None:
    """GPU indices in a process's CUDA_VISIBLE_DEVICES; None if it is unset or not by index."""
    for word in _words(process / "environ"):
        name, _, value = word.partition("=")
        if name == "CUDA_VISIBLE_DEVICES":
            parts = [part.strip() for part in value.split(",") if part.strip()]
            return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None
    return None


def _started_by_ray(pid: int, raylets: set[int]) -> bool:
    """Whether a raylet is an ancestor of the process, by its environment or its parents."""
    for word in _words(PROC / str(pid) / "environ"):
        name, _, value = word.partition("=")
        if name == "RAY_RAYLET_PID" and value.isdecimal() and int(value) in raylets:
            return True
    while pid > 1:
        if pid in raylets:
            return True
        try:
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def _command(pid: int) -> str:
    words = " ".join(_words(PROC / str(pid) / "cmdline"))
    return words if len(words) <= COMMAND_LENGTH else f"{words[: COMMAND_LENGTH - 4]} ..."


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [word for word in path.read_bytes().decode("utf-8", "replace").split("\0") if word]
    return []
