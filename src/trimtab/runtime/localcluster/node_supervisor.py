"""Supervisor process of one node: starts its Ray, watches it, and ends all of its processes, once.

It ends the node on SIGTERM, when a drain's deadline passes, when the node's Ray has ended by itself (drained, `ray
stop`, a crash), when the head is gone, and when the command that owns the cluster is gone; the cause is written to the
ledger. All processes of the node descend from it. If it is killed itself, the kernel kills `ray start`, which ends the
rest. Run as a module, with the ledger's directory and the node's mark.

Few nodes start at once, since Ray's own parts have a limited time to come up: a supervisor takes a start permit, a file
lock that is released even if its holder dies, before it starts Ray, and releases it when the node runs or has failed.

Sizes, ports and GPUs of a node are stated in full in its command line and environment, so that nodes on one machine
never collide in Ray's defaults. The caller's Ray settings in the environment stay, except those that would point the
node at another cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodePhase, NodeRecord, NodeSizes
from trimtab.runtime.procs.locks import FileLock
from trimtab.runtime.procs.processes import (
    MARK,
    ProcessIdentity,
    adopt_orphans,
    born,
    command,
    kill_family,
    reap,
    send,
    start_child,
    table,
    this,
)

MEMORY_SHARE, STORE_SHARE = 0.7, 0.3  # of the machine's memory, for all nodes together; Ray gives as much to each
MIN_STORE = 80 * 2**20  # Ray refuses less
# Ray notices a killed node in about 2 s instead of 14 s.
QUICK_LOSS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
_NOT_PASSED = ("RAY_ADDRESS", "RAY_NODE_ID", "RAY_RAYLET_PID", "RAY_JOB_ID")


def ray_start(cluster: ClusterRecord, node: NodeRecord, ip: str | None = None) -> list[str]:
    """The command that runs a node until it is ended."""
    ports, sizes = node.ports, node.sizes
    settings: dict[str, object] = {
        "node-name": node.name,
        "num-cpus": sizes.cpus,
        "num-gpus": len(node.gpus),
        "resources": json.dumps({"worker_unit": sizes.units} if sizes.units else {}),
        "memory": sizes.memory,
        "object-store-memory": sizes.object_store,
        "node-manager-port": ports.node_manager,
        "object-manager-port": ports.object_manager,
        "min-worker-port": ports.first_worker,
        "max-worker-port": ports.last_worker,
        "dashboard-agent-listen-port": ports.agent_http,
        "dashboard-agent-grpc-port": ports.agent_grpc,
        "runtime-env-agent-port": ports.runtime_env,
        "metrics-export-port": ports.metrics,
        "node-ip-address": ip,
        # One per node: nodes that start at once in one directory choose the same socket names.
        "temp-dir": temp_dir(cluster, node),
    }
    if node.head:
        settings |= {
            "port": cluster.port,
            "include-dashboard": "true" if cluster.dashboard_port else "false",
            "dashboard-port": cluster.dashboard_port,
            "ray-client-server-port": cluster.client_port,
        }
    else:
        settings["address"] = cluster.address
    flags = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    which = ["--head", "--disable-usage-stats"] if node.head else []
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *which, *flags]


def temp_dir(cluster: ClusterRecord, node: NodeRecord) -> str:
    return f"{cluster.temp_dir}/{node.slot}"


def environment(
    cluster: ClusterRecord, node: NodeRecord, auth: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    ours = {name: value for name, value in env.items() if name not in _NOT_PASSED}
    ours |= auth
    ours |= {
        MARK: node.mark,
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus),
        "RAY_USAGE_STATS_ENABLED": "0",
        # On SIGTERM Ray would drain for half a minute; a node is drained before it is told to end.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    ours.setdefault("RAY_agent_register_timeout_ms", str(AGENT_S * 1000))  # 15 s by default; the raylet ends then
    ours.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ours.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPU numbers as in nvidia-smi
    return ours | (QUICK_LOSS if cluster.quick_loss else {})


def with_shares(sizes: NodeSizes, nodes: int) -> NodeSizes:
    """Sizes in full: what is not stated is one node's share of a machine with this many nodes."""
    machine, nodes = _memory(), max(1, nodes)
    store = max(MIN_STORE, int(min(STORE_SHARE * machine, 0.8 * _shared_memory()) / nodes))
    return dataclasses.replace(
        sizes, memory=sizes.memory or int(MEMORY_SHARE * machine / nodes), object_store=sizes.object_store or store
    )


def _memory() -> int:
    """Bytes of this machine, or of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _shared_memory() -> int:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return MIN_STORE
    return facts.f_bavail * facts.f_frsize


POLL_S = 0.2
ATTEMPTS = 3
AGENT_S = 60
TOO_BUSY = f"Ray's agent did not come up in {AGENT_S} s: this machine is too busy"
GRACE_S = 5.0  # for Ray to end in order
CRASH_S = 3.0  # after a crash of one of its processes `ray start` ends within this on a calm machine
_SIGTERM = re.compile(r"main\.cc:\d+: (GCS server )?received SIGTERM")
IP = "TRIMTAB_NODE_IP"


class StartPermit:
    """One of the few permits to start a node, as a file lock."""

    def __init__(self, directory: Path) -> None:
        self._locks = [FileLock(directory / f"turn-{number}") for number in range(max(1, (os.cpu_count() or 2) // 2))]

    def take(self) -> bool:
        """Try to get a permit; returns whether one is held."""
        return any(lock.held for lock in self._locks) or any(lock.take() for lock in self._locks)

    def release(self) -> None:
        for lock in self._locks:
            lock.release()


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
        signal.signal(signal.SIGTERM, self._request_stop)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        adopt_orphans()
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

        def prepare() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.dup2(log, 1)
            os.dup2(log, 2)

        pid = start_child(arguments, prepare)
        os.close(log)
        self._ray = ProcessIdentity(pid, born(pid) or -1.0)

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
            return ended_by_logs(temp_dir(self.cluster, self.node)) or f"its Ray died (status {self._status})"
        if len(self._vital) < (2 if self.node.head else 1):
            self._find_vital()
        gone = [name for name, vital in self._vital.items() if not vital.alive]
        if gone:
            self._vital_gone = self._vital_gone or time.monotonic()
            if self.node.phase is NodePhase.starting and self._ray is not None:
                send(self._ray, signal.SIGKILL)  # it would wait half a minute for the missing process
            elif cause := ended_by_logs(temp_dir(self.cluster, self.node)):
                return cause
            elif time.monotonic() - self._vital_gone > CRASH_S:
                return f"its Ray died (its {' and '.join(gone)})"
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
        code = reap(self._ray.pid if self._ray else None)
        self._status = self._status if code is None else code


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


def ended_by_logs(where: str) -> str:
    """Why the node's Ray ended, by what its raylet and GCS server logged below `where`; empty if they do not say.

    The exit status of `ray start` does not tell: processes that miss the GCS server fail after a `ray stop`, too.
    """
    text = ""
    for name in ("raylet", "gcs_server"):  # the last of each: there may be others, of earlier attempts to start
        with contextlib.suppress(OSError, ValueError):
            last = max(Path(where).glob(f"session_2*/logs/{name}*.out"), key=lambda path: path.stat().st_mtime)
            text += last.read_text(errors="replace")
    if "death info: reason: AUTOSCALER_DRAIN" in text:
        return "drained"
    return "its Ray was stopped from outside, as `ray stop` does" if _SIGTERM.search(text) else ""


def main() -> None:
    place, mark = sys.argv[1:]
    NodeSupervisor(Ledger(Path(place)), mark).run()


if __name__ == "__main__":
    main()
