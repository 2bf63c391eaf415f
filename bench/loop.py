"""Does re-planning pay, and how long does a decision take?

Drifting workloads in emulated time, run as `trimtab simulate` runs them (`trimtab.replay.replan`): an iteration takes
what the planner's simulation says of the TRUE costs under the plan in place, times noise; the loop sees only what it
could measure. Against it: the first plan kept (moved only when its GPUs go), the best plan in hindsight of those that
fit from beginning to end, and an oracle that knows the true costs and re-plans for free before every iteration. Noise
is that of real training steps where the traces are at hand (`TRIMTAB_TRACES`, else ../shared/data: alibaba gpu-v2020
mini-batches), else generated with their spread.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.placement import workflow_job
from trimtab.machines.replan import events as e
from trimtab.machines.replan.decision import ReplanPlanner
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.model.run import ComponentTiming, Iteration, ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Component, Node, PlacementJob, Variant, WeightSync, Workflow
from trimtab.replay.common.timing import Distribution
from trimtab.replay.replan.baselines import run_policy
from trimtab.replay.replan.reality import (
    Drift,
    Factors,
    MigrationTimes,
    PeriodicWork,
    PlanCache,
    ReplanReality,
    ScheduledNodeEvent,
    SyntheticNoise,
    TraceNoise,
    TrueCosts,
)

TRACES = Path(os.environ.get("TRIMTAB_TRACES") or Path(__file__).parents[2] / "shared" / "data")
MOVE_S = 20.0  # what a move really costs; the loop assumes 60 until it has seen one
_QUARTER, _NOTHING = Distribution(MOVE_S / 4), Distribution(0.0)
MOVE = MigrationTimes(_QUARTER, _QUARTER, _QUARTER, _QUARTER, _NOTHING, _NOTHING)
ITERATIONS = 80
GROWTH = 60
RULES = ReplanRules(mode=ReplanMode.auto)


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


# ---- the workloads ------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A workload: drift by component, and what happens to the cluster before an iteration."""

    name: str
    job: PlacementJob
    drift: dict[str, Drift] = field(default_factory=lambda: {"rollout": Drift(3.0, GROWTH)})
    happens: tuple[ScheduledNodeEvent, ...] = ()
    periodic: PeriodicWork | None = None
    noises: int = 5

    def reality(self, seed: int) -> ReplanReality:
        """The workload with one of its noises."""
        more = {"happens": self.happens, "periodic": self.periodic, "save_every": 0}
        return ReplanReality(self.job, ITERATIONS, self.drift, noise(), MOVE, seed=seed, **more)  # type: ignore[arg-type]


def cases() -> list[Case]:
    small, large = Cluster(_nodes(2)), Cluster(_nodes(8))
    more, last = _nodes(2, 8), _nodes(1, 7)[0]
    happens = (
        *(ScheduledNodeEvent(node, "joined", before=20) for node in more),
        ScheduledNodeEvent(last, "lost", before=45),
    )
    lost_early = (ScheduledNodeEvent(last, "lost", before=15), ScheduledNodeEvent(last, "joined", before=40))
    validation = PeriodicWork(5, "rollout", 0.6)  # not announced
    jumps, shrinks = {"rollout": Drift(2.0, after=20, shape="jump")}, {"rollout": Drift(0.5, GROWTH)}
    return [
        Case("grpo 16 GPUs, rollout grows 3x", PlacementJob(small, grpo(16))),
        Case("grpo 64 GPUs, rollout grows 3x", PlacementJob(large, grpo(64))),
        Case("ppo 64 GPUs, rollout grows 3x", PlacementJob(large, ppo(64))),
        Case("ppo 64 GPUs, first plan shares, grows 3x", PlacementJob(large, ppo(64, 6.0))),
        Case("grpo 64 GPUs, and 2 nodes join, 1 is lost", PlacementJob(large, grpo(64)), happens=happens),
        Case("ppo 64 GPUs, and 1 node is lost, and back", PlacementJob(large, ppo(64)), happens=lost_early),
        Case("grpo 64 GPUs, rollout jumps to 2x", PlacementJob(large, grpo(64)), jumps),
        Case("grpo 64 GPUs, rollout shrinks to 1/2", PlacementJob(large, grpo(64)), shrinks),
        Case("grpo 64 GPUs, noise alone", PlacementJob(large, grpo(64)), {}, noises=20),
        Case("ppo 64 GPUs, noise alone", PlacementJob(large, ppo(64)), {}, noises=20),
        Case(
            "grpo 64 GPUs, noise, validation every 5th",
            PlacementJob(large, grpo(64)),
            {},
            periodic=validation,
            noises=20,
        ),
    ]


