"""Does re-planning pay, and how long does a decision take?

Drifting workloads in emulated time: an iteration takes what the planner's simulation says of the TRUE costs under the
plan in place, times noise; the loop sees only what it could measure. Against it: the first plan kept (moved only when
its GPUs go), the best plan in hindsight of those that fit from beginning to end, and an oracle that knows the true
costs and re-plans for free before every iteration. Noise is that of real training steps where the traces are at hand
(`TRIMTAB_TRACES`, else ../shared/data: alibaba gpu-v2020 mini-batches), else generated with their spread.
"""

from __future__ import annotations

import csv
import gzip
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.placement import workflow_job
from trimtab.loop import events as e
from trimtab.loop.deciding import Planner
from trimtab.loop.machine import LoopMachine
from trimtab.loop.seats import Sited
from trimtab.model.plan import Plan
from trimtab.model.run import Iteration, Measured, RunMode, RunRules, Stage
from trimtab.model.workflow import Cluster, Component, Job, Node, Variant, WeightSync, Workflow

TRACES = Path(os.environ.get("TRIMTAB_TRACES") or Path(__file__).parents[2] / "shared" / "data")
MOVE_S = 20.0  # what a move really costs; the loop assumes 60 until it has seen one
ITERATIONS = 80
GROWTH = 60
RULES = RunRules(mode=RunMode.auto)


def _part(name: str, points: dict[int, float], after: str = "", **more: object) -> Component:
    variant = Variant(seconds={"": tuple(sorted(points.items()))}, floor_seconds=float(more.pop("floor", 0.0)))  # type: ignore[arg-type]
    return Component(name, (variant,), (after,) if after else (), **more)  # type: ignore[arg-type]


def _nodes(count: int, first: int = 0) -> tuple[Node, ...]:
    return tuple(Node(f"node{first + i}", 8) for i in range(count))


