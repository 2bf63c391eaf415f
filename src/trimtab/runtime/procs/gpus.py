"""GPUs of this machine as NVIDIA's driver reports them, by index, through NVML.

In-process, because starting `nvidia-smi` takes longer than stopping a task. Nothing here raises. None is "unknown": no
NVML (no NVIDIA driver, an AMD machine), a GPU split by MIG (its figures are not those of a slice), a lost GPU, or a
container that hides processes. Unknown is never 0 and never empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

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
