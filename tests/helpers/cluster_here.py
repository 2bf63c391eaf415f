"""Commands of `trimtab cluster` on this machine, each in a process of its own, with ports and a ledger of their own.

`Place` never touches what it did not start: it has a directory and ports that nobody else uses, and can name every
process that came of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodePhase, NodeRecord
from trimtab.runtime.procs.ports import is_free
from trimtab.runtime.procs.processes import MARK, ProcessIdentity, environment, family, table

TRIMTAB = shutil.which("trimtab") or str(Path(sys.executable).with_name("trimtab"))
PATIENCE_S = 600.0  # a guard, not an expectation: the machine may be very busy


def noun_of(verb: str) -> str:
    return "node" if verb in ("add", "drain", "remove") else "cluster"


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
            [TRIMTAB, noun_of(arguments[0]), *arguments],
            env={**self.environment, **around},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def begin(self, *arguments: str, **around: str) -> subprocess.Popen[str]:
        """Run a command beside others."""
        return subprocess.Popen(
            [TRIMTAB, noun_of(arguments[0]), *arguments],
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
        [found] = [one for one in self.cluster().live_nodes if one.name == name]
        return found

    def cause(self, name: str) -> str:
        """Why a node has ended; empty where it has not."""
        found = [one for one in self.cluster().nodes if one.name == name and one.phase is NodePhase.ended]
        return found[-1].cause if found else ""

    def processes(self) -> list[ProcessIdentity]:
        """Everything alive that came of commands here, found by what it carries, not by what the ledger says."""
        wanted = str(self.directory)
        return [
            ProcessIdentity(pid, row.born)
            for pid, row in table().items()
            if (around := environment(pid)).get("TRIMTAB_CLUSTER_DIR") == wanted and MARK in around
        ]

    def family(self, name: str) -> list[ProcessIdentity]:
        """All processes of a node, its supervisor last."""
        node = self.node(name)
        assert node.supervisor is not None
        return [*family(node.supervisor, node.mark), node.supervisor]

    def close(self) -> None:
        """End what is left, and remove the directory."""
        for cluster in self.ledger.read().values():
            if cluster.live_nodes:
                self.run("stop", "--address", cluster.address)
        left = self.processes()
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not left, f"left behind: {left}"


class Terminal:
    """A command under a pseudo-terminal: what it has shown so far, and keys to press."""

    def __init__(self, *command: str, cwd: Path, around: dict[str, str]) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        # `setsid -c` makes it the controlling terminal, so that Ctrl-C arrives as a signal and closing it as a hang-up.
        self.process = subprocess.Popen(
            ["setsid", "-c", *command],
            cwd=cwd,
            env={**around, "TERM": "xterm", "PYTHONUNBUFFERED": "1"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._ours = ours
        self._shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """All that was shown, without colours, cursor movements and the wheel that turns while one waits."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self._shown)
        return re.sub(r"[\u2800-\u28ff] starting [\w-]+( head)?", "", plain)

    def expect(self, pattern: str, seconds: float = PATIENCE_S) -> None:
        """Wait until something is shown; the end of the command is as good as the end of the time."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern} was not shown:\n{self.text[-3000:]}"
            if self.process.poll() is not None:
                self._reader.join(5)
                assert re.search(pattern, self.text), f"it ended without showing {pattern}:\n{self.text[-3000:]}"
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._ours, b"\x03")

    def ended(self, seconds: float = PATIENCE_S) -> int:
        """Wait for its end; its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """Let go of it; whatever still runs is killed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 65_536)
            except OSError:  # nobody has the other end any more
                return
            if not part:
                return
            self._shown += part.decode(errors="replace")


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel hands out."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000 - count)
        if all(is_free(port) for port in range(first, first + count, 7)):
            return first


def worker_ports(port: int) -> int:
    """Where workers' ports begin: far from the others'."""
    return 10_002 + (port % 7) * 1_000
