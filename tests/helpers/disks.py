"""File systems with little room, and with none."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_disk(place: Path, size: str) -> Iterator[Path | None]:
    """A file system of its own with so much room, or None where none can be mounted: that takes root."""
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
    try:
        yield place if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own, for a test that needs one."""
    with mounted_disk(place, size) as disk:
        if disk is None:
            pytest.skip("a file system cannot be mounted here: it takes root")
        yield disk


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """While this lasts, there is no room on the disk."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    yield
    ballast.unlink()
