"""Which processes on this machine hold a GPU though Ray did not start them.

Only looks, at NVIDIA's driver and at /proc, and only at this machine: of other machines' GPUs it knows nothing. Where
the driver cannot be asked, or knows processes by other numbers than we do (containers), a file can say who is there,
as JSON: `[{"gpu": 0, "pid": 4711, "used_bytes": 64e9, "of_bytes": 80e9}]`. TRIMTAB_GPU_PROCESSES names it. Called by
`survey.py`.
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
    """A process that computes on a GPU of this machine."""

    gpu: int
    pid: int
    used_bytes: int = 0
    of_bytes: int = 0


@dataclass(frozen=True)
class Raylet:
    """A node of the cluster on this machine: the process that is its heart, and the GPUs that it was given."""

    node: str
    pid: int
    gpus: tuple[int, ...] | None  # of the machine, in Ray's order; None: all of them


def foreign(nodes: Mapping[str, int]) -> tuple[NonRayGpuUser, ...]:
    """Processes outside Ray on GPUs of this machine. `nodes`: the GPUs that each living node of the cluster has."""
    uses = gpu_uses()
    if not uses:
        return ()
    raylets = [one for one in _raylets() if one.node in nodes]
    found = []
    for use in uses:
        if _is_rays(use.pid, {one.pid for one in raylets}):
            continue
        node, place = _whose(use.gpu, raylets, nodes)
        found.append(NonRayGpuUser(node, use.gpu, use.pid, _command(use.pid), use.used_bytes, use.of_bytes, place))
    return tuple(found)


def gpu_uses() -> list[GpuProcess]:
    """Who computes on which GPU here."""
    named = os.environ.get(FILE_VARIABLE)
    return _from_file(Path(named)) if named else _from_driver()


def visible(pid: int) -> bool:
    """Whether a process of that number can be seen from here."""
    return (PROC / str(pid)).exists()


def _from_file(path: Path) -> list[GpuProcess]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [
            GpuProcess(int(one["gpu"]), int(one["pid"]), int(one.get("used_bytes", 0)), int(one.get("of_bytes", 0)))
            for one in listed
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
        device, count, memory = ctypes.c_void_p(), ctypes.c_uint(nvml.MOST_PROCESSES), _NvmlMemory()
        listed = (nvml.NvmlProcess * nvml.MOST_PROCESSES)()
        if driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) or (
            driver.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), listed)
        ):
            continue
        whole = 0 if driver.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else memory.total
        for one in listed[: count.value]:
            known = one.used_bytes <= whole  # "not available" is the greatest number there is
            uses.append(GpuProcess(index, one.pid, one.used_bytes if known else 0, whole))
    return uses


def _whose(gpu: int, raylets: Iterable[Raylet], nodes: Mapping[str, int]) -> tuple[str | None, int | None]:
    """The node that has a GPU of this machine, and Ray's index for it there."""
    for one in raylets:
        gpus = one.gpus if one.gpus is not None else tuple(range(nodes[one.node]))
        if gpu in gpus[: nodes[one.node]]:
            return one.node, gpus.index(gpu)
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
        found.append(Raylet(node, int(entry.name), _given(entry)))
    return found


def _given(process: Path) -> tuple[int, ...] | None:
    """The GPUs that a process may use, where they are told by index."""
    for word in _words(process / "environ"):
        name, _, value = word.partition("=")
        if name == "CUDA_VISIBLE_DEVICES":
            parts = [part.strip() for part in value.split(",") if part.strip()]
            return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None
    return None


def _is_rays(pid: int, raylets: set[int]) -> bool:
    """Whether Ray started a process, or one that started it. One that has left its parent still has the environment."""
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
