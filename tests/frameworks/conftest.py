"""The table over all checkouts, shown after the run and kept in out/frameworks.txt.

A row and its lines travel with the report of their test, so that tests may run in several processes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import _utils
from yaml._yaml import CParser
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

KEPT = Path(__file__).parents[2] / "out" / "frameworks.txt"
COLUMNS = (
    *("found", "not RL", "broken", "accepted", "with NAME=", "read right", "not compared", "refused", "wrong"),
    *("planned", "no plan", "slower", "own checks no"),
)
PROPERTY = "what was read"
SLOW_LOADER = _utils.get_yaml_loader()
_NOW: list[tuple[str, Any]] = []
_CPU_BEFORE = [0.0]
"""Of the test that runs: its rows, and what its process and children took before it."""


class FastLoader(CParser, SLOW_LOADER):  # type: ignore[misc, valid-type]
    """OmegaConf's loader with a parser in C: most of the time of a run went into the other one."""

    def __init__(self, stream: Any) -> None:
        CParser.__init__(self, stream)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)


@pytest.fixture(autouse=True)
def _yaml_is_parsed_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    _CPU_BEFORE[0] = sum(os.times()[:4])
    monkeypatch.setattr(_utils, "get_yaml_loader", lambda: FastLoader)


def row(framework: str, what: str, counts: Counter[str], began: float, lines: Sequence[str] = ()) -> None:
    """A row of the table: what was read of a framework, with a count for each column, and what to say of some."""
    minutes = (time.monotonic() - began) / 60, (sum(os.times()[:4]) - _CPU_BEFORE[0]) / 60
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
    lines = [
        f"{'':12} {'read':>8} " + " ".join(f"{column:>13}" for column in COLUMNS) + f" {'minutes':>8} {'of a core':>9}"
    ]
    for framework, what, counts, minutes, _ in sorted(rows, key=lambda row: (row[1], row[0].lower())):
        cells = " ".join(f"{counts[column]:>13}" for column in COLUMNS)
        lines.append(f"{framework:12} {what:>8} {cells} {minutes[0]:>8.1f} {minutes[1]:>9.1f}")
    for framework, what, _, _, more in rows:
        lines += ["", f"{framework}, {what}:", *more] if more else []
    terminalreporter.section("what was read of the checkouts")
    terminalreporter.write("\n".join(lines) + "\n")
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text("\n".join(lines) + "\n")