def noise() -> TraceNoise | SyntheticNoise:
    files = tuple(sorted(TRACES.glob("alibaba_gpu2020_minibatch_*.csv.gz")))
    return TraceNoise(files) if files else SyntheticNoise()


def noises(names: tuple[str, ...], seed: int) -> tuple[Factors, str]:
    """Factors per component and iteration, and where they come from."""
    kind = noise()
    return kind.factors(names, ITERATIONS, seed), "traces" if isinstance(kind, TraceNoise) else "generated"


def pays() -> None:
    print(f"Re-planning, emulated: {ITERATIONS} iterations, a move takes {MOVE_S:g} s; medians over noises")
    head = ("", "kept s", "hindsight", "oracle", "loop s", "below kept", "above oracle", "noises", "moves")
    print("{:42} {:>7} {:>9} {:>7} {:>7} {:>11} {:>13} {:>7} {:>6}".format(*head))
    for case in cases():
        plans = PlanCache(case.job)
        rows, counts = [], []
        for seed in range(case.noises):
            truth = TrueCosts(case.reality(seed), plans)
            runs = [run_policy(use, truth, RULES) for use in ("kept", "static", "oracle", "trimtab")]
            rows.append([one.total_s for one in runs])
            moves = runs[-1].moves
            counts.append(len(moves))
            if os.environ.get("BENCH_LOOP_MOVES") and seed == 0:
                said = "; ".join(f"{one.after}: {one.code} {one.plan}" for one in moves)
                print(f"  first {runs[-1].first}; {said}")
        kept, hindsight, oracle, loop = (float(np.median([row[at] for row in rows])) for at in range(4))
        below = float(np.median([1 - row[3] / row[0] for row in rows]))
        above = float(np.median([row[3] / row[2] - 1 for row in rows]))
        print(
            f"{case.name:42} {kept:7.0f} {hindsight:9.0f} {oracle:7.0f} {loop:7.0f} {below:11.1%} {above:13.1%} "
            f"{case.noises:>7} {min(counts):>4}-{max(counts)}"
        )
    print(f"noise: {noises(('rollout',), 0)[1]}")


# ---- how long a decision takes ------------------------------------------------------------------------------------


def decisions(components: int, gpus: int, jobs: int) -> tuple[list[float], list[float]]:
    """CPU seconds of iterations that made the loop look at all plans anew, and of those that did not."""
    looked, others = [], []
    for seed in range(jobs):
        job = workflow_job(seed, components, gpus)
        plan = ReplanPlanner(job.workflow).best(job.cluster, {}).plan
        if len(plan.groups) == 1:
            continue  # an all-shared plan adapts by itself
        machine = ReplanMachine(job.workflow, job.cluster, plan, replace(RULES, mode=ReplanMode.advise))
        planner = machine.drift.planner
        for t in range(1, 25):
            busy = planner.times(plan, {"rollout": 1.03 ** max(0, t - 8)})
            wall = planner.with_times(plan, busy)
            parts = tuple(ComponentTiming(n, s, len(plan.placed(n).gpus)) for n, s in busy.items())
            before = dict(machine.drift.run.compared_sure_levels)
            began = time.process_time()
            machine.handle(e.IterationDone(Iteration(t, wall, parts)), float(t))
            took = time.process_time() - began
            (looked if machine.drift.run.compared_sure_levels != before else others).append(took)
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
