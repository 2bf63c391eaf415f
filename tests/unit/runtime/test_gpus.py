"""GPUs by NVML: what the driver cannot tell is unknown, never 0 and never an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trimtab.runtime.procs import gpus
from trimtab.runtime.procs.gpus import (
    GpuProcess,
    find_non_ray_gpu_users,
    gpu_names,
    gpu_processes,
    gpu_utilization,
    local_gpus,
    pids_by_gpu,
    used_bytes,
)  # fmt: skip

GIB = 2**30
QUESTIONS: tuple[Callable[[], Any], ...] = (gpu_names, gpu_utilization, gpu_processes, lambda: used_bytes([0]))


class NVMLError(Exception):
    """As in pynvml."""


@dataclass
class Device:
    """A GPU of the fake driver."""

    busy: int = 0
    used: int = 0
    processes: tuple[tuple[int, int | None], ...] = ()
    split: bool | None = None  # by MIG; None: a model without it
    lost: bool = False


class Driver(ModuleType):
    """pynvml, with these GPUs; without any list of them there is no driver."""

    NVMLError = NVMLError

    def __init__(self, devices: Sequence[Device] | None) -> None:
        super().__init__("pynvml")
        self.devices = devices

    def nvmlInit(self) -> None:  # noqa: N802
        if self.devices is None:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices or ())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        if not 0 <= index < self.nvmlDeviceGetCount():
            raise NVMLError("Invalid Argument")
        return (self.devices or ())[index]

    def nvmlDeviceGetName(self, device: Device) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:  # noqa: N802
        if device.split is None:
            raise NVMLError("Not Supported")
        return [int(device.split), int(device.split)]

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:  # noqa: N802
        if device.lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(gpu=device.busy, memory=7)

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:  # noqa: N802
        if device.lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=80 * GIB, used=device.used, free=80 * GIB - device.used)

    def nvmlDeviceGetComputeRunningProcesses(self, device: Device) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in device.processes]


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Makes this a machine with these GPUs (None: without a driver; a module: instead of pynvml)."""

    def make(*devices: Device, driver: bool = True, module: Any = ...) -> None:
        fake = Driver(devices if driver else None) if module is ... else module
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        gpus._nvml.cache_clear()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield make
    gpus._nvml.cache_clear()


def test_gpus_of_this_machine_are_shares_where_there_are_any() -> None:
    assert all(0 <= share <= 1 for share in gpu_utilization() or ())


def test_the_driver_is_asked_for_each_gpu_and_one_that_cannot_tell_is_no_error(machine: Machine) -> None:
    machine(Device(busy=40, used=2 * GIB, processes=((11, GIB), (12, None))), Device(busy=80))
    assert gpu_utilization() == [0.4, 0.8]
    assert used_bytes([0, 1]) == 2 * GIB
    assert used_bytes([1]) == 0
    assert gpu_processes() == [GpuProcess(0, 11, GIB, 80 * GIB), GpuProcess(0, 12, None, 80 * GIB)]
    assert pids_by_gpu() == {"0": [11, 12]}
    assert (local_gpus(None).ids, local_gpus(None).kind) == (("0", "1"), "NVIDIA H200")
    machine(Device(busy=40), Device(lost=True))
    assert (gpu_utilization(), used_bytes([0, 1]), gpu_processes()) == (None, None, None)
    assert used_bytes([0]) == 0


def test_memory_of_gpus_that_are_not_there_is_unknown(machine: Machine) -> None:
    machine(Device(used=GIB))
    assert used_bytes([]) is None
    assert used_bytes([4096]) is None
    assert used_bytes([0, 1]) is None


@pytest.mark.parametrize("ask", QUESTIONS)
def test_without_the_nvml_library_all_is_unknown(machine: Machine, ask: Callable[[], Any]) -> None:
    machine(driver=False)  # as on an AMD machine
    assert ask() is None


@pytest.mark.parametrize("ask", QUESTIONS)
def test_without_the_python_module_all_is_unknown(machine: Machine, ask: Callable[[], Any]) -> None:
    machine(module=None)
    assert ask() is None


def test_figures_of_a_gpu_that_mig_splits_are_unknown_and_it_is_listed(machine: Machine) -> None:
    machine(Device(split=False, busy=50), Device(split=True, used=GIB, processes=((11, GIB),)))
    assert (gpu_utilization(), used_bytes([1]), gpu_processes()) == (None, None, None)
    assert used_bytes([0]) == 0
    assert gpu_names() == ["NVIDIA H200", "NVIDIA H200"]


def test_processes_that_a_container_hides_are_unknown_and_not_none(machine: Machine) -> None:
    machine(Device(used=60 * GIB))
    assert gpu_processes() is None
    assert find_non_ray_gpu_users({"node": 1}) == ()
    machine(Device(used=GIB // 2))  # what the driver itself holds
    assert gpu_processes() == []


def test_a_process_whose_memory_is_not_known_is_a_user_of_the_gpu(machine: Machine) -> None:
    machine(Device(processes=((2**22 + 1, None),)))
    [user] = find_non_ray_gpu_users({})
    assert (user.node, user.gpu, user.pid, user.used_bytes) == (None, 0, 2**22 + 1, 0)
