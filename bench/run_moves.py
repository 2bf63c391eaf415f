"""Does re-planning pay on a real Ray? One workload that drifts, run by its first plan and by the loop.

Rollout grows 3x over 60 iterations, with noise of real training steps (see `bench.loop`); the loop sees only what the
run measures, and a move really saves, ends, places and loads processes. The run that keeps its first plan is run the
same way. Beside them stand three that are computed from the true costs: the one best plan in hindsight, an oracle that
re-plans for free before every iteration, and one that pays for each move what moves took here. With `--nodes` a machine
joins and one drains on the way; the plan that is kept goes on beside it, and hindsight has the machines that stay.
`--virtual` needs no Ray: the same run in one process with a clock that does not wait, where a move takes `--move`
seconds, else a third of an iteration. `--noise=300` counts the moves of so many simulated runs in which nothing drifts.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.loop import noise, noises
from bench.run_fidelity import part, say, scaled
from trimtab.machines.replan.decision import ReplanPlanner
from trimtab.model.plan import Plan
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Node, PlacementJob, WeightSync, Workflow
from trimtab.replay.common.timing import Distribution
from trimtab.replay.replan.baselines import run_policy
from trimtab.replay.replan.reality import MigrationTimes, PlanCache, ReplanReality, SyntheticNoise, TrueCosts
from trimtab.runtime.run.emulated import Disturbance
from trimtab.runtime.run.job import ComponentCode, RunJob

ITERATIONS, GROWTH, GROWS_TO = 70, 60, 3.0
EACH, NODES = 8, 2
JOINS, LEAVES = 20, 45
ASSUMED_MOVE_S = 2.0  # on a real Ray, until one was measured
SHIFT = 0.2  # of a level that is no noise
NOTHING = Distribution(0.0)
GOAL_KEPT, GOAL_ORACLE = 0.15, 0.05


def cluster(nodes: int = NODES, first: int = 0) -> Cluster:
    """Machines of eight GPUs."""
    return Cluster(tuple(Node(f"node{first + at}", EACH) for at in range(nodes)))


def job(first_s: float) -> PlacementJob:
    """Rollout, reference, trainer: what does not scale perfectly is better off side by side.

    An iteration takes `first_s` by the first plan, before anything drifts.
    """
    gpus = EACH * NODES
    parts = (
        part("rollout", 75, gpus, flat=0.45, switch_seconds=12.0, engine="vllm"),
        part("reference", 19, gpus, "rollout", flat=0.25, switch_seconds=6.0, engine="fsdp"),
        part("trainer", 72, gpus, "reference", flat=0.2, switch_seconds=12.0, engine="fsdp"),
    )
    asked = PlacementJob(cluster(), Workflow(parts, batches=12, weight_sync=WeightSync("trainer", "rollout", 1.0, 3.0)))
    first = ReplanPlanner(asked.workflow).best(asked.cluster, {}).plan
    return scaled(asked, first_s / first.iteration_seconds)


@dataclass
class Truth:
    """What each iteration really takes under any plan."""

    job: PlacementJob
    disturbances: dict[str, Disturbance]
    seed: int
    first_s: float
    clusters: dict[int, Cluster] = field(default_factory=dict)  # from an iteration on

    def __post_init__(self) -> None:
        self.planner = ReplanPlanner(self.job.workflow)

    def cluster(self, iteration: int) -> Cluster:
        """What there is in an iteration."""
        now = self.job.cluster
        for at in sorted(self.clusters):
            if at <= iteration:
                now = self.clusters[at]
        return now

    def seconds(self, plan: Plan, iteration: int) -> float:
        """What an iteration takes, noise included."""
        factors = {n: d.of_iteration(self.seed, n, iteration) for n, d in self.disturbances.items()}
        return self.planner.seconds(plan, factors)

    def total(self, plan: Plan) -> float:
        """A whole run under one plan."""
        return sum(self.seconds(plan, t) for t in range(1, ITERATIONS + 1))

    def best(self, cluster: Cluster, iteration: int) -> Plan:
        """The best plan for the true costs of an iteration; noise is nobody's to know."""
        levels = {name: one.level(iteration) for name, one in self.disturbances.items()}
        return self.planner.best(cluster, levels).plan

    def oracle_total(self) -> float:
        """A run that re-plans for free before every iteration."""
        times = range(1, ITERATIONS + 1)
        return sum(self.seconds(self.best(self.cluster(t), t), t) for t in times)

    def paying_total(self, move_s: float) -> float:
        """A run by the best sequence of plans, where each move takes so long."""
        times = range(1, ITERATIONS + 1)
        plans = list({plan.describe(): plan for plan in (self.best(self.job.cluster, t) for t in times)}.values())
        first = self.planner.best(self.job.cluster, {}).plan.describe()
        so_far = [0.0 if plan.describe() == first else move_s for plan in plans]
        for t in times:
            cheapest = min(so_far) + move_s
            so_far = [min(s, cheapest) + self.seconds(p, t) for s, p in zip(so_far, plans, strict=True)]
        return min(so_far)

    def hindsight(self) -> Plan:
        """The plan that would have been best from beginning to end, on machines that are there throughout."""
        times = range(1, ITERATIONS + 1)
        always = set.intersection(*({n.name for n in self.cluster(t).nodes} for t in times))
        there = Cluster(tuple(node for node in self.cluster(1).nodes if node.name in always))
        plans = {plan.describe(): plan for plan in (self.best(there, t) for t in times)}
        return min(plans.values(), key=self.total)


