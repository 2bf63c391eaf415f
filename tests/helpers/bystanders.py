"""Processes that a harmful launch script would hit: a Python sleeper, and ones named like an engine and like Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KILLS = "pkill -9 sglang; ray stop --force; pkill -9 ray; pkill -9 python\n"


@contextmanager
def bystanders(folder: Path, *names: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A Python sleeper, and a process for each name; they end with the block."""
    started = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])]
    try:
        for name in names:
            program = folder / name
            shutil.copy2(shutil.which("sleep") or "/bin/sleep", program)
            started.append(subprocess.Popen([str(program), "600"]))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
