"""GPUs of this machine as NVIDIA's driver reports them, by index, through NVML.

In-process, because starting `nvidia-smi` takes longer than stopping a task. Nothing here raises. None is "unknown": no
NVML (no NVIDIA driver, an AMD machine), a GPU split by MIG (its figures are not those of a slice), a lost GPU, or a
container that hides processes. Unknown is never 0 and never empty. Ids of GPUs for nodes are in the form of
CUDA_VISIBLE_DEVICES, which limits them; their use is recorded in the ledger of `localcluster`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trimtab.core.errors import InputError

MAX_FAKE_GPUS = 32
IDLE_BYTES = 2**30  # more in use on a GPU without a process: its processes are hidden from this container
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU of this machine. In a container the pid may be one of the host."""

    gpu: int
    pid: int
    used_bytes: int | None = None
    of_bytes: int | None = None


def gpu_names() -> list[str] | None:
    """Models of the GPUs."""
    return _each(lambda nvml, device: str(nvml.nvmlDeviceGetName(device)), whole=False)


def gpu_utilization() -> list[float] | None:
    """Recent utilization of each GPU, 0 to 1."""
    return _each(lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)


def used_bytes(gpus: Sequence[int]) -> int | None:
    """Memory in use on these GPUs together; unknown if one of them is not there."""
    used = _each(lambda nvml, device: int(nvml.nvmlDeviceGetMemoryInfo(device).used), gpus)
    return sum(used) if used else None


def gpu_processes() -> list[GpuProcess] | None:
    """Processes that compute on any GPU."""
    numbered = _each(_processes)
    if numbered is None or None in numbered:
        return None
    return [
        GpuProcess(gpu, process.pid, process.usedGpuMemory, memory.total)
        for gpu, (listed, memory) in enumerate(each for each in numbered if each is not None)
        for process in listed
    ]


# ---- for nodes of this machine ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalGpus:
    """The GPUs that nodes may get, in order."""

    ids: tuple[str, ...]
    fake: bool = False
    kind: str = ""

    def named(self) -> str:
        """`4 GPUs (0-3)`."""
        if not self.ids:
            return "no GPU"
        what = "faked GPU" if self.fake else "GPU"
        return f"{len(self.ids)} {what}{'s' if len(self.ids) > 1 else ''} ({ids_text(self.ids)})"


def local_gpus(fake: int | None) -> LocalGpus:
    """The GPUs here, or `fake` fake ones."""
    if fake is not None:
        if not 0 <= fake <= MAX_FAKE_GPUS:
            raise InputError(
                f"{fake} GPUs cannot be faked", where="command line: --fake-gpus", hint=f"0 to {MAX_FAKE_GPUS}"
            )
        return LocalGpus(tuple(str(number) for number in range(fake)), fake=True)
    names = gpu_names()
    found = LocalGpus(tuple(map(str, range(len(names)))), kind=names[0]) if names else _devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = [word.strip() for word in visible.split(",") if word.strip()]
    return LocalGpus(tuple(word for word in named if not word.isdecimal() or word in found.ids), kind=found.kind)


def ids_text(ids: tuple[str, ...]) -> str:
    """`0-3` for consecutive numbers, else all of them."""
    if len(ids) > 2 and all(gpu.isdecimal() for gpu in ids):
        numbers = [int(gpu) for gpu in ids]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(ids)


def pids_by_gpu() -> dict[str, list[int]]:
    """Processes on each GPU by index, as far as the driver reports them."""
    found: dict[str, list[int]] = {}
    for process in gpu_processes() or ():
        found.setdefault(str(process.gpu), []).append(process.pid)
    return found


def _devices() -> LocalGpus:
    """Without NVML: the driver's devices."""
    found = [int(match[1]) for dev in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", dev.name))]
    return LocalGpus(tuple(str(number) for number in sorted(found)))


# ---- the driver ------------------------------------------------------------------------------------------------------


def _processes(nvml: Any, device: Any) -> tuple[list[Any], Any] | None:
    listed, memory = nvml.nvmlDeviceGetComputeRunningProcesses(device), nvml.nvmlDeviceGetMemoryInfo(device)
    return (listed, memory) if listed or memory.used <= IDLE_BYTES else None


def _each(
    read: Callable[[Any, Any], Answer], gpus: Sequence[int] | None = None, *, whole: bool = True
) -> list[Answer] | None:
    """What `read` says of these GPUs (all), if it can be said of each; with `whole` of none that MIG splits."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        count = nvml.nvmlDeviceGetCount()
        devices = [nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in (range(count) if gpus is None else gpus)]
        if whole and any(_is_split(nvml, device) for device in devices):
            return None
        return [read(nvml, device) for device in devices]
    except nvml.NVMLError:
        return None


def _is_split(nvml: Any, device: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(device)[0])
    except nvml.NVMLError:  # a model without MIG
        return False


@cache
def _nvml() -> Any:
    """The initialised library; None without one."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