def truth(seed: int, first_s: float) -> tuple[Truth, str]:
    """The workload with the noise of a seed, and where that comes from."""
    asked = job(first_s)
    factors, kind = noises(asked.workflow.names, seed)
    disturbances = {
        name: Disturbance(
            factors=tuple(float(one) for one in factors[name][1 : ITERATIONS + 1]),
            in_order=True,
            drift_to=GROWS_TO if name == "rollout" else 1.0,
            drift_over=GROWTH,
        )
        for name in asked.workflow.names
    }
    return Truth(asked, disturbances, seed, first_s), kind


def asked_run(world: Truth, mode: ReplanMode, assumed_move_s: float, save_every: int = 1_000) -> RunJob:
    """The run to be made; the loop is told what a move may cost at this scale of time, until it has seen one."""
    parts = {name: ComponentCode(disturbance=world.disturbances[name]) for name in world.job.workflow.names}
    rules = ReplanRules(mode=mode, assumed_move_s=assumed_move_s)
    return RunJob(world.job, parts, iterations=ITERATIONS, save_every=save_every, seed=world.seed, rules=rules)


# ---- runs ---------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """A run that is over."""

    seconds: float = 0.0
    moves: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)  # of that, seconds in moves, by what they were for
    void: int = 0  # iterations that were run again after a loss
    clusters: dict[int, Cluster] = field(default_factory=dict)


class Watching:
    """Hears the events of a run: what it did, and when each iteration was over."""

    def __init__(self) -> None:
        self.ran = Ran()
        self.first_s: float | None = None
        self.last_s = 0.0
        self.iteration = 0

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        """Something happened."""
        if event == "plan" and self.first_s is None:
            self.first_s = float(facts["t_s"])
        if event == "iteration":
            self.iteration = int(facts["iteration"]["number"])
            if self.iteration == 1:  # starting processes is no iteration's time
                self.first_s = float(facts["t_s"]) - float(facts["iteration"]["wall_s"])
            self.last_s = float(facts["t_s"])
        if event == "move" and facts["state"] == "begun":
            self.ran.moves.append(f"after {self.iteration}: {facts['plan']['plan']}")
        if event == "move" and facts["state"] in ("stage", "rolled back"):
            stage = str(facts.get("stage", facts["state"]))
            self.ran.stages[stage] = self.ran.stages.get(stage, 0.0) + float(facts["took_s"])
        if event == "lost":
            self.ran.void += int(facts["void"])
        if event == "cluster":
            nodes = tuple(Node(name, gpus, kind) for name, gpus, kind in facts["nodes"] if name not in facts["leaving"])
            self.ran.clusters[self.iteration + 1] = Cluster(nodes)

    def done(self, end: Any) -> Ran:
        """The run, all of it."""
        if end.state != "done":
            sys.exit(f"the run is {end.state}: {end.reason.sentence}")
        self.ran.seconds = self.last_s - (self.first_s or 0.0)
        return self.ran


def run_virtual(world: Truth, mode: ReplanMode, folder: Path, move_s: float | None = None) -> Ran:
    """In one process, on a clock that does not wait."""
    from trimtab.model.run import MigrationStage
    from trimtab.runtime.run.emulated import VirtualClock
    from trimtab.runtime.run.local_executor import LocalExecutor
    from trimtab.runtime.run.run import Run

    clock = VirtualClock()
    slow = dict.fromkeys(
        (MigrationStage.save, MigrationStage.release, MigrationStage.place, MigrationStage.load),
        (world.first_s / 3 if move_s is None else move_s) / 4,
    )

    class Slow(Run):
        """Moves take time."""

        def _migration(self, *arguments: Any) -> Any:
            moving = super()._migration(*arguments)
            do = moving.do

            def lasting(stage: MigrationStage) -> None:
                do(stage)
                clock.sleep(slow.get(stage, 0.0))

            moving.do = lasting  # type: ignore[method-assign]
            return moving

    watching = Watching()
    assumed_s = world.first_s / 3 if move_s is None else ASSUMED_MOVE_S
    end = Slow(asked_run(world, mode, assumed_s), folder, LocalExecutor(clock), on_event=watching).run()
    return watching.done(end)


