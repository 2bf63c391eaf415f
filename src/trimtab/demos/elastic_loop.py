"""A training loop that scales with a Ray cluster and prints what happens: the example in `auto_scaling/`.

It runs on an existing cluster and starts none: without one it exits with 4 and a hint. Joining workers take part from
the next step, draining workers leave in time, and all it created is removed when it ends, also after Ctrl-C. The
elastic demo uses the same printer.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.core.resources import GRAIN

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.elastic.view import GroupLogEntry, StepResult
    from trimtab.runtime.rayapi.nodes import RayNode

WIDTH = 60
ROWS_EACH, HIDDEN = 8_000, 1_024  # work of a member in a step: some tenths of a second of a CPU core
UNITS = ("gpu", "worker_unit", "cpu")  # what a member takes one of: the first that any node has
Say = Callable[[str], None]


class LoopPrinter:
    """Prints what a training loop does, line by line, from any thread."""

    def __init__(self, say: Say, unit: str = "gpu") -> None:
        self._say = say
        self._lock = threading.Lock()
        self._unit = unit
        self._spawned = 0
        self._epoch = 0  # last epoch printed in full
        self.session: Session | None = None
        self.happened: list[GroupLogEntry] = []

    def banner(self) -> None:
        what = {"gpu": "1 GPU", "cpu": "1 CPU"}.get(self._unit, f"1 {self._unit}")
        self.lines(
            "🎯 DYNAMIC TRAINING LOOP STARTED",
            "=" * WIDTH,
            "💡 This training loop will:",
            "   • Run training steps on all available actors",
            "   • Monitor for new workers at each step",
            "   • Automatically scale up when new workers join, and down before they leave",
            f"   • Use {what} per training actor",
            "",
            "🔄 To add workers: ./add_ray_worker.sh",
            "=" * WIDTH,
        )

    def lines(self, *lines: str) -> None:
        with self._lock:
            for line in lines:
                self._say(line)

    def heard(self, entry: GroupLogEntry) -> None:
        self.happened.append(entry)
        self.lines(*self._words(entry))

    def step(self, result: StepResult) -> None:
        """Prints a step: in full for the first step of a world, else a line."""
        done = [report for report in result.values if report is not None]
        average = sum(report.seconds for report in done) / len(done)
        rate = sum(report.rows for report in done) / max(max(report.seconds for report in done), 1e-9)
        head = f"📊 Step {result.number} completed:"
        if result.world.epoch == self._epoch:
            figures = f"average duration {average:.3f}s, {rate:,.0f} rows/s, loss={done[0].loss:.4f}"
            self.lines(f"{head} {result.size} actors trained, {figures}")
            return
        self._epoch = result.world.epoch
        self.lines(
            head,
            f"   - {result.size} actors trained",
            f"   - Average duration: {average:.3f}s",
            f"   - Throughput: {rate:,.0f} rows/s",
            *(f"   - Actor {rank}: {_actor(value)}" for rank, value in enumerate(result.values)),
            f"   - All rows: loss={done[0].loss:.4f}",
        )

    def _words(self, entry: GroupLogEntry) -> list[str]:
        node = f"{entry.node[:10]}..."
        if entry.kind == "found":
            return ["", f"🖥️  Worker {node} found with {self._amount(entry)}"]
        if entry.kind == "joined":
            return ["", f"🆕 Detected new worker: {node} with {self._amount(entry)}"]
        if entry.kind == "started":
            self._spawned += 1
            return [
                f"✅ Created placement group {self._group(entry.task)}",
                f"🎭 Spawned training actor {self._spawned - 1} on node {node}",
            ]
        if entry.kind == "step":
            return ["", f"🚀 Running training step {entry.step} on {entry.size} actors..."]
        signs = {
            "draining": "⏳", "node lost": "💥", "node left": "👋", "lost": "💥", "left": "👋",
            "redone": "🔁", "waits": "⌛", "gave up": "❌",
        }  # fmt: skip
        return [f"{signs[entry.kind]} {_shortened(entry.sentence)}"] if entry.kind in signs else []

    def _amount(self, entry: GroupLogEntry) -> str:
        name = {"gpu": "GPUs", "cpu": "CPUs"}.get(self._unit, self._unit)
        return f"{entry.total.get(self._unit) / GRAIN:.1f} {name}"

    def _group(self, task: str) -> str:
        places = self.session.explain(task).places if self.session is not None else ()
        return places[0].group if places else "?"


def _actor(value: Any) -> str:
    if value is None:
        return "lost; the others have completed the step"
    loss = "no rows" if math.isnan(value.own_loss) else f"loss={value.own_loss:.4f}"
    return f"{value.device} training: {loss}"


def _shortened(sentence: str) -> str:
    short = re.sub(r"\b([0-9a-f]{10})[0-9a-f]{46}\b", r"\1...", sentence)
    return short[:1].upper() + short[1:]


def unit_of(nodes: Iterable[RayNode]) -> str:
    """The resource a member takes: a GPU if any node has one, else a worker unit, else a CPU."""
    from trimtab.runtime.rayapi.node_view import shown

    names = {name for node in nodes for name, amount in shown(node.resources).items() if amount >= 1}
    return next((unit for unit in UNITS if unit in names), UNITS[0])


def run_loop(
    steps: int,
    *,
    address: str | None = None,
    backend: str = "auto",
    rows: int = ROWS_EACH,
    pace_s: float = 0.0,
    min_actors: int = 1,
    max_actors: int | None = None,
    wait_s: float = 600.0,
    say: Say = print,
) -> int:
    """Trains for some steps on the running cluster; returns the exit status."""
    from trimtab.demos.elastic_training import ElasticTrainer
    from trimtab.runtime.elastic.group import ElasticGroup
    from trimtab.runtime.rayapi.connect import RayConnection
    from trimtab.runtime.rayapi.nodes import live_nodes

    try:
        link = RayConnection(address, start=False)
    except UnreachableError as fault:
        raise UnreachableError(
            f"No Ray cluster found: {fault.what}", hint="start one with ./start_ray_cluster.sh, or name it: --address"
        ) from None
    try:
        unit = unit_of(live_nodes(link.ray))
        talk = LoopPrinter(say, unit)
        talk.banner()
        with ElasticGroup(
            ElasticTrainer,
            kwargs={"backend": backend, "rows_each": rows, "hidden": HIDDEN},
            per_node={unit: 1},
            min=min_actors,
            max=max_actors,
            wait_s=wait_s,
            tell=talk.heard,
        ) as group:
            talk.session = group.session
            for _ in range(steps):
                began = time.monotonic()
                talk.step(group.step())
                time.sleep(max(0.0, pace_s - (time.monotonic() - began)))
        talk.lines("", f"🎉 {steps} steps completed")
    finally:
        link.close()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The loop as a program."""
    parser = argparse.ArgumentParser(description="Train on all workers of a Ray cluster while they join and leave.")
    parser.add_argument("--steps", type=int, default=100, help="training steps (100)")
    parser.add_argument("--address", help="the cluster (default: RAY_ADDRESS, or the local cluster)")
    parser.add_argument("--backend", choices=("auto", "torch", "numpy"), default="auto", help="compute backend")
    parser.add_argument("--rows", type=int, default=ROWS_EACH, help=f"rows of an actor in a step ({ROWS_EACH:,})")
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="minimum seconds of a step (0)")
    parser.add_argument("--min", type=int, default=1, help="minimum of actors; with fewer it waits (1)")
    parser.add_argument("--max", type=int, help="maximum of actors (as many as fit)")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="timeout of the wait (600)")
    options = parser.parse_args(arguments)
    try:
        return run_loop(
            options.steps,
            address=options.address,
            backend=options.backend,
            rows=max(1, options.rows),
            pace_s=max(0.0, options.pace),
            min_actors=options.min,
            max_actors=options.max,
            wait_s=options.wait,
            say=functools.partial(print, flush=True),
        )
    except TrimtabError as fault:
        parser.exit(fault.exit_status, f"error: {fault}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped: the training actors are gone, the cluster is unchanged\n")
