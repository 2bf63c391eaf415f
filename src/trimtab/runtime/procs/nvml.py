"""GPU processes and utilization of this node, from NVIDIA's driver; empty without a driver.

In-process, because starting `nvidia-smi` takes longer than stopping a task. Never raises. In a container the driver may
report other pids; then none of ours is ever listed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MAX_PROCESSES = 1024


class NvmlProcess(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def gpu_pids() -> set[int]:
    """Pids of processes on any GPU here."""
    library = driver()
    if library is None:
        return set()
    found: set[int] = set()
    devices = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(devices)):
        return set()
    for index in range(devices.value):
        device, count = ctypes.c_void_p(), ctypes.c_uint(MAX_PROCESSES)
        listed = (NvmlProcess * MAX_PROCESSES)()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0 and (
            library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), listed) == 0
        ):
            found.update(process.pid for process in listed[: count.value])
    return found


def local_gpu_utilization() -> tuple[float, ...]:
    """Utilization of each GPU of this machine, 0 to 1; empty if unknown."""
    library = driver()
    count = ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        device, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # cores, memory
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) or (
            library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates))
        ):
            return ()
        found.append(rates[0] / 100)
    return tuple(found)


@cache
def driver() -> Any:
    """The initialised NVML library; None without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None
