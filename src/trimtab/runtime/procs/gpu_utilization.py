"""How busy the GPUs of this machine are, asked of NVIDIA's driver in this process. Never raises; only looks."""

from __future__ import annotations

import ctypes

from trimtab.runtime.procs.nvml import driver


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
