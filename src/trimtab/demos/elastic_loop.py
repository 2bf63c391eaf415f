"""A training loop that grows and shrinks with a Ray cluster, and says what it sees: the example of `auto_scaling/`.

It runs on a cluster that is there and starts none: without one it says how to start it, with exit status 4. Workers
that join are trained on from the next step, workers that go are left in time, and what it made is gone when it ends,
also after Ctrl-C. The demo uses the same words.
"""

from __future__ import annotations

import argparse
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.core.resources import GRAIN

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.elastic.view import GroupLogEntry, StepResult

WIDTH = 60
PACE_S = 1.0  # a step, so that people can follow
UNITS = ("gpu", "worker_unit", "cpu")  # what a member takes one of: the first that any node has
Say = Callable[[str], None]


class LoopPrinter:
    """Says what a training loop does, in whole lines, whoever speaks."""

    def __init__(self, say: Say, unit: str = "gpu") -> None:
        self._say = say
        self._lock = threading.Lock()
        self._unit = unit
        self._spawned = 0
        self._epoch = 0  # that was told in full
        self.session: Session | None = None
        self.happened: list[GroupLogEntry] = []

    def banner(self) -> None:
        """What this is, first."""
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
        """Say them, together."""
        with self._lock:
            for line in lines:
                self._say(line)

    def heard(self, one: GroupLogEntry) -> None:
        """Something happened to the group."""
        self.happened.append(one)
        self.lines(*self._words(one))

    def step(self, result: StepResult) -> None:
        """A step is complete: all of it in the first step of a world, one line after that."""
        done = [one for one in result.values if one is not None]
        average = sum(one.seconds for one in done) / len(done)
        head = f"📊 Step {result.number} completed:"
        if result.world.epoch == self._epoch:
            self.lines(f"{head} {result.size} actors trained, average duration {average:.3f}s, loss={done[0].loss:.4f}")
            return
        self._epoch = result.world.epoch
        self.lines(
            head,
            f"   - {result.size} actors trained",
            f"   - Average duration: {average:.3f}s",
            *(f"   - Actor {rank}: {_actor(value)}" for rank, value in enumerate(result.values)),
            f"   - All rows: loss={done[0].loss:.4f}",
        )

    def _words(self, one: GroupLogEntry) -> list[str]:
        node = f"{one.node[:10]}..."
        if one.kind == "found":
            return ["", f"🖥️  Worker {node} is there with {self._amount(one)}"]
        if one.kind == "joined":
            return ["", f"🆕 Detected new worker: {node} with {self._amount(one)}"]
        if one.kind == "started":
            self._spawned += 1
            return [
                f"✅ Created placement group {self._group(one.task)}",
                f"🎭 Spawned training actor {self._spawned - 1} on node {node}",
            ]
        if one.kind == "step":
            return ["", f"🚀 Running training step {one.step} on {one.size} actors..."]
        signs = {
            "draining": "⏳", "node lost": "💥", "node left": "👋", "lost": "💥", "left": "👋",
            "redone": "🔁", "waits": "⌛", "gave up": "❌",
        }  # fmt: skip
        return [f"{signs[one.kind]} {_shortened(one.sentence)}"] if one.kind in signs else []

    def _amount(self, one: GroupLogEntry) -> str:
        name = {"gpu": "GPUs", "cpu": "CPUs"}.get(self._unit, self._unit)
        return f"{one.total.get(self._unit) / GRAIN:.1f} {name}"

    def _group(self, task: str) -> str:
        places = self.session.explain(task).places if self.session is not None else ()
        return places[0].group if places else "?"


def _actor(value: Any) -> str:
    if value is None:
        return "lost; the others have completed the step"
    loss = "no rows" if math.isnan(value.own_loss) else f"loss={value.own_loss:.4f}"
    return f"{value.device} training: {loss}"


def _shortened(sentence: str) -> str:
    """A sentence for people: ids of nodes as short as everywhere else."""
    short = re.sub(r"\b([0-9a-f]{10})[0-9a-f]{46}\b", r"\1...", sentence)
    return short[:1].upper() + short[1:]


def unit_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """What one member takes: a GPU where any node has one, else a worker unit, else a CPU."""
    names = {name for node in nodes for name, amount in node["total"].items() if amount >= 1}
    return next((unit for unit in UNITS if unit in names), UNITS[0])


def run_loop(
    steps: int,
    *,
    address: str | None = None,
    backend: str = "auto",
    pace_s: float = PACE_S,
    least: int = 1,
    most: int | None = None,
    wait_s: float = 600.0,
    say: Say = print,
) -> int:
    """Train for so many steps on the cluster that is there; the exit status."""
    from trimtab.demos.elastic_training import ElasticTrainer
    from trimtab.runtime.client.connection import RayConnection
    from trimtab.runtime.elastic.group import ElasticGroup

    try:
        link = RayConnection(address, start=False)
    except UnreachableError as fault:
        raise UnreachableError(
            f"No Ray cluster found: {fault.what}", hint="start one with ./start_ray_cluster.sh, or name it: --address"
        ) from None
    try:
        talk = LoopPrinter(say, unit_of(_totals(link.ray)))
        talk.banner()
        with ElasticGroup(
            ElasticTrainer,
            kwargs={"backend": backend, "slow_s": pace_s / 2},
            per_node={unit_of(_totals(link.ray)): 1},
            min=least,
            max=most,
            wait_s=wait_s,
            tell=talk.heard,
        ) as group:
            talk.session = group.session
            for _ in range(steps):
                talk.step(group.step())
                time.sleep(pace_s / 2)
        talk.lines("", f"🎉 {steps} steps completed")
    finally:
        link.close()
    return 0


def _totals(ray: Any) -> list[dict[str, Any]]:
    names = {"GPU": "gpu", "CPU": "cpu"}
    return [
        {"total": {names.get(name, name): amount for name, amount in node["Resources"].items()}}
        for node in ray.nodes()
        if node["Alive"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The loop as a program of its own."""
    parser = argparse.ArgumentParser(description="Train on all workers of a Ray cluster, while they come and go.")
    parser.add_argument("--steps", type=int, default=100, help="training steps (100)")
    parser.add_argument("--address", help="the cluster; else RAY_ADDRESS, else the one that runs here")
    parser.add_argument("--backend", choices=("auto", "torch", "numpy"), default="auto", help="what reckons")
    parser.add_argument("--pace", type=float, default=PACE_S, metavar="S", help="seconds a step takes at least (1)")
    parser.add_argument("--min", type=int, default=1, help="fewest actors; with fewer it waits (1)")
    parser.add_argument("--max", type=int, help="most actors (as many as there is room for)")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="how long it waits for them (600)")
    asked = parser.parse_args(arguments)
    try:
        return run_loop(
            asked.steps,
            address=asked.address,
            backend=asked.backend,
            pace_s=asked.pace,
            least=asked.min,
            most=asked.max,
            wait_s=asked.wait,
            say=_print,
        )
    except TrimtabError as fault:
        parser.exit(fault.exit_status, f"error: {fault}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped: the training actors are gone, the cluster is as it was\n")


def _print(line: str) -> None:
    print(line, flush=True)
