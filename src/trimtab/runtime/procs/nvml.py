"""Which processes hold memory on the GPUs of this node, asked of NVIDIA's driver; none where there is no such driver.

Asked in-process, because starting `nvidia-smi` takes longer than stopping a task. Never raises: not to know is not to
wait. In a container the driver may know processes by other numbers; then none of ours is ever listed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MOST_PROCESSES = 1024


class NvmlProcess(ctypes.Structure):
    """A process, as the driver lists it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def users() -> set[int]:
    """Processes that compute on any GPU here."""
    library = driver()
    if library is None:
        return set()
    found: set[int] = set()
    devices = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(devices)):
        return set()
    for index in range(devices.value):
        device, count = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES)
        listed = (NvmlProcess * MOST_PROCESSES)()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0 and (
            library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), listed) == 0
        ):
            found.update(one.pid for one in listed[: count.value])
    return found


def local_gpu_utilization() -> tuple[float, ...]:
    """The share of the last moment in which each GPU of this machine computed; empty where nobody tells."""
    library = driver()
    count = ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        device, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # of the cores, and of the memory
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) or (
            library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates))
        ):
            return ()
        found.append(rates[0] / 100)
    return tuple(found)


@cache
def driver() -> Any:
    """NVIDIA's management library, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None
