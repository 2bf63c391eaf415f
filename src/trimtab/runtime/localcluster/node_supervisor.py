"""Supervisor process of one node: starts its Ray, watches it, and ends all of its processes, once.

It ends the node on SIGTERM, when a drain's deadline passes, when the node's Ray has ended by itself (drained, `ray
stop`, a crash), when the head is gone, and when the command that owns the cluster is gone; the cause is written to the
ledger. All processes of the node descend from it. If it is killed itself, the kernel kills `ray start`, which ends the
rest. Run as a module, with the ledger's directory and the node's mark.

Few nodes start at once, since Ray gives its own parts 15 s to come up: a supervisor takes a start permit, a file lock
that is released even if its holder dies, before it starts Ray, and releases it when the node runs or has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

from trimtab.runtime.localcluster.command import ray_start, temp_dir
from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodePhase, NodeRecord
from trimtab.runtime.procs.processes import (
    ProcessIdentity,
    command,
    ended_children,
    kill_family,
    process,
    send,
    table,
    this,
)

POLL_S = 0.2
ATTEMPTS = 3
TOO_BUSY = "Ray's agent did not come up in the 15 s that Ray gives it: this machine is too busy"
GRACE_S = 5.0  # for Ray to end in order
CRASH_S = 3.0  # after a crash of one of its processes `ray start` ends within this
IP = "TRIMTAB_NODE_IP"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _max_starts() -> int:
    """One for every two cores."""
    return max(1, (os.cpu_count() or 2) // 2)


class StartPermit:
    """One of the few permits to start a node, as a file lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to get a permit; returns whether one is held."""
        for number in range(_max_starts()):
            if self._descriptor is not None:
                break
            descriptor = os.open(self._directory / f"turn-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._descriptor = descriptor
                break
            os.close(descriptor)
        return self._descriptor is not None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class NodeSupervisor:
    """Supervises one node."""

    def __init__(self, ledger: Ledger, mark: str) -> None:
        self._ledger = ledger
        self._mark = mark
        self._stop_requested = False
        self._seen = -1  # the ledger's version when it was last read
        self._ray: ProcessIdentity | None = None
        self._status: int | None = None  # of `ray start`, once it has ended
        self._vital: dict[str, ProcessIdentity] = {}  # Ray's own processes without which there is no node, by name
        self._vital_gone: float | None = None  # since when one of them is gone
        self._attempt = 0
        self._permit = StartPermit(ledger.place)
        self.cluster: ClusterRecord
        self.node: NodeRecord

    def run(self) -> None:
        """Run until the node has ended."""
        signal.signal(signal.SIGTERM, self._request_stop)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        given = self._ledger.update(self._mark, supervisor=this())
        if given is None or given.phase is not NodePhase.starting or not self._reread():
            return  # abandoned before it began
        cause = self._watch()
        self._end(cause)

    def _request_stop(self, *_: object) -> None:
        self._stop_requested = True

    def _start(self) -> None:
        self._attempt += 1
        self._status = self._vital_gone = None
        self._vital = {}
        log = os.open(self.node.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        arguments = ray_start(self.cluster, self.node, os.environ.get(IP) or None)
        pid = os.fork()
        if pid == 0:  # only what leads to exec
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.execv(arguments[0], arguments)
            finally:
                os._exit(127)
        os.close(log)
        with contextlib.suppress(ProcessLookupError):
            self._ray = process(pid)
        if self._ray is None:
            self._ray = ProcessIdentity(pid, -1.0)

    def _watch(self) -> str:
        """Wait for something to end the node; returns the cause."""
        while True:
            time.sleep(POLL_S)
            self._reap()
            if not self._reread():
                return "it was removed from the ledger"
            if self._stop_requested:
                return self.node.cause or "its supervisor was stopped"
            if self.node.phase is not NodePhase.starting:
                self._permit.release()
            elif self._attempt == 0 and self._permit.take():
                self._start()
            cause = self._ended_by_itself() or self._ended_from_outside()
            if cause:
                return cause

    def _ended_by_itself(self) -> str:
        if self._status is not None:
            if self.node.phase is NodePhase.starting:
                words = start_error(self.node.log, temp_dir(self.cluster, self.node))
                # A busy machine is tried again until the command that wants the node gives it up at its own deadline.
                if self._attempt < ATTEMPTS or words == TOO_BUSY:
                    kill_family(this(), self._mark)
                    self._start()
                    return ""
                return f"its Ray did not start: {words}"
            if self._status == 0 or self.node.deadline is not None:
                return "drained"
            return f"its Ray died (status {self._status})"
        if len(self._vital) < (2 if self.node.head else 1):
            self._find_vital()
        if not all(vital.alive for vital in self._vital.values()):
            self._vital_gone = self._vital_gone or time.monotonic()
            if self.node.phase is NodePhase.starting and self._ray is not None:
                send(self._ray, signal.SIGKILL)  # it would wait half a minute for the missing process
            elif _was_drained(temp_dir(self.cluster, self.node)):
                return "drained"
            if time.monotonic() - self._vital_gone > CRASH_S:  # after a crash `ray start` would have ended too
                return "its Ray was stopped from outside, as `ray stop` does"
        return ""

    def _ended_from_outside(self) -> str:
        if self.node.deadline is not None and time.time() >= self.node.deadline:
            return "drained: its deadline has passed"
        if self.node.head:
            owner = self.cluster.owner
            return "the command that started the cluster is gone" if owner is not None and not owner.alive else ""
        if self.cluster.head_here and (self.cluster.head is None or not self.cluster.head.alive):
            return "the head has ended"
        return ""

    def _find_vital(self) -> None:
        """The raylet, whose command line has the node id, and on a head the GCS server."""
        for pid, row in table().items():
            if self._ray is None or row.parent != self._ray.pid:
                continue
            words = command(pid)
            name = Path(words[0]).name if words else ""
            if name in ("raylet", "gcs_server") and name not in self._vital:
                self._vital[name] = ProcessIdentity(pid, row.born)
                if name == "raylet":
                    node_id = next((word.partition("=")[2] for word in words if word.startswith("--node_id=")), "")
                    self._ledger.update(self._mark, raylet=self._vital[name], node_id=node_id)

    def _end(self, cause: str) -> None:
        """End every process of the node, then record it."""
        self._permit.release()
        self._ledger.update(self._mark, phase=NodePhase.ending, since=time.time(), cause=cause)
        if self._ray is not None and self._status is None:
            send(self._ray, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while self._status is None and time.monotonic() < deadline:
                time.sleep(0.05)
                self._reap()
        kill_family(this(), self._mark)
        self._reap()
        self._ledger.update(self._mark, phase=NodePhase.ended, since=time.time(), cause=cause)

    def _reread(self) -> bool:
        """Reread the ledger if it has changed; returns whether the node is still in it."""
        now = self._ledger.changed()
        if now == self._seen:
            return True
        self._seen = now
        for cluster in self._ledger.read().values():
            for node in cluster.nodes:
                if node.mark == self._mark:
                    self.cluster, self.node = cluster, node
                    return True
        return False

    def _reap(self) -> None:
        for pid, code in ended_children():
            if self._ray is not None and pid == self._ray.pid:
                self._status = code


def start_error(log: str, where: str) -> str:
    """Why Ray did not start: from the raylet's log below `where`, or the output of `ray start`."""
    for path in Path(where).glob("session_2*/logs/raylet*.out"):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            if "Timed out waiting for file" in text:
                return TOO_BUSY
            if "Address already in use" in text:
                return "a port or socket that it needs is taken"
    try:
        lines = [line.strip() for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "it left no log"
    for line in reversed(lines):
        head, colon, rest = line.partition(": ")
        if colon and head.rpartition(".")[2].endswith(("Error", "Exception")) and rest:
            return rest[:300]
    return lines[-1][:300] if lines else "it logged nothing"


def _was_drained(where: str) -> bool:
    """Whether the node's raylet ended because it was drained, by its own log."""
    for path in Path(where).glob("session_2*/logs/raylet*.out"):
        with contextlib.suppress(OSError):
            if "death info: reason: AUTOSCALER_DRAIN" in path.read_text(errors="replace"):
                return True
    return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    place, mark = sys.argv[1:]
    NodeSupervisor(Ledger(Path(place)), mark).run()


if __name__ == "__main__":
    main()