def grpo(gpus: int) -> Workflow:
    """Rollout, reference, trainer: what does not scale perfectly is better off side by side."""
    part = {g: gpus * 60 / g for g in (gpus // 8, gpus)}
    return Workflow(
        (
            _part("rollout", {g: 15 + s for g, s in part.items()}, switch_seconds=6.0, engine="vllm", floor=12.0),
            _part("reference", {g: 4 + s / 4 for g, s in part.items()}, "rollout", switch_seconds=3.0, engine="fsdp"),
            _part(
                "trainer", {g: 12 + s for g, s in part.items()}, "reference", switch_seconds=6.0, engine="fsdp",
                granularity=32,
            ),
        ),
        batches=256,
        weight_sync=WeightSync("trainer", "rollout", 1.0, 3.0),
    )  # fmt: skip


def ppo(gpus: int, switch_s: float = 15.0) -> Workflow:
    """Five components with a critic; how dear it is to take turns decides what shares GPUs."""
    part = {g: gpus * 40 / g for g in (gpus // 8, gpus)}
    more = {"switch_seconds": 3.0, "engine": "fsdp"}
    return Workflow(
        (
            _part("rollout", {g: 12 + s for g, s in part.items()}, switch_seconds=switch_s, engine="vllm", floor=10.0),
            _part("reference", {g: 3 + s / 5 for g, s in part.items()}, "rollout", **more),
            _part("reward", {g: 2 + s / 6 for g, s in part.items()}, "rollout", **more),
            _part("critic", {g: 6 + s / 2 for g, s in part.items()}, "reward", granularity=32, **more),
            Component(
                "trainer", _part("trainer", {g: 8 + s for g, s in part.items()}).variants, ("reference", "critic"),
                granularity=32, switch_seconds=switch_s, engine="fsdp",
            ),
        ),
        batches=256,
        weight_sync=WeightSync("trainer", "rollout", 1.0, 3.0),
    )  # fmt: skip


# ---- the world ----------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A workload: true levels by iteration, and what happens to the cluster before an iteration."""

    name: str
    job: Job
    level: Callable[[int], dict[str, float]]
    nodes: dict[int, tuple[Cluster, e.Why]] = field(default_factory=dict)
    extra_every: int = 0  # validation in every so many iterations, not announced
    noises: int = 5

    def cluster(self, iteration: int) -> Cluster:
        """What is there in an iteration."""
        now = self.job.cluster
        for at in sorted(self.nodes):
            if at <= iteration:
                now = self.nodes[at][0]
        return now

    @property
    def always(self) -> Cluster:
        """The nodes that are there from beginning to end."""
        names = set.intersection(*({n.name for n in self.cluster(t).nodes} for t in range(1, ITERATIONS + 1)))
        return Cluster(tuple(node for node in self.job.cluster.nodes if node.name in names))


def grows(name: str = "rollout", to: float = 3.0) -> Callable[[int], dict[str, float]]:
    return lambda t: {name: 1 + (to - 1) * min(t, GROWTH) / GROWTH}


def cases() -> list[Case]:
    small, large = Cluster(_nodes(2)), Cluster(_nodes(8))
    joined, lost = Cluster((*_nodes(8), *_nodes(2, 8))), Cluster((*_nodes(7), *_nodes(2, 8)))
    happens = {20: (joined, e.Why.joined), 45: (lost, e.Why.lost)}
    lost_early = {15: (Cluster(_nodes(7)), e.Why.lost), 40: (Cluster(_nodes(8)), e.Why.joined)}
    return [
        Case("grpo 16 GPUs, rollout grows 3x", Job(small, grpo(16)), grows()),
        Case("grpo 64 GPUs, rollout grows 3x", Job(large, grpo(64)), grows()),
        Case("ppo 64 GPUs, rollout grows 3x", Job(large, ppo(64)), grows()),
        Case("ppo 64 GPUs, first plan shares, grows 3x", Job(large, ppo(64, 6.0)), grows()),
        Case("grpo 64 GPUs, and 2 nodes join, 1 is lost", Job(large, grpo(64)), grows(), happens),
        Case("ppo 64 GPUs, and 1 node is lost, and back", Job(large, ppo(64)), grows(), lost_early),
        Case("grpo 64 GPUs, rollout jumps to 2x", Job(large, grpo(64)), lambda t: {"rollout": 2.0 if t > 20 else 1.0}),
        Case("grpo 64 GPUs, rollout shrinks to 1/2", Job(large, grpo(64)), grows(to=0.5)),
        Case("grpo 64 GPUs, noise alone", Job(large, grpo(64)), lambda t: {}, noises=20),
        Case("ppo 64 GPUs, noise alone", Job(large, ppo(64)), lambda t: {}, noises=20),
        Case("grpo 64 GPUs, noise, validation every 5th", Job(large, grpo(64)), lambda t: {}, extra_every=5, noises=20),
    ]


def noises(names: tuple[str, ...], seed: int) -> tuple[dict[str, np.ndarray], str]:
    """Factors per component and iteration."""
    files = sorted(TRACES.glob("alibaba_gpu2020_minibatch_*.csv.gz"))
    rng = random.Random(seed)
    if files:
        series = [one for file in files for one in _trace(file)]
        some = rng.sample(series, len(names))
        starts = [rng.randrange(len(one) - ITERATIONS) for one in some]
        # What counts is the noise around a stretch's own level: whether a job's level wandered is not this question.
        cut = [one[at : at + ITERATIONS + 1] for one, at in zip(some, starts, strict=True)]
        return {name: one / np.median(one) for name, one in zip(names, cut, strict=True)}, "traces"
    return {name: generated(rng, ITERATIONS + 1) for name in names}, "generated"


def _trace(file: Path) -> Iterator[np.ndarray]:
    workers: dict[str, list[tuple[int, float]]] = {}
    with gzip.open(file, "rt") as lines:
        for row in csv.DictReader(lines):
            workers.setdefault(row["worker"], []).append((int(row["iteration"]), float(row["batch_time_norm"])))
    for steps in workers.values():
        yield np.array([seconds for _, seconds in sorted(steps)])


def generated(rng: random.Random, count: int) -> np.ndarray:
    """Neighbours alike (0.7), spread 4 %, and one step in fifty that takes up to twice as long."""
    values, at = [], 0.0
    for _ in range(count):
        at = 0.7 * at + rng.gauss(0.0, 0.04 * (1 - 0.7**2) ** 0.5)
        tail = rng.uniform(1.3, 2.0) if rng.random() < 0.02 else 1.0
        values.append((1 + at) * tail)
    return np.array(values)


@dataclass
class Truth:
    """What an iteration really takes under a plan."""

    case: Case
    noise: dict[str, np.ndarray]
    planner: Planner

    def busy(self, plan: Plan, t: int) -> dict[str, float]:
        """What each component computes."""
        levels = self.case.level(t)
        true = self.planner.times(plan, levels)
        busy = {name: seconds * float(self.noise[name][t]) for name, seconds in true.items()}
        if self.case.extra_every and t % self.case.extra_every == 0:
            busy["rollout"] += 0.6 * true["rollout"]
        return busy

    def seconds(self, plan: Plan, t: int) -> float:
        """What the iteration takes."""
        return self.planner.with_times(plan, self.busy(plan, t))


def kept_total(case: Case, truth: Truth, first: Sited) -> float:
    """The first plan, left only where its GPUs go: then the best one for the costs it was made for."""
    total, now = 0.0, first
    for t in range(1, ITERATIONS + 1):
        cluster = case.cluster(t)
        standing = now.on(cluster)
        if standing is None:
            standing = truth.planner.best(cluster, {})
            total += MOVE_S
        now = standing
        total += truth.seconds(now.plan, t)
    return total


@dataclass
class Known:
    """Plans for the true costs, which noise does not change: found once for a case."""

    oracle: list[Plan]  # before every iteration the best one, with the nodes there are
    hindsight: list[Plan]  # best at some moment, and on nodes that are there throughout

    @staticmethod
    def of(case: Case, planner: Planner) -> Known:
        """The plans of a case."""
        times = range(1, ITERATIONS + 1)
        oracle = [planner.best(case.cluster(t), case.level(t)).plan for t in times]
        always = [planner.best(case.always, case.level(t)).plan for t in times]
        return Known(oracle, list({plan.describe(): plan for plan in always}.values()))

    def oracle_total(self, truth: Truth) -> float:
        """Seconds of the run that re-plans for nothing."""
        return sum(truth.seconds(plan, t) for t, plan in enumerate(self.oracle, 1))

    def hindsight_total(self, truth: Truth) -> float:
        """Seconds of the run under the one best plan."""
        return min(sum(truth.seconds(plan, t) for t in range(1, ITERATIONS + 1)) for plan in self.hindsight)


def loop_total(case: Case, truth: Truth, first: Sited, rules: RunRules = RULES) -> tuple[float, list[str]]:
    """The loop: it is told what it could measure, and pays for its moves."""
    machine = LoopMachine(case.job.workflow, case.job.cluster, first.plan, rules)
    now, moves = 0.0, []

    def carry_out(instructions: list[e.LoopInstruction]) -> None:
        nonlocal now
        while instructions:
            one = instructions.pop(0)
            if isinstance(one, e.BeginMove):
                moves.append(f"{machine.iterations}: {one.move.reason.code.value} {one.move.after.describe()}")
            elif isinstance(one, e.DoStage):
                took = MOVE_S / 4 if one.stage in (Stage.save, Stage.release, Stage.place, Stage.load) else 0.0
                now += took
                instructions += machine.handle(e.MoveStageDone(one.move.id, one.stage, took), now)

    carry_out(machine.handle(e.RunResumed(0, ITERATIONS), now))
    for t in range(1, ITERATIONS + 1):
        if t in case.nodes:
            carry_out(machine.handle(e.ClusterChanged(*case.nodes[t]), now))
        plan = machine.plan
        busy, wall = truth.busy(plan, t), truth.seconds(plan, t)
        now += wall
        measured = tuple(Measured(n, s, len(plan.placed(n).gpus)) for n, s in busy.items())
        carry_out(machine.handle(e.IterationDone(Iteration(t, wall, measured)), now))
        machine.check()
    return now, moves


def pays() -> None:
    kind = ""
    print(f"Re-planning, emulated: {ITERATIONS} iterations, a move takes {MOVE_S:g} s; medians over noises")
    head = ("", "kept s", "hindsight", "oracle", "loop s", "below kept", "above oracle", "noises", "moves")
    print("{:42} {:>7} {:>9} {:>7} {:>7} {:>11} {:>13} {:>7} {:>6}".format(*head))
    for case in cases():
        planner = Planner(case.job.workflow)
        known, first = Known.of(case, planner), planner.best(case.job.cluster, {})
        rows, counts = [], []
        for seed in range(case.noises):
            noise, kind = noises(case.job.workflow.names, seed)
            truth = Truth(case, noise, planner)
            total, moves = loop_total(case, truth, first)
            rows.append(
                (kept_total(case, truth, first), known.hindsight_total(truth), known.oracle_total(truth), total)
            )
            counts.append(len(moves))
            if os.environ.get("BENCH_LOOP_MOVES") and seed == 0:
                print(f"  first {first.plan.describe()}; " + "; ".join(moves))
        kept, hindsight, oracle, loop = (float(np.median([row[at] for row in rows])) for at in range(4))
        below = float(np.median([1 - row[3] / row[0] for row in rows]))
        above = float(np.median([row[3] / row[2] - 1 for row in rows]))
        print(
            f"{case.name:42} {kept:7.0f} {hindsight:9.0f} {oracle:7.0f} {loop:7.0f} {below:11.1%} {above:13.1%} "
            f"{case.noises:>7} {min(counts):>4}-{max(counts)}"
        )
    print(f"noise: {kind}")


# ---- how long a decision takes ------------------------------------------------------------------------------------


def decisions(components: int, gpus: int, jobs: int) -> tuple[list[float], list[float]]:
    """CPU seconds of iterations that made the loop look at all plans anew, and of those that did not."""
    looked, others = [], []
    for seed in range(jobs):
        job = workflow_job(seed, components, gpus)
        plan = Planner(job.workflow).best(job.cluster, {}).plan
        if len(plan.groups) == 1:
            continue  # an all-shared plan adapts by itself
        machine = LoopMachine(job.workflow, job.cluster, plan, replace(RULES, mode=RunMode.advise))
        planner = machine.watch.planner
        for t in range(1, 25):
            busy = planner.times(plan, {"rollout": 1.03 ** max(0, t - 8)})
            wall = planner.with_times(plan, busy)
            parts = tuple(Measured(n, s, len(plan.placed(n).gpus)) for n, s in busy.items())
            before = dict(machine.watch.run.looked_sure)
            began = time.process_time()
            machine.handle(e.IterationDone(Iteration(t, wall, parts)), float(t))
            took = time.process_time() - began
            (looked if machine.watch.run.looked_sure != before else others).append(took)
    return looked, others


def takes() -> None:
    print("Deciding after an iteration, CPU milliseconds; workflows whose first plan is not all-shared")
    print(f"{'components':>10} {'GPUs':>6} {'decisions':>10} {'p50':>7} {'p99':>7} {'worst':>7} {'goal':>6}  others")
    for components, gpus, goal in ((3, 64, None), (3, 1024, 50), (5, 64, None), (5, 1024, 300)):
        looked, others = decisions(components, gpus, 20)
        ms = [1e3 * float(np.quantile(looked, at)) for at in (0.5, 0.99, 1.0)]
        print(
            f"{components:>10} {gpus:>6} {len(looked):>10} {ms[0]:7.1f} {ms[1]:7.1f} {ms[2]:7.1f} "
            f"{f'[{goal}]' if goal else '':>6}  {1e3 * float(np.median(others)):.2f}"
        )


def main() -> None:
    pays()
    print()
    takes()


if __name__ == "__main__":
    main()
