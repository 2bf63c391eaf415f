"""The table over all checkouts, shown after the run and kept in out/frameworks.txt."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / "out" / "frameworks.txt"
COLUMNS = (
    *("found", "not RL", "accepted", "with NAME=", "read right", "not compared", "refused", "wrong"),
    *("planned", "no plan", "slower", "own checks no"),
)
ROWS: list[tuple[str, str, Counter[str], float]] = []


def row(framework: str, what: str, counts: Counter[str], began: float) -> None:
    """A row of the table: what was read of a framework, with a count for each column."""
    ROWS.append((framework, what, counts, time.monotonic() - began))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROWS:
        return
    lines = [f"{'':12} {'read':>8} " + " ".join(f"{column:>13}" for column in COLUMNS) + f" {'minutes':>8}"]
    for framework, what, counts, seconds in ROWS:
        cells = " ".join(f"{counts[column]:>13}" for column in COLUMNS)
        lines.append(f"{framework:12} {what:>8} {cells} {seconds / 60:>8.1f}")
    terminalreporter.section("what was read of the checkouts")
    terminalreporter.write("\n".join(lines) + "\n")
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text("\n".join(lines) + "\n")
