"""`trimtab demo elastic`, whole, on a Ray of its own with several nodes; what it starts is gone when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from storm import below, lives

RUN = "import sys; from trimtab.demos.elastic import run_demo; sys.exit(run_demo('numpy'))"
WAIT_S = 240.0

pytestmark = pytest.mark.long


def started() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_all_that_the_demo_says_holds() -> None:
    demo = started()
    said, faults = demo.communicate(timeout=WAIT_S)
    assert demo.returncode == 0, said + faults
    for words in (
        "🆕 Detected new worker: ",
        "✅ Created placement group ",
        "🎭 Spawned training actor 4 on node ",
        "✓ the loss of each step equals that of a run with fixed membership",
        "✓ no process is left",
    ):
        assert words in said, said
    assert "✗" not in said


def test_ctrl_c_ends_all_that_the_demo_started() -> None:
    demo = started()
    assert demo.stdout is not None
    deadline = time.monotonic() + WAIT_S
    while "Detected new worker" not in demo.stdout.readline():
        assert time.monotonic() < deadline
    pids = below(demo.pid)
    assert pids
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=WAIT_S)
    assert demo.returncode != 0
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
