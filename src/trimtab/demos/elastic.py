"""`trimtab demo elastic`: training goes on while nodes join, are killed, and are drained.

It starts its own Ray of several real nodes on this machine, with a fake GPU each, and touches no other cluster. Every
statement is checked against a run with fixed membership; the exit status tells whether all checks passed. All processes
it started are gone when it ends, also after Ctrl-C.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import uuid
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.demos.elastic_loop import LoopPrinter, Say
from trimtab.model.workflow import Cluster, Node
from trimtab.runtime.procs import processes
from trimtab.runtime.rayapi.embedded import EmbeddedRay, quiet

PACE_S = 0.3  # minimum time of a step
STEPS_EACH = 3  # in each world, once it has the right size
SIZE_S = 90.0  # timeout for a world of the right size
DEADLINE_S = 9.0  # of the drain: short, so that it is not batched with other changes
NOT_DONE = 4  # exit status if a check failed
GONE_S = 15.0
LOOK_S = 0.2


def run_demo(backend: str = "auto", say: Say | None = None) -> int:
    """Runs the demo, cleans up, and returns the exit status: 0 if all checks passed."""
    seen = _ProcessCensus()
    talk = LoopPrinter(say or functools.partial(print, file=sys.stdout, flush=True))
    with quiet("ray", "trimtab"), EmbeddedRay(Cluster((Node("head", 1, cpus=1),))) as ray:
        talk.lines(f"Ray at {ray.address}: one node with one (fake) GPU, and more to come", "")
        demo = _Demo(ray, seen, talk, backend)
        demo.train()
        seen.look()
    left = seen.left(GONE_S)
    demo.check(not left, f"no process is left: all {len(seen.found)} have ended", f"left: {left}")
    talk.lines("", demo.verdict())
    return NOT_DONE if demo.failed else 0


class _Demo:
    """The scenes in order."""

    def __init__(self, ray: EmbeddedRay, seen: _ProcessCensus, talk: LoopPrinter, backend: str) -> None:
        self._ray = ray
        self._seen = seen
        self._talk = talk
        self._backend = backend
        self._results: list[Any] = []
        self.passed = 0
        self.failed = 0

    def check(self, holds: bool, words: str, otherwise: str = "") -> None:
        self.passed, self.failed = self.passed + holds, self.failed + (not holds)
        self._talk.lines(f"  {'✓' if holds else '✗'} {words}" + (f" ({otherwise})" if otherwise and not holds else ""))

    def verdict(self) -> str:
        if self.failed:
            return f"❌ {self.failed} of {self.passed + self.failed} checks failed"
        return f"🎉 All {self.passed} checks passed"

    def train(self) -> None:
        from trimtab.demos.elastic_training import ElasticTrainer
        from trimtab.runtime.client.session import connect
        from trimtab.runtime.elastic.group import ElasticGroup

        session = connect(name=f"elastic-demo-{uuid.uuid4().hex[:6]}")
        self._talk.session = session
        self._talk.banner()
        try:
            with ElasticGroup(
                ElasticTrainer,
                kwargs={"backend": self._backend, "slow_s": PACE_S / 2},
                per_node={"gpu": 1},
                min=1,
                max=8,
                session=session,
                step_timeout_s=60.0,
                tell=self._talk.heard,
            ) as group:
                self._scenes(group, session)
                view = group.view()
            self._summary(view)
        finally:
            session.shutdown()

    def _scenes(self, group: Any, session: Any) -> None:
        training = _Training(group, self._talk)
        try:
            training.until(1)
            self._scene("Three workers join while training goes on")
            lost, leaver, stayer, late = (Node(f"worker-{number}", 1, cpus=1) for number in range(1, 5))
            for node in (lost, leaver, stayer):
                self._ray.add(node)
            training.until(4)
            self._scene(
                f"kill -9 of every process of worker {self._ray.node_id(lost.name)[:10]}... "
                "(Ray itself detects it after some 14 s)"
            )
            self._ray.kill(lost.name, training.in_step)
            training.until(3)
            leaving = self._ray.node_id(leaver.name)
            self._scene(f"Worker {leaving[:10]}... is drained: it stops in {DEADLINE_S:.0f} s")
            session.drain_node(leaving, DEADLINE_S, "demo")
            training.until(2)
            self._ray.kill(leaver.name)
            self._scene("One more worker joins")
            self._ray.add(late)
            training.until(3)
        finally:
            training.stop()
        self._results = training.results

    def _scene(self, words: str) -> None:
        self._seen.look()
        self._talk.lines("", f"── {words} " + "─" * max(2, 100 - len(words)))

    def _summary(self, view: dict[str, Any]) -> None:
        from trimtab.demos.elastic_training import TOLERANCE, fixed_run

        self._scene("Results")
        steps = len(self._results)
        losses = [next(value.loss for value in result.values if value is not None) for result in self._results]
        sizes, redone = [result.size for result in self._results], sum(result.redone for result in self._results)
        reference = fixed_run(steps)
        worst = max(abs(loss - wanted) / wanted for loss, wanted in zip(losses, reference, strict=True))
        worlds = [size for at, size in enumerate(sizes) if at == 0 or size != sizes[at - 1]]
        self.check(worlds[-4:] == [4, 3, 2, 3] and worlds[0] == 1, f"actors, over time: {', '.join(map(str, worlds))}")
        self.check(view["step"] == steps, f"{steps} steps, each counted once", f"the group says {view['step']}")
        if redone:
            self._talk.lines(f"  · the lost node interrupted a step, which was run again completely (redone: {redone})")
        self.check(
            worst < TOLERANCE,
            f"the loss of each step equals that of a run with fixed membership (largest difference: {worst:.1e})",
        )
        begin, end = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        self.check(end < begin, f"the loss fell from {begin:.4f} to {end:.4f}")


class _Training:
    """Trains on its own thread, because nodes can be started from the main thread only."""

    def __init__(self, group: Any, talk: LoopPrinter) -> None:
        self._group = group
        self._talk = talk
        self._stopped = threading.Event()
        self._begun = threading.Event()
        self._stepped = threading.Condition()
        self._fault: BaseException | None = None
        self.results: list[Any] = []
        self._thread = threading.Thread(target=self._train, name="trimtab-demo", daemon=True)
        self._thread.start()

    def until(self, size: int) -> None:
        """Trains until the world has this size, plus STEPS_EACH steps."""
        deadline = time.monotonic() + SIZE_S
        since, seen = len(self.results), 0
        while seen < STEPS_EACH:
            with self._stepped:
                self._stepped.wait(LOOK_S)
            if self._fault is not None:
                raise self._fault
            seen = sum(result.size == size for result in self.results[since:])
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"the world did not reach {size} members in {SIZE_S:.0f} s",
                    hint="this machine may be too busy for several nodes: try again later",
                )

    def in_step(self) -> None:
        self._begun.clear()
        self._begun.wait(SIZE_S)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(SIZE_S)

    def _train(self) -> None:
        try:
            while not self._stopped.wait(PACE_S / 2):
                self._begun.set()
                result = self._group.step(timeout=SIZE_S)
                self._talk.step(result)
                with self._stepped:
                    self.results.append(result)
                    self._stepped.notify_all()
        except BaseException as fault:
            self._fault = fault


class _ProcessCensus:
    """Records the descendants of this process, to check that none is left."""

    def __init__(self) -> None:
        self._before = set(processes.descendants(os.getpid()))
        self.found: set[processes.ProcessIdentity] = set()

    def look(self) -> None:
        self.found.update(set(processes.descendants(os.getpid())) - self._before)

    def left(self, timeout_s: float) -> list[int]:
        return sorted(process.pid for process in processes.gone(self.found, timeout_s))
