"""A storm over a real cluster: tasks, controllers and nodes are killed and the disk is full at times while tasks run.

`Storm` keeps a cluster of nodes on this machine, kills by a seeded plan, and has lost nodes replaced. A node is lost as
a machine is: every process of it at once. Whatever it kills it has started itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from disks import full
from faults import Faults

# Ray then notices a killed node in a second or two instead of a quarter of a minute.
# It refuses three checks; one that is only slow on a busy machine must not be taken for dead.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "10000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}


class Work:
    """A task that works for a while, and writes down that it began, and whether an earlier start of it still lived."""

    def __init__(self, name: str, directory: str, seconds: float) -> None:
        self.name, self.directory, self.seconds = name, Path(directory), seconds

    def run(self) -> str:
        log = self.directory / f"{self.name}.log"
        before = log.read_text().split() if log.exists() else []
        overlaps = [f"overlap-with-{one}" for one in before if is_process(one) and still_lives(one)]
        with log.open("a") as file:
            file.write("\n".join([process_name(os.getpid()), *overlaps]) + "\n")
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline and not (self.directory / "calm").exists():
            time.sleep(0.05)
        return f"result of {self.name}"


class Storm:
    """A cluster of a head without CPUs and some nodes, and whoever kills in it."""

    def __init__(self, nodes: int, cpus: int, seed: int) -> None:
        from ray.cluster_utils import Cluster

        self.random = random.Random(seed)
        self.faults = Faults(f"a pool on {nodes} nodes, seed {seed}")
        self._cpus = cpus
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(num_cpus=cpus, wait=False) for _ in range(nodes)]
        self.cluster.wait_for_nodes()

    def kill_host(self, names: Iterable[str]) -> None:
        """Kill the process of some task, if that very process is still there."""
        known = sorted(filter(still_lives, names))
        if known and kill(pid_of(self.random.choice(known))):
            self.faults.put("task killed")

    def freeze_host(self, names: Iterable[str]) -> None:
        """Stop the process of some task for a moment."""
        known = sorted(filter(still_lives, names))
        if known:
            frozen = pid_of(self.random.choice(known))
            with contextlib.suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGSTOP)
                self.faults.put("task frozen")
                time.sleep(self.random.uniform(0.05, 0.5))
                os.kill(frozen, signal.SIGCONT)

    def fill_disk(self, disk: Path, names: Iterable[str]) -> None:
        """Leave no room on the controller's disk for a moment, and kill the process of a task meanwhile."""
        with full(disk):
            self.faults.put("disk full")
            time.sleep(self.random.uniform(0.1, 0.5))
            self.kill_host(names)
            time.sleep(self.random.uniform(0.1, 0.5))

    def kill_controller(self, pid: int) -> None:
        """Kill the controller."""
        if kill(pid):
            self.faults.put("controller killed")

    def kill_node(self) -> None:
        """Lose a node with all its processes, and have another join."""
        node = self.nodes.pop(self.random.randrange(len(self.nodes)))
        raylets = [info.process.pid for info in node.all_processes["raylet"]]
        for pid in [one for raylet in raylets for one in (raylet, *below(raylet))]:
            kill(pid)
        self.faults.put("node killed")
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.append(self.cluster.add_node(num_cpus=self._cpus, wait=False))


def kill(pid: int) -> bool:
    """Whether there was such a process to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def lives(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def process_name(pid: int) -> str:
    """A process and no other: numbers are given again within minutes where many come and go, so its birth is in it."""
    return f"{pid}@{_stat(pid)[19]}"


def process_names(pids: Iterable[int]) -> list[str]:
    """Those of them that are there."""
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            names.append(process_name(pid))
    return names


def is_process(name: str) -> bool:
    """Whether this names one."""
    pid, at, born = name.partition("@")
    return bool(at) and pid.isdigit() and born.isdigit()


def pid_of(name: str) -> int:
    """The number of the process that this names."""
    return int(name.partition("@")[0])


def still_lives(name: str) -> bool:
    """Whether that very process exists and is no zombie."""
    pid = pid_of(name)
    try:
        return lives(pid) and process_name(pid) == name
    except OSError:
        return False


def below(pid: int) -> set[int]:
    """All descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
            except OSError:
                continue
    found: set[int] = set()
    todo = [pid]
    while todo:
        more = parents.get(todo.pop(), [])
        found.update(more)
        todo += more
    return found


def _stat(pid: int) -> list[str]:
    """State, parent and what follows."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
