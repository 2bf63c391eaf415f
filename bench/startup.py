"""How long a command takes from its start: the best of five, since only the machine's noise makes it longer."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import resources

EXAMPLE = str(resources.files("trimtab") / "examples" / "grpo.yaml")
COMMANDS = (
    ("python -c pass", [sys.executable, "-c", "pass"], None),
    ("trimtab --version", [sys.executable, "-m", "trimtab", "--version"], 0.2),
    ("trimtab plan (32 GPUs)", [sys.executable, "-m", "trimtab", "plan", EXAMPLE, "--no-sensitivity"], 0.8),
    ("trimtab plan, sensitivity", [sys.executable, "-m", "trimtab", "plan", EXAMPLE], None),
)


def main() -> None:
    print("Start-up (goal in brackets)")
    base = None
    for name, command, goal in COMMANDS:
        best = min(_seconds(command) for _ in range(5))
        base = base or best
        print(f"{name:>26} {best:>7.3f} s {f'[{goal}]' if goal else '':>6}  {best / base:.1f}x python -c pass")


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
