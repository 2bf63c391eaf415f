"""Components for tests of runs: each notes what was done to it, and misbehaves when told to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.runtime.run.component import Batch, Place, Result

LOG: list[tuple[Any, ...]] = []
"""What happened, in order; a test clears it first."""


class Noting:
    """Says what it was given, and keeps a number that saving must not lose."""

    def __init__(self, *, place: Place, fail: dict[str, Any] | None = None, pause_s: float = 0.0) -> None:
        self.place, self.fail, self.pause_s = place, fail or {}, pause_s
        self.total, self.version = 0, 0
        self.loaded = True
        LOG.append(("made", place.component, place.iteration))

    def step(self, batch: Batch) -> Any:
        name = self.place.component
        LOG.append(("step", name, batch.iteration, batch.index))
        assert self.loaded, f"{name} works without its GPUs"
        if self.pause_s:
            time.sleep(self.pause_s)
        wrong_at = self.fail.get("iteration", 1), self.fail.get("batch", 0)
        if self.fail and (batch.iteration, batch.index) == wrong_at:
            return self.misbehave()
        self.total += 1
        return Result((name, batch.iteration, batch.index, self.version, batch.data), {"total": self.total})

    def misbehave(self) -> Any:
        how = self.fail.get("how")
        if how == "raise":
            raise RuntimeError("out of memory")
        if how == "hang":
            time.sleep(self.fail.get("seconds", 30.0))
        if how == "exit":
            raise SystemExit(3)
        if how == "interrupt":
            for _ in range(self.fail.get("times", 1)):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            self.total += 1
            return self.place.component
        return {"none": None, "generator": (x for x in ())}.get(how, self.place.component)

    def offload(self) -> None:
        assert self.loaded
        time.sleep(self.pause_s)
        self.loaded = False
        LOG.append(("offload", self.place.component))

    def onload(self) -> None:
        assert not self.loaded
        self.loaded = True
        LOG.append(("onload", self.place.component))

    def weights(self) -> int:
        return self.total

    def sync(self, weights: int, version: int) -> None:
        self.version = version
        LOG.append(("sync", self.place.component, weights, version))

    def save(self, path: Path) -> None:
        assert not list(path.iterdir())
        (path / "total").write_text(str(self.total))
        LOG.append(("save", self.place.component, self.total))

    def load(self, path: Path) -> None:
        self.total = int((path / "total").read_text())
        LOG.append(("load", self.place.component, self.total))

    def close(self) -> None:
        LOG.append(("close", self.place.component))


class Bare:
    """Has nothing but what it must have."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def step(self, batch: Batch) -> int:
        return batch.index


class NoStep:
    def __init__(self, place: Place) -> None: ...


class WrongStep:
    def __init__(self, place: Place) -> None: ...

    def step(self) -> None: ...


class Later:
    def __init__(self, place: Place) -> None: ...

    async def step(self, batch: Batch) -> None: ...


class NoPlace:
    def __init__(self, size: int = 1) -> None: ...

    def step(self, batch: Batch) -> None: ...


class Broken:
    def __init__(self, size: int, place: Place) -> None:
        raise ValueError(f"size {size} is odd")

    def step(self, batch: Batch) -> None: ...


class Lingering(Noting):
    """Takes its time to end."""

    def close(self) -> None:
        time.sleep(1.0)


class Well(Bare):
    def health(self) -> bool:
        return True


class Unwell(Bare):
    def health(self) -> str:
        return "the disk is full"


NUMBER = 3


class LargeRollout:
    """Makes an array of some megabytes, and notes when it begins."""

    def __init__(self, place: Place, mb: float = 2.0) -> None:
        self.place, self.size, self.seen = place, int(mb * 2**17), 0.0

    def step(self, batch: Batch) -> Result:
        return Result({"made": np.full(self.size, float(batch.iteration))}, {"began": time.time(), "seen": self.seen})

    def sync(self, weights: dict[str, np.ndarray], version: int) -> None:
        self.seen = float(weights["layer"].sum()) / len(weights["layer"])


class SlowToSave:
    """A trainer with large weights whose state takes a while to write; `snapshot` copies it first."""

    def __init__(self, place: Place, save_s: float = 0.4) -> None:
        self.place, self.save_s, self.layer = place, save_s, np.zeros(2**18)

    def step(self, batch: Batch) -> Result:
        self.layer += float(batch.data["made"][-1])
        return Result(None, {"total": float(self.layer[0])})

    def weights(self) -> dict[str, np.ndarray]:
        return {"layer": self.layer}

    def save(self, path: Path) -> None:
        self.snapshot()(path)

    def load(self, path: Path) -> None:
        self.layer = np.load(path / "layer.npy")

    def snapshot(self) -> Callable[[Path], None]:
        copy = self.layer.copy()

        def write(path: Path) -> None:
            time.sleep(self.save_s)
            np.save(path / "layer.npy", copy)
            (path / "written").write_text(str(time.time()))

        return write


class CannotSave(SlowToSave):
    def snapshot(self) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            raise OSError("no space left")

        return write