def run_on_ray(world: Truth, mode: ReplanMode, folder: Path, session: Any, happens: dict[int, Any]) -> Ran:
    """On a real Ray; `happens` are deeds to be done when an iteration is over."""
    from trimtab.runtime.run.ray_executor import RayExecutor
    from trimtab.runtime.run.run import Run

    watching, threads = Watching(), []

    def told(event: str, facts: dict[str, Any]) -> None:
        watching(event, facts)
        if event == "iteration" and watching.iteration in happens:
            threads.append(threading.Thread(target=happens.pop(watching.iteration)))
            threads[-1].start()

    asked = asked_run(world, mode, ASSUMED_MOVE_S, save_every=10 if happens else 1_000)
    end = Run(asked, folder, RayExecutor(session), on_event=told).run()
    for thread in threads:
        thread.join()
    return watching.done(end)


@contextmanager
def a_cluster(nodes: Cluster) -> Iterator[tuple[Any, Any]]:
    """A Ray on this machine with these nodes, and a session on it."""
    from trimtab.runtime.client.session import connect
    from trimtab.runtime.rayapi.embedded import EmbeddedRay

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()), EmbeddedRay(nodes) as ray, connect(name="bench") as session:
        try:
            yield ray, session
        finally:
            with suppress(Exception):
                session.shutdown()


def on_ray(world: Truth, folder: Path, nodes: bool) -> tuple[Ran, Ran]:
    """The first plan kept, and the loop."""
    with a_cluster(cluster()) as (ray, session):
        kept = run_on_ray(world, ReplanMode.advise, folder / "kept", session, {})
        happens = {}
        if nodes:
            happens = {
                JOINS: lambda: ray.add(Node(f"node{NODES}", EACH)),
                LEAVES: lambda: session.drain_node(ray.node_id("node1"), 120.0, "it is wanted elsewhere"),
            }
        return kept, run_on_ray(world, ReplanMode.auto, folder / "loop", session, happens)


# ---- saying it ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One workload."""

    seed: int
    first: str
    hindsight: str
    kept_s: float
    hindsight_s: float
    oracle_s: float
    loop_s: float
    paying_s: float | None  # of an oracle that pays for moves what they took here
    predicted_kept_s: float  # by the true costs, without anything that a run adds
    moves: list[str]
    stages: dict[str, float]
    void: int

    @property
    def below_kept(self) -> float:
        """Of the time of the plan that was kept, how much is saved."""
        return 1 - self.loop_s / self.kept_s

    @property
    def above_oracle(self) -> float:
        """How much longer than the oracle."""
        return self.loop_s / self.oracle_s - 1

    @property
    def above_paying(self) -> float | None:
        return None if self.paying_s is None else self.loop_s / self.paying_s - 1


def noise_alone(asked: argparse.Namespace) -> None:
    """Count moves in simulated runs in which nothing drifts, with noise of real steps and with generated noise.

    Some stretches of real steps shift their level for good: a move that follows such a shift is none for noise.
    """
    asked_job, rules = job(asked.seconds), ReplanRules(mode=ReplanMode.auto, assumed_move_s=ASSUMED_MOVE_S)
    each = Distribution((ASSUMED_MOVE_S if asked.move is None else asked.move) / 4)
    times, plans = MigrationTimes(each, each, each, each, NOTHING, NOTHING), PlanCache(asked_job)
    for kind in dict.fromkeys((noise(), SyntheticNoise())):
        moved = {True: 0, False: 0}
        runs = {True: 0, False: 0}
        for seed in range(asked.noise):
            factors = kind.factors(asked_job.workflow.names, ITERATIONS, seed)
            shifts = any(shifted(series[1:]) for series in factors.values())
            truth = TrueCosts(ReplanReality(asked_job, ITERATIONS, {}, kind, times, save_every=0, seed=seed), plans)
            runs[shifts] += 1
            moved[shifts] += bool(run_policy("trimtab", truth, rules).moves)
        say(
            f"{type(kind).__name__}: moves under noise alone in {moved[False]} of {runs[False]} simulated runs, and in "
            f"{moved[True]} of {runs[True]} whose level shifts by more than {SHIFT:.0%}"
        )


def shifted(series: Any) -> bool:
    """Whether the level, the middle of nine iterations, leaves that of the whole stretch."""
    levels = [np.median(series[at : at + 9]) for at in range(len(series) - 8)]
    return bool(max(abs(np.log(levels / np.median(series)))) > np.log(1 + SHIFT))


