"""Commands of `trimtab cluster` on this machine, each in a process of its own, with ports and a ledger of the test's own.

`Place` never touches what it did not start: it has a directory and ports that nobody else uses, and can name every
process that came of it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.runtime.cluster.ledger import ClusterRecord, Ledger, NodeRecord
from trimtab.runtime.cluster.ports import is_free
from trimtab.runtime.cluster.processes import MARK, Process, environment, family, table

TRIMTAB = shutil.which("trimtab") or str(Path(sys.executable).with_name("trimtab"))
PATIENCE_S = 180.0  # a guard, not an expectation: the machine may be very busy


class Place:
    """A ledger, a home directory and ports of one's own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ttc-", dir="/tmp"))
        self.home = self.directory / "home"
        self.home.mkdir()
        self.port = free_ports(120)
        self.ledger = Ledger(self.directory)

    @property
    def environment(self) -> dict[str, str]:
        """Of the commands: nothing of the surrounding one that concerns Ray or GPUs."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "TRIMTAB_")) and name != "CUDA_VISIBLE_DEVICES"
        }
        return {**kept, "TRIMTAB_CLUSTER_DIR": str(self.directory), "HOME": str(self.home)}

    @property
    def ports(self) -> list[str]:
        """Options of `start` that name ports."""
        return [f"--port={self.port}", f"--ports-from={self.port + 1}", f"--client-port={self.port + 119}",
                f"--worker-ports-from={worker_ports(self.port)}"]  # fmt: skip

    def run(self, *arguments: str, **around: str) -> subprocess.CompletedProcess[str]:
        """Run a command and wait for it."""
        return subprocess.run(
            [TRIMTAB, "cluster", *arguments],
            env={**self.environment, **around},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def begin(self, *arguments: str, **around: str) -> subprocess.Popen[str]:
        """Run a command beside others."""
        return subprocess.Popen(
            [TRIMTAB, "cluster", *arguments],
            env={**self.environment, **around},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def done(self, *arguments: str, **around: str) -> str:
        """Run a command that must succeed; what it printed."""
        done = self.run(*arguments, **around)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def asked(self, *arguments: str) -> Any:
        """The answer of a command as data."""
        return json.loads(self.done(*arguments, "--format", "json"))

    def cluster(self) -> ClusterRecord:
        """The cluster that was started."""
        [found] = [one for one in self.ledger.read().values() if one.port == self.port]
        return found

    def node(self, name: str) -> NodeRecord:
        """A node that stands."""
        [found] = [one for one in self.cluster().standing if one.name == name]
        return found

    def processes(self) -> list[Process]:
        """Everything alive that came of commands here, found by what it carries, not by what the ledger says."""
        known = table()
        wanted = str(self.directory)
        return [
            Process(pid, row.born)
            for pid, row in known.items()
            if pid != os.getpid()
            and (around := environment(pid)).get("TRIMTAB_CLUSTER_DIR") == wanted
            and MARK in around
        ]

    def family(self, name: str) -> list[Process]:
        """All processes of a node, its keeper last."""
        node = self.node(name)
        assert node.keeper is not None
        return [*family(node.keeper, node.mark), node.keeper]

    def close(self) -> None:
        """End what is left, and remove the directory."""
        for cluster in self.ledger.read().values():
            if cluster.standing:
                self.run("stop", "--address", cluster.address)
        left = self.processes()
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not left, f"left behind: {left}"


def wait_for(true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for something, and say what did not happen."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel hands out."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000 - count)
        if all(is_free(port) for port in range(first, first + count, 7)):
            return first


def worker_ports(port: int) -> int:
    """Where workers' ports begin: far from the others'."""
    return 10_002 + (port % 7) * 1_000
