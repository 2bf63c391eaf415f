"""Components whose weights another process can open, as if they were on a GPU that both share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.runtime.run import executor
from trimtab.runtime.run.component import Batch, Place, Result

SIZE = 2**18


@dataclass(frozen=True)
class FileHandle:
    """A tensor that is mapped from a file."""

    path: str
    opens: bool

    def open(self) -> Any:
        import torch

        if not self.opens:
            raise RuntimeError("CUDA error: invalid argument")
        with Path(self.path).with_suffix(".opened").open("a") as log:
            log.write("opened\n")
        return torch.from_file(self.path, shared=True, size=SIZE)

    def release(self) -> None:
        with Path(self.path).with_suffix(".released").open("a") as log:
            log.write("released\n")


class LendingTrainer:
    """Adds one to its weights in each batch."""

    def __init__(self, folder: str, place: Place, opens: bool = True, shares: bool = True) -> None:
        import torch

        path = str(Path(folder) / "weights")
        self.weight = torch.from_file(path, shared=True, size=SIZE)
        executor.gpu_handle = lambda tensor: self.handle(FileHandle(path, opens), shares)  # type: ignore[assignment]

    def handle(self, handle: FileHandle, shares: bool) -> FileHandle:
        if not shares:
            raise RuntimeError("CUDA error: this memory cannot be shared")
        return handle

    def step(self, batch: Batch) -> None:
        self.weight += 1

    def weights(self) -> dict[str, Any]:
        return {"weight": self.weight}


class BorrowingRollout:
    """Says what its weights are."""

    def __init__(self, place: Place) -> None:
        self.mean = 0.0

    def step(self, batch: Batch) -> Result:
        return Result(batch.index, {"mean": self.mean})

    def sync(self, weights: dict[str, Any], version: int) -> None:
        self.mean = float(weights["weight"].mean())
