"""How fast an elastic group follows its cluster, as multiples of a bare Ray actor start in the same run.

Join to the first step complete on the newcomer, loss to the next complete step, drain to an empty node. A join counts
from the moment that Ray lists the node as alive, a loss from the moment that trimtab's own link notices it (the time
from the kill is printed, too; Ray alone takes some 14 s), a drain with an urgent deadline from the call that asks for
it until no process of ours is on the node. Several real nodes on this machine, each with one GPU that is made up. On
a node that has just joined a bare actor takes longer, too, and importing PyTorch takes longer than both: bare actors
there, without and with the members' trainer, are printed for comparison.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

from trimtab.runtime.procs import processes

ROUNDS = 3
STARTS = 5
HEAD = {"head": 0.01}
DEADLINE_S = 9.0  # within NodePolicy.hurry_s: urgent
WAIT_S = 120.0


class Plain:
    """Something to start."""

    def ping(self) -> str:
        """The first call."""
        return "pong"


class Trainer(Plain):
    """What a member is, without a group."""

    def __init__(self) -> None:
        from trimtab.demos.elastic_training import ElasticTrainer

        self.member = ElasticTrainer()


def main() -> None:
    quiet = io.StringIO()  # Ray prints at length what it thinks of killed nodes
    with contextlib.redirect_stdout(quiet):
        bare, fresh, training, bench = measured()
    base = statistics.median(bare)
    load = os.getloadavg()[1]
    print(f"bare Ray actor, until its first call has returned: {base:.2f} s (median of {len(bare)}; load {load:.1f})")
    print(f"{'':<58}{'median':>9}{'worst':>9}{'ratio':>9}  goal")
    row("bare Ray actor on a node that has just joined", fresh, base)
    row("bare Ray actor with the members' trainer there", training, base)
    row("join (alive in Ray) to the first step on the newcomer", bench.joins, base)
    row("  the same, in starts of a bare actor with that trainer", bench.joins, statistics.median(training), 2)
    row("loss (noticed by the link) to the next complete step", bench.losses, base, 2)
    row("  the same from the kill", bench.kills, base)
    row("drain (urgent) to an empty node", bench.drains, base, 1.5)


def measured() -> tuple[list[float], list[float], list[float], Bench]:
    import ray
    from ray.cluster_utils import Cluster

    from trimtab.demos.elastic_training import ElasticTrainer
    from trimtab.runtime.client.session import connect
    from trimtab.runtime.elastic.group import ElasticGroup

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    head = {"num_cpus": 2, "num_gpus": 1, "resources": {"head": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="trimtab")
    session = None
    try:
        bare = [started(ray, resources=HEAD) for _ in range(STARTS)]
        fresh = [on_a_fresh_node(ray, cluster, Plain, at) for at in range(ROUNDS)]
        training = [on_a_fresh_node(ray, cluster, Trainer, ROUNDS + at) for at in range(ROUNDS)]
        session = connect(name=f"bench-{uuid.uuid4().hex[:6]}")
        with ElasticGroup(ElasticTrainer, session=session, per_node={"gpu": 1}, min=1) as group:
            stepped(group, 1)
            bench = Bench(ray, cluster, session, group)
            for _ in range(ROUNDS):
                bare.append(started(ray, resources=HEAD))  # beside each round, for machines are not always equally busy
                bench.join()
                bare.append(started(ray, resources=HEAD))
                bench.join()
                bench.lose()
                bench.drain()
        return bare, fresh, training, bench
    finally:
        if session is not None:
            session.shutdown()
        ray.shutdown()
        cluster.shutdown()


class Bench:
    """One cluster, one group, and what was measured."""

    def __init__(self, ray: Any, cluster: Any, session: Any, group: Any) -> None:
        self._ray = ray
        self._cluster = cluster
        self._session = session
        self._group = group
        self._nodes: list[Any] = []
        self.joins: list[float] = []
        self.losses: list[float] = []
        self.kills: list[float] = []
        self.drains: list[float] = []

    def join(self) -> None:
        """A node joins."""
        node = self._cluster.add_node(num_cpus=1, num_gpus=1, wait=False)  # returns about when Ray has it
        until(lambda: any(one["NodeID"] == node.node_id and one["Alive"] for one in self._ray.nodes()))
        began = time.monotonic()
        self._nodes.append(node)
        stepped(self._group, len(self._nodes) + 1)
        self.joins.append(time.monotonic() - began)
        time.sleep(2.0)  # until warm hosts are there again

    def lose(self) -> None:
        """A node is killed."""
        node = self._nodes.pop(0)
        self._group.step(timeout=WAIT_S)
        raylets = [info.process.pid for info in node.all_processes["raylet"]]
        pids = [one for raylet in raylets for one in (raylet, *(each.pid for each in processes.descendants(raylet)))]
        began, wall = time.monotonic(), time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        stepped(self._group, len(self._nodes) + 1)
        self.kills.append(time.monotonic() - began)
        noticed = next(one["since"] for one in self._session.status()["fleet"] if one["node"] == node.node_id)
        self.losses.append(self.kills[-1] - (noticed - wall))
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self) -> None:
        """A node is drained, urgently; it is empty when no process of a task is there."""
        node = self._nodes.pop(0)
        self._group.step(timeout=WAIT_S)
        tasks = [one for one in self._session.tasks() if any(m.node == node.node_id for m in one.members)]
        members = [member for task in tasks for member in task.members if member.node == node.node_id]
        there = [processes.process(member.pid) for member in members]
        began = time.monotonic()
        self._session.drain_node(node.node_id, DEADLINE_S, "bench")
        while any(one.alive for one in there):
            self._group.step(timeout=WAIT_S)
        self.drains.append(time.monotonic() - began)
        stepped(self._group, len(self._nodes) + 1)
        self._cluster.remove_node(node, allow_graceful=False)


def stepped(group: Any, size: int) -> None:
    """Steps until one is complete in a world of that size."""
    deadline = time.monotonic() + WAIT_S
    while group.step(timeout=WAIT_S).size != size:
        assert time.monotonic() < deadline, f"there are not {size} members after {WAIT_S:.0f} s"
        time.sleep(0.005)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def started(ray: Any, kind: type[Plain] = Plain, **options: Any) -> float:
    """Seconds from the making of a bare actor until its first call has returned."""
    began = time.perf_counter()
    actor = ray.remote(kind).options(num_cpus=0, **options).remote()
    ray.get(actor.ping.remote(), timeout=WAIT_S)
    seconds = time.perf_counter() - began
    ray.kill(actor)
    time.sleep(0.5)
    return seconds


def on_a_fresh_node(ray: Any, cluster: Any, kind: type[Plain], at: int) -> float:
    node = cluster.add_node(num_cpus=1, num_gpus=1, resources={f"fresh{at}": 1}, wait=False)
    until(lambda: any(one["NodeID"] == node.node_id and one["Alive"] for one in ray.nodes()))
    seconds = started(ray, kind, resources={f"fresh{at}": 1})
    cluster.remove_node(node)
    until(lambda: not any(one["NodeID"] == node.node_id and one["Alive"] for one in ray.nodes()))
    return seconds


def row(name: str, seconds: list[float], base: float, goal: float | None = None) -> None:
    middle, worst = statistics.median(seconds), max(seconds)
    said = f"  [{goal:g}x]" if goal else ""
    print(f"{name:<58}{middle:>8.2f}s{worst:>8.2f}s{middle / base:>8.2f}x{said}", flush=True)


if __name__ == "__main__":
    main()
