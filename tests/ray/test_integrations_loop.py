"""The example of a whole loop runs as its page says: it learns, and what a killed engine had is answered elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"step +(\d+): reward ([\d.]+), (\d+) samples, (\d+) moved; version (\d+) on (.+)")


@pytest.mark.long
def test_the_loop_learns_and_loses_no_sample_with_an_engine() -> None:
    done = subprocess.run(
        [sys.executable, "examples/rollout_loop/loop.py", "--steps", "14", "--lose-one-at", "6"],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [found.groups() for found in map(LINE.match, done.stdout.splitlines()) if found]
    assert [(int(number), int(version)) for number, _, _, _, version, _ in steps] == [(at, at) for at in range(1, 15)]
    assert {samples for _, _, samples, _, _, _ in steps} == {"80"}
    assert float(steps[-1][1]) > float(steps[0][1]) + 0.4
    assert {frozenset(on.split(", ")) for *_, on in steps[:5]} == {frozenset({"one", "two"})}
    assert int(steps[5][3]) > 0  # those that the killed engine had
    assert {on for *_, on in steps[5:]} == {"one"}
