"""GPUs of this machine as NVIDIA's driver reports them, by index, through NVML.

In-process, because starting `nvidia-smi` takes longer than stopping a task. Nothing here raises. None is "unknown": no
NVML (no NVIDIA driver, an AMD machine), a GPU split by MIG (its figures are not those of a slice), a lost GPU, or a
container that hides processes. Unknown is never 0 and never empty. Ids of GPUs for nodes are in the form of
CUDA_VISIBLE_DEVICES, which limits them; their use is recorded in the ledger of `localcluster`.

Processes that use a GPU and were not started by Ray are found here too. If the driver is not available, or has other
pids (containers), the file named by TRIMTAB_GPU_PROCESSES is read instead: `[{"gpu": 0, "pid": 4711, "used_bytes":
64e9, "of_bytes": 80e9}]`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.machines.diagnose.snapshot import NonRayGpuUser
from trimtab.runtime.procs.processes import command, environment, row, table

MAX_FAKE_GPUS = 32
IDLE_BYTES = 2**30  # more in use on a GPU without a process: its processes are hidden from this container
Answer = TypeVar("Answer")


class GpuProcess(Frozen):
    """A process on a GPU of this machine. In a container the pid may be one of the host."""

    gpu: int
    pid: int
    used_bytes: int | None = None
    of_bytes: int | None = None


def gpu_names() -> list[str] | None:
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


class LocalGpus(Frozen):
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


FILE_VARIABLE = "TRIMTAB_GPU_PROCESSES"
COMMAND_LENGTH = 60


class Raylet(Frozen):
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