def compared(seed: int, asked: argparse.Namespace, folder: Path) -> tuple[Row, str]:
    """One workload, all ways."""
    world, kind = truth(seed, asked.seconds)
    if asked.virtual:
        kept, loop = (
            run_virtual(world, mode, folder / mode.value, asked.move) for mode in (ReplanMode.advise, ReplanMode.auto)
        )
    else:
        kept, loop = on_ray(world, folder, asked.nodes)
    world.clusters = loop.clusters
    first = world.planner.best(world.job.cluster, {}).plan
    hindsight = world.hindsight()
    row = Row(
        seed,
        first.describe(),
        hindsight.describe(),
        kept.seconds,
        world.total(hindsight),
        world.oracle_total(),
        loop.seconds,
        None if asked.nodes else world.paying_total(sum(loop.stages.values()) / max(1, len(loop.moves))),
        world.total(first),
        loop.moves,
        loop.stages,
        loop.void,
    )
    return row, kind


def say_row(row: Row) -> None:
    """A line of the table, and what the loop did."""
    say(
        f"{row.seed:>6}{row.kept_s:>9.1f}{row.hindsight_s:>11.1f}{row.oracle_s:>8.1f}{row.loop_s:>8.1f}"
        f"{row.below_kept:>12.1%}{row.above_oracle:>13.1%}"
        f"{'-' if row.above_paying is None else f'{row.above_paying:.1%}':>13}{len(row.moves):>7}"
        f"{sum(row.stages.values()):>9.2f}{row.kept_s / row.predicted_kept_s - 1:>9.2%}"
    )
    say(f"       first {row.first}; best in hindsight {row.hindsight}")
    for move in row.moves:
        say(f"       {move}")
    if row.void:
        say(f"       {row.void} iterations were lost, and run again")
    if row.moves:
        say("       in moves, s: " + ", ".join(f"{stage} {took:.2f}" for stage, took in row.stages.items() if took))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run_moves", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--virtual", action="store_true", help="in one process, without Ray and without waiting")
    parser.add_argument("--nodes", action="store_true", help="a machine joins and one drains on the way")
    parser.add_argument("--seconds", type=float, default=1.0, help="of an iteration at first (--seconds=2)")
    parser.add_argument("--seeds", type=int, default=1, help="so many noises (the first ones)")
    parser.add_argument("--move", type=float, help="seconds of a move in virtual time")
    parser.add_argument("--noise", type=int, default=0, help="count moves in so many simulated runs without drift")
    asked, _ = parser.parse_known_args()
    if asked.noise:
        noise_alone(asked)
        return
    if asked.virtual and asked.nodes:
        sys.exit("nodes come and go on a real Ray only")
    how = "in one process, virtual time" if asked.virtual else "on a real Ray"
    if not asked.json:
        say(
            f"Re-planning {how}: {ITERATIONS} iterations of {asked.seconds:g} s at first, rollout grows {GROWS_TO:g}x "
            f"over {GROWTH}, {EACH * NODES} logical GPUs"
        )
        head = (
            "noise",
            "kept s",
            "hindsight",
            "oracle",
            "loop s",
            "below kept",
            "above oracle",
            "above paying",
            "moves",
            "in them",
        )
        say("{:>6}{:>9}{:>11}{:>8}{:>8}{:>12}{:>13}{:>13}{:>7}{:>9}{:>9}".format(*head, "error"))
    rows, kind, began = [], "", time.perf_counter()
    for seed in range(asked.seeds):
        with tempfile.TemporaryDirectory(prefix="bench-moves-") as folder:
            row, kind = compared(seed, asked, Path(folder))
        rows.append(row)
        if not asked.json:
            say_row(row)
    below, above = (float(np.median([getattr(row, key) for row in rows])) for key in ("below_kept", "above_oracle"))
    paying = [row.above_paying for row in rows if row.above_paying is not None]
    if asked.json:
        figures = [
            {
                **asdict(row),
                "below_kept": row.below_kept,
                "above_oracle": row.above_oracle,
                "above_paying": row.above_paying,
            }
            for row in rows
        ]
        say(json.dumps({"how": how, "noise": kind, "rows": figures, "below_kept": below, "above_oracle": above}))
        return
    say(
        f"median: {below:.1%} below the plan that is kept [{GOAL_KEPT:.0%}], {above:.1%} above the oracle "
        f"[{GOAL_ORACLE:.0%}], {np.median(paying) if paying else np.nan:.1%} above one that pays for moves; load "
        f"{os.getloadavg()[0]:.1f}; noise: {kind}; {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
