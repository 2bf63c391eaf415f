"""What it costs to watch 100, 1,000 and 10,000 nodes: the node machine alone, on one core.

A look is what a driver does every second: it says of every node what Ray lists and that its link speaks, ticks, and
asks for the views. Everything else is one event. CPU time of the calls into the machine; what a driver spends on Ray
and links is in other tables. The scan beside it compares every node with what was known of it and
makes a fresh list of those that are there, as a loop over `ray.nodes()` does; it knows no windows, flapping or drains.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.core.resources import Resources
from trimtab.machines.nodes import events
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.model.nodes import NodeFacts

SIZES = (100, 1_000, 10_000)
LOOKS = 20
ROUNDS = 200
KINDS = (
    "look, nothing changed",
    "  a node of it, microseconds",
    "tick, nothing due",
    "views, nothing changed",
    "views, one node changed",
    "a node joins",
    "a node is lost",
    "a node returns",
    "a node falls silent and speaks again",
    "a drain is asked and is over",
    "tick, a change is told",
    "snapshot and back",
)
TOTAL = Resources.of(gpu=8, cpu=64)


@dataclass
class Watch:
    """A machine that watches so many nodes, and the times of what it is asked."""

    size: int
    machine: NodeMachine = field(default_factory=NodeMachine)
    now: float = 0.0
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for at in range(self.size):
            self.machine.handle(self.seen(at), self.now)
        self.pass_windows()

    def seen(self, at: int) -> events.NodeSeen:
        """What Ray says of a node."""
        facts = NodeFacts(
            TOTAL, kind="H100" if at % 10 else "A100", address=f"10.0.{at // 256}.{at % 256}", head=at == 0
        )
        return events.NodeSeen(f"node{at:05d}", facts)

    def timed(self, kind: str, call: Callable[[], object]) -> None:
        """One call, timed."""
        began = time.thread_time()
        call()
        self.times[kind].append(time.thread_time() - began)

    def tell(self, kind: str, *news: events.NodeEvent) -> None:
        """Events, timed together."""
        self.now += 0.001
        self.timed(kind, lambda: [self.machine.handle(one, self.now) for one in news])

    def pass_windows(self, kind: str = "") -> None:
        """Whatever is pending is told."""
        self.now += 10.0
        self.tell(kind, events.NodeTick())

    def look(self) -> None:
        """All that a driver says in a second in which nothing happens."""
        self.now += 1.0
        news = [one for at in range(self.size) for one in (self.seen(at), events.HeartbeatReceived(f"node{at:05d}"))]

        def watch() -> None:
            for one in news:
                self.machine.handle(one, self.now)
            self.machine.handle(events.NodeTick(), self.now)
            self.machine.views()

        self.timed("look, nothing changed", watch)
        self.times["  a node of it, microseconds"].append(self.times["look, nothing changed"][-1] / self.size * 1e3)

    def live(self, rounds: int) -> None:
        """Rounds of everything that happens to nodes; each leaves them as they were."""
        machine = self.machine
        for at in range(rounds):
            name = f"node{1 + at * 7919 % (self.size - 1):05d}"
            self.tell("tick, nothing due", events.NodeTick())
            self.timed("views, nothing changed", lambda: machine.views())
            self.tell(
                "a node falls silent and speaks again",
                events.HeartbeatMissed(name, 2.0),
                events.HeartbeatReceived(name),
            )
            self.timed("views, one node changed", lambda: machine.views())
            deadline = self.now + 600.0
            self.tell(
                "a drain is asked and is over",
                events.DrainRequested(name, deadline, "spot"),
                events.DrainCancelled(name),
            )
            self.tell("a node is lost", events.ConnectionBroken(name, "refused"))
            self.tell("a node returns", events.HeartbeatReceived(name))
            self.pass_windows("tick, a change is told")
            self.tell("a node joins", self.seen(self.size + at))
            machine.handle(events.NodeGone(f"node{self.size + at:05d}", expected=True), self.now)
            self.now += machine.policy.forget_s  # losses and those that went are forgotten
            machine.handle(events.NodeTick(), self.now)
            machine.views()
        for _ in range(3):
            self.timed("snapshot and back", lambda: NodeMachine.load(machine.dump()))


def scan_ms(size: int) -> float:
    """A plain look at every node, as a loop over `ray.nodes()` does it."""
    listed = [
        {
            "NodeID": f"node{at:05d}",
            "Alive": True,
            "Resources": {"GPU": 8.0, "CPU": 64.0},
            "NodeManagerAddress": f"10.{at}",
        }
        for at in range(size)
    ]
    known = {one["NodeID"]: dict(one) for one in listed}
    times = []
    for _ in range(LOOKS):
        began = time.thread_time()
        there = []
        for one in listed:
            if not one["Alive"]:
                continue
            if known.get(one["NodeID"]) != one:
                known[one["NodeID"]] = dict(one)
            there.append(one)
        times.append(time.thread_time() - began)
    return sorted(times)[len(times) // 2] * 1e3


def memory_mb(size: int) -> float:
    gc.collect()
    tracemalloc.start()
    watch = Watch(size)
    watch.machine.views()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / 2**20


def measure(size: int) -> Watch:
    watch = Watch(size)
    watch.look()
    watch.times.clear()
    for _ in range(LOOKS):
        watch.look()
    watch.live(ROUNDS)
    watch.machine.check()
    return watch


def main() -> None:
    print("Node machine alone, one core; milliseconds, median and p99")
    found = [measure(size) for size in SIZES]
    print(f"{'nodes':<40}" + "".join(f"{size:>20,}" for size in SIZES) + "  growth of the median")
    for kind in KINDS:
        rows = [sorted(one.times[kind]) for one in found]
        cells = [(row[len(row) // 2] * 1e3, row[int(len(row) * 0.99)] * 1e3) for row in rows]
        line(kind, [f"{median:>9.4f} {most:>9.4f}" for median, most in cells], cells[-1][0] / max(cells[0][0], 1e-9))
    scans = [scan_ms(size) for size in SIZES]
    looks = [sorted(one.times[KINDS[0]])[LOOKS // 2] * 1e3 for one in found]
    line("plain scan of all nodes", [f"{one:.4f}" + " " * 10 for one in scans], scans[-1] / scans[0])
    line("  look, against it", [f"{look / scan:.1f}x" for look, scan in zip(looks, scans, strict=True)])
    line("  of one core, with a look a second", [f"{look / 1e3:.2%}" for look in looks])
    line("memory of the nodes, MB", [f"{memory_mb(size):.1f}" for size in SIZES])


def line(label: str, cells: list[str], growth: float | None = None) -> None:
    print(f"{label:<40}" + "".join(f"{cell:>20}" for cell in cells) + (f"{growth:>10.1f}x" if growth else ""))


if __name__ == "__main__":
    main()
