"""GPUs of this machine for nodes: real ones, queried from NVIDIA's driver, or fake ones.

CUDA_VISIBLE_DEVICES of the caller limits them. Ids are in the form of that variable. Their use is recorded in the
ledger.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import InputError

_ANSWER_S = 20.0
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
    found = _from_nvidia_smi() or _devices()
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


def gpu_processes() -> dict[str, list[int]]:
    """Processes on each GPU by index, as far as the driver reports them."""
    apps = _query("--query-compute-apps=gpu_uuid,pid")
    if not apps:
        return {}
    index = {uuid: number for number, uuid in (row for row in _query("--query-gpu=index,uuid") if len(row) == 2)}
    found: dict[str, list[int]] = {}
    for row in apps:
        if len(row) == 2 and row[0] in index and row[1].isdecimal():
            found.setdefault(index[row[0]], []).append(int(row[1]))
    return found


def _from_nvidia_smi() -> LocalGpus | None:
    rows = [row for row in _query("--query-gpu=index,name") if len(row) == 2 and row[0].isdecimal()]
    return LocalGpus(tuple(index for index, _ in rows), kind=rows[0][1]) if rows else None


def _devices() -> LocalGpus:
    """Without nvidia-smi: the driver's devices."""
    found = [int(match[1]) for dev in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", dev.name))]
    return LocalGpus(tuple(str(number) for number in sorted(found)))


def _query(what: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, what, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
