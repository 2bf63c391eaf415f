"""The table over all checkouts, shown after the run and kept in out/frameworks.txt.

A row and its lines travel with the report of their test, so that tests may run in several processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(__file__).parents[2] / "out" / "frameworks.txt"
COLUMNS = (
    *("found", "not RL", "broken", "accepted", "with NAME=", "read right", "not compared", "refused", "wrong"),
    *("planned", "no plan", "slower", "own checks no"),
)
PROPERTY = "what was read"
_NOW: list[tuple[str, Any]] = []
"""Of the test that runs."""


def row(framework: str, what: str, counts: Counter[str], began: float, lines: Sequence[str] = ()) -> None:
    """A row of the table: what was read of a framework, with a count for each column, and what to say of some."""
    minutes = (time.monotonic() - began) / 60
    _NOW.append((PROPERTY, [framework, what, {name: counts[name] for name in COLUMNS}, minutes, list(lines)]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "call":
        item.user_properties += _NOW
        _NOW.clear()
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [one for found in terminalreporter.stats.values() for one in found if isinstance(one, pytest.TestReport)]
    rows = [
        row for report in reports if report.when == "call" for name, row in report.user_properties if name == PROPERTY
    ]
    if not rows:
        return
    lines = [f"{'':12} {'read':>8} " + " ".join(f"{column:>13}" for column in COLUMNS) + f" {'minutes':>8}"]
    for framework, what, counts, minutes, _ in sorted(rows, key=lambda row: (row[1], row[0].lower())):
        cells = " ".join(f"{counts[column]:>13}" for column in COLUMNS)
        lines.append(f"{framework:12} {what:>8} {cells} {minutes:>8.1f}")
    for framework, what, _, _, more in rows:
        lines += ["", f"{framework}, {what}:", *more] if more else []
    terminalreporter.section("what was read of the checkouts")
    terminalreporter.write("\n".join(lines) + "\n")
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text("\n".join(lines) + "\n")
