"""GPUs of this machine for nodes: real ones, queried from NVIDIA's driver, or fake ones.

CUDA_VISIBLE_DEVICES of the caller limits them. Ids are in the form of that variable. Their use is recorded in the
ledger.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.runtime.procs.gpus import gpu_names, gpu_processes

MAX_FAKE_GPUS = 32


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
