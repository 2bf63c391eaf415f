"""How well the planner predicts a run on a real Ray, and what a batch costs on its way from component to component.

Emulated workflows of 2 to 6 components on 8 to 64 logical GPUs run by the plan that the exact planner chooses for them:
real tasks in real slots, turns taken through the pool, data through Ray's object store; only the computing is a sleep.
Their profiles are scaled so that an iteration takes seconds. Against the predicted iteration stands the median of the
measured ones, the first two left out; `current` is the error of predictions by the costs measured just before. With
`--data` components pass on real data, save it in every third iteration, and are asked for their health; with `--save`
saving it takes so many seconds more.

Then the way itself, with components that take no time: one batch at a time through a chain (latency), and many at once
(rate), against a chain of bare Ray actors that pass references, called ahead without anybody waiting in between:
`added` is the difference, per batch and hop. At last what happens between two iterations: counting, telling, deciding.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.model.ledger import ledger_summary
from trimtab.model.plan import Plan
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Component, Node, PlacementJob, Variant, WeightSync, Workflow
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.planner import plan_placement
from trimtab.plan.placement.space import PlanSpace
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.run.emulated import UNDISTURBED, Disturbance
from trimtab.runtime.run.job import ComponentCode, RunJob, shared_plan

GPUS = 64  # logical ones of the local Ray
ITERATIONS, COLD = 7, 2
NOISE = 0.02  # of a component from iteration to iteration, with --seeds
GOAL_MEDIAN, GOAL_WORST, GOAL_ADDED_S, GOAL_BETWEEN = 0.02, 0.05, 5e-3, 0.01
CHAIN, ALONE, FEW, MANY = 4, 40, 6, 100  # components, rounds, and batches
LONG_TAIL = ((0.5, 0.25), (0.75, 0.45), (0.9, 0.65), (1.0, 1.0))
"""Half of the answers are there after a quarter of the time; the last tenth takes a third of it."""


# ---- the workflows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A workflow, and what an iteration of it is to take."""

    name: str
    job: PlacementJob
    seconds: float


def part(name: str, at_all: float, gpus: int, after: str = "", flat: float = 0.0, **more: Any) -> Component:
    """A component that takes so long on all GPUs; a share `flat` of that does not become less with more of them."""
    counts = sorted({max(1, gpus // 8), max(1, gpus // 4), max(1, gpus // 2), gpus})
    points = tuple((g, at_all * (flat + (1 - flat) * gpus / g)) for g in counts)
    return Component(name, (Variant(seconds={"": points}),), tuple(after.split()), **more)


def cpu(name: str, seconds: float, after: str) -> Component:
    """A component that takes no GPU."""
    return Component(name, after=tuple(after.split()), cpu_seconds=seconds)


def workflow(
    gpus: int, batches: int, *parts: Component, sync: tuple[float, float] | None = None, stale: int = 0
) -> PlacementJob:
    """A job on one machine of so many GPUs; weights go from the last component to the first."""
    synced = WeightSync(parts[-1].name, parts[0].name, *sync) if sync else None
    return PlacementJob(Cluster((Node("node0", gpus),)), Workflow(parts, batches, stale, synced))


def cases() -> list[Case]:
    """Chosen so that sharing, splitting and both occur, with everything that a workflow can state."""
    tail: dict[str, Any] = {"completion": LONG_TAIL}
    vllm: dict[str, Any] = {"engine": "vllm", "switch_seconds": 3.0}
    fsdp: dict[str, Any] = {"engine": "fsdp", "switch_seconds": 2.0}
    return [
        Case(
            "two components, shared",
            workflow(8, 8, part("rollout", 60, 8, **vllm), part("trainer", 40, 8, "rollout", **fsdp), sync=(0.5, 2.0)),
            2.4,
        ),
        Case(
            "two components, side by side",
            workflow(
                16, 8, part("rollout", 60, 16, flat=0.7, **vllm), part("trainer", 40, 16, "rollout", flat=0.6, **fsdp),
                sync=(0.5, 2.0),
            ),
            2.4,
        ),
        Case(
            "grpo, scales well",
            workflow(
                8, 8, part("rollout", 60, 8, **vllm), part("reference", 15, 8, "rollout", **fsdp),
                part("trainer", 40, 8, "reference", granularity=4, **fsdp), sync=(0.5, 2.0),
            ),
            3.0,
        ),
        Case(
            "grpo, rollout does not scale",
            workflow(
                16, 8, part("rollout", 60, 16, flat=0.7, **vllm),
                part("reference", 10, 16, "rollout", flat=0.4, **fsdp),
                part("trainer", 40, 16, "reference", flat=0.4, granularity=2, **fsdp), sync=(0.5, 2.0),
            ),
            2.2,
        ),
        Case(
            "grpo, long tail",
            workflow(
                32, 8, part("rollout", 90, 32, flat=0.6, **tail, **vllm),
                part("reference", 12, 32, "rollout", flat=0.2, **fsdp),
                part("trainer", 45, 32, "reference", flat=0.3, granularity=2, **fsdp), sync=(0.5, 2.0),
            ),
            2.6,
        ),
        Case(
            "grpo, one iteration stale",
            workflow(
                16, 8, part("rollout", 70, 16, flat=0.5, **vllm),
                part("reference", 10, 16, "rollout", flat=0.3, **fsdp),
                part("trainer", 50, 16, "reference", flat=0.3, granularity=4, **fsdp), sync=(0.5, 2.0), stale=1,
            ),
            2.0,
        ),
        Case(
            "grpo, reward on CPUs",
            workflow(
                8, 8, part("rollout", 60, 8, flat=0.2, **vllm), cpu("reward", 30, "rollout"),
                part("trainer", 40, 8, "reward", granularity=4, **fsdp), sync=(0.5, 2.0),
            ),
            3.0,
        ),
        Case(
            "grpo with judge, turns are dear",
            workflow(
                32, 16, part("rollout", 60, 32, flat=0.6, engine="vllm", switch_seconds=30.0),
                part("judge", 25, 32, "rollout", flat=0.5, engine="sglang", switch_seconds=20.0),
                part("reference", 10, 32, "rollout", flat=0.5, switch_seconds=20.0),
                part("trainer", 45, 32, "judge reference", flat=0.5, granularity=2, switch_seconds=30.0),
                sync=(0.5, 2.0),
            ),
            2.4,
        ),
        Case(
            "grpo with judge, turns are cheap",
            workflow(
                32, 8, part("rollout", 60, 32, flat=0.05, **vllm), part("judge", 25, 32, "rollout", **vllm),
                part("reference", 10, 32, "rollout", **fsdp),
                part("trainer", 45, 32, "judge reference", granularity=4, **fsdp), sync=(0.5, 2.0),
            ),
            3.0,
        ),
        Case(
            "ppo, five components",
            workflow(
                64, 8, part("rollout", 70, 64, flat=0.5, **vllm),
                part("reference", 10, 64, "rollout", flat=0.2, **fsdp),
                part("reward", 8, 64, "rollout", flat=0.2, **fsdp),
                part("critic", 25, 64, "reward", flat=0.3, granularity=2, **fsdp),
                part("trainer", 45, 64, "reference critic", flat=0.2, granularity=2, **fsdp), sync=(0.5, 3.0),
            ),
            2.8,
        ),
        Case(
            "ppo, five components, long tail, stale",
            workflow(
                64, 8, part("rollout", 80, 64, flat=0.6, **tail, **vllm),
                part("reference", 10, 64, "rollout", flat=0.3, **fsdp),
                part("reward", 8, 64, "rollout", flat=0.3, **fsdp),
                part("critic", 20, 64, "reward", flat=0.3, granularity=4, **fsdp),
                part("trainer", 40, 64, "reference critic", flat=0.3, granularity=4, **fsdp), sync=(0.5, 3.0), stale=1,
            ),
            2.2,
        ),
        Case(
            "ppo, six components, reward on CPUs",
            workflow(
                64, 8, part("rollout", 70, 64, flat=0.4, **tail, **vllm), cpu("reward", 20, "rollout"),
                part("reference", 12, 64, "rollout", flat=0.2, **fsdp),
                part("values", 12, 64, "rollout", flat=0.2, **fsdp),
                part("critic", 25, 64, "reward values", flat=0.2, granularity=4, **fsdp),
                part("trainer", 45, 64, "reward reference values", flat=0.2, granularity=4, **fsdp), sync=(0.5, 3.0),
            ),
            3.0,
        ),
        Case(
            "embodied, simulator and policy",
            workflow(
                24, 12, part("simulator", 50, 24, flat=0.8, engine="sim", switch_seconds=8.0),
                part("policy", 20, 24, "simulator", flat=0.5, engine="vla", switch_seconds=6.0),
                part("trainer", 40, 24, "policy", flat=0.5, granularity=3, **fsdp), sync=(0.5, 2.0),
            ),
            2.2,
        ),
        Case(
            "distillation, two teachers",
            workflow(
                48, 8, part("student", 40, 48, flat=0.3, **vllm),
                part("teacher-a", 35, 48, "student", flat=0.2, **vllm),
                part("teacher-b", 20, 48, "student", flat=0.2, engine="sglang", switch_seconds=6.0),
                part("trainer", 40, 48, "teacher-a teacher-b", flat=0.1, granularity=4, **fsdp), sync=(0.5, 2.0),
            ),
            2.6,
        ),
        Case(
            "search agent, all batches at once",
            workflow(
                16, 4, part("rollout", 60, 16, flat=0.1, **tail, **vllm), cpu("search", 12, "rollout"),
                part("reference", 12, 16, "search", granularity=None, **fsdp),
                part("trainer", 40, 16, "reference", granularity=None, **fsdp), sync=(0.5, 2.0),
            ),
            3.0,
        ),
    ]  # fmt: skip


def scaled(job: PlacementJob, factor: float) -> PlacementJob:
    """All times of a job multiplied: every plan of it is as good as before against any other."""
    flow = job.workflow
    for name in flow.names:
        flow = flow.scaled(name, factor)
    parts = tuple(replace(one, switch_seconds=one.switch_seconds * factor) for one in flow.components)
    sync = flow.weight_sync
    if sync is not None:
        sync = replace(
            sync, shared_seconds=sync.shared_seconds * factor, separate_seconds=sync.separate_seconds * factor
        )
    return replace(job, workflow=replace(flow, components=parts, weight_sync=sync))


def planned(case: Case) -> tuple[PlacementJob, Plan]:
    """The job at the scale of the case, and the best plan for it."""
    first = plan_placement(case.job).best
    job = scaled(case.job, case.seconds / first.iteration_seconds)
    return job, plan_placement(job).best


def kind_of(plan: Plan) -> str:
    """Whether the components of a plan share GPUs."""
    sizes = [len(group.components) for group in plan.groups]
    if len(sizes) == 1:
        return "shared"
    return "separate" if max(sizes) == 1 else "mixed"


# ---- running them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A workflow that was run."""

    name: str
    components: int
    gpus: int
    kind: str
    plan: str
    predicted_s: float
    measured_s: float
    between_s: float  # what the run itself does at the end of an iteration
    current: float | None  # error of predictions by the costs measured just before, at the median
    unbooked: float  # share of the wall time
    load: float  # of the machine, at the end

    @property
    def error(self) -> float:
        """How much longer it took than predicted."""
        return self.measured_s / self.predicted_s - 1


class Loaded:
    """A component that passes on and saves real data; its steps take as long as emulated ones."""

    def __init__(self, *, megabytes: float, place: Any, save_s: float = 0.0) -> None:
        import numpy as np

        self.save_s = save_s
        self.data = np.zeros(int(megabytes * 1e6 / 8))

    def step(self, batch: Any) -> Any:
        return self.data

    def weights(self) -> Any:
        return self.data

    def sync(self, weights: Any, version: int) -> None:
        self.data[:] = weights

    def health(self) -> bool:
        time.sleep(0.02)
        return True

    def save(self, path: Path) -> None:
        self.snapshot()(path)

    def snapshot(self) -> Callable[[Path], None]:
        copy = self.data.copy()

        def write(path: Path) -> None:
            time.sleep(self.save_s)
            copy.tofile(path / "data")

        return write

    def load(self, path: Path) -> None:
        """Nothing: it is zeros."""


def run(
    session: Any,
    folder: Path,
    job: PlacementJob,
    plan: Plan,
    iterations: int,
    data: float = 0.0,
    seed: int = 0,
    save_s: float = 0.0,
) -> tuple[Any, list[float]]:
    """How an emulated job ended, and seconds that the run itself took at the end of each iteration.

    With `data` its components pass on so many megabytes a batch, save them in every third iteration and are checked.
    """
    from trimtab.runtime.run.ray_executor import RayExecutor
    from trimtab.runtime.run.run import Run

    between: list[float] = []

    class Timed(Run):
        """Says how long it is busy between two iterations."""

        def _iteration_done(self, *arguments: Any, **more: Any) -> None:
            began = time.perf_counter()
            super()._iteration_done(*arguments, **more)
            between.append(time.perf_counter() - began)

    disturbance = Disturbance(noise=NOISE) if seed else UNDISTURBED
    code = ComponentCode(disturbance=disturbance)
    if data or save_s:
        settings = {"megabytes": data, "save_s": save_s}
        code = ComponentCode("bench.run_fidelity:Loaded", settings, disturbance=disturbance, paced=True)
    asked = RunJob(
        job,
        dict.fromkeys(job.workflow.names, code),
        iterations=iterations,
        seed=seed,
        save_every=3 if data or save_s else 10_000,
        near=Path(__file__).parents[1],
        rules=ReplanRules(mode=ReplanMode.auto),
    )
    end = Timed(asked, folder, RayExecutor(session), plan=plan).run()
    if end.state != "done":
        sys.exit(f"{folder.name} is {end.state}: {end.reason.sentence}")
    return end, between


def walls_of(end: Any) -> list[float]:
    """Seconds of every iteration without periodic work."""
    return [one.wall_s for one in end.iterations if not one.extra]


def counts(times: float) -> tuple[int, int]:
    """Iterations of a workflow, and those of them that are not counted: everything is cold in them."""
    return (ITERATIONS, COLD) if times == 1 else (3, 1)


def fidelity(
    session: Any, folder: Path, chosen: list[Case], asked: argparse.Namespace, said: Callable[[Row], None]
) -> list[Row]:
    """Run all workflows, one after another, in iterations that are so many times as long."""
    rows = []
    iterations, cold = counts(asked.times)
    seeds = range(1, asked.seeds + 1) if asked.seeds else [0]
    for number, (case, seed) in enumerate((case, seed) for case in chosen for seed in seeds):
        job, plan = planned(replace(case, seconds=case.seconds * asked.times))
        end, between = run(session, folder / f"flow{number}", job, plan, iterations, asked.data, seed, asked.save)
        walls = walls_of(end)
        off = [abs(error) for error in end.expected_errors[cold:]]
        ledger = ledger_summary([(one.wall_s, one.booked) for one in end.iterations[cold:]])
        assert ledger is not None
        row = Row(
            case.name,
            len(job.workflow.names),
            job.cluster.gpus,
            kind_of(plan),
            plan.describe(),
            plan.iteration_seconds,
            statistics.median(walls[cold:]),
            statistics.median(between[cold:]),
            statistics.median(off) if off else None,
            ledger.unbooked,
            os.getloadavg()[0],
        )
        said(row)
        rows.append(row)
    return rows


# ---- the way of a batch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hops:
    """Seconds per batch and hop, through components of a run and through bare actors; and of a turn on shared GPUs."""

    alone_s: float
    bare_alone_s: float
    many_s: float
    bare_many_s: float
    turn_s: float


def chain(batches: int) -> PlacementJob:
    """Components that take next to no time, one GPU each, one after another."""
    names = [f"part{at}" for at in range(CHAIN)]
    parts = [part(name, 1e-6, 1, names[at - 1] if at else "") for at, name in enumerate(names)]
    return workflow(CHAIN, batches, *parts)


def separate(job: PlacementJob) -> Plan:
    """The plan where nobody shares."""
    space = PlanSpace(job)
    grouping = next(one for one in space.groupings() if all(len(members) == 1 for members in one.groups))
    sizes = tuple(1 for _ in grouping.tables)
    options, seconds = space.best_of(grouping, sizes)
    return to_plan(space, FoundPlan(grouping, sizes, options, seconds))


class Bare:
    """An actor that passes on what it gets."""

    def step(self, data: Any) -> Any:
        """Nothing."""
        return data


def bare(ray: Any, batches: int, rounds: int) -> float:
    """Seconds per batch and hop of a chain of actors: all calls at once, references passed on."""
    actors = [ray.remote(Bare).options(num_cpus=0.01).remote() for _ in range(CHAIN)]
    first = {"component": "part0", "iteration": 1, "index": 0}
    took = []
    for _ in range(rounds + COLD):
        began = time.perf_counter()
        last = []
        for _ in range(batches):
            reference: Any = first
            for actor in actors:
                reference = actor.step.remote(reference)
            last.append(reference)
        ray.get(last, timeout=120)
        took.append(time.perf_counter() - began)
    for actor in actors:
        ray.kill(actor)
    return statistics.median(took[COLD:]) / batches / CHAIN


def hops(ray: Any, session: Any, folder: Path) -> Hops:
    """The way of one batch alone, and of many."""

    def busy_s(name: str, job: PlacementJob, plan: Plan, rounds: int) -> float:
        end, between = run(session, folder / name, job, plan, rounds + COLD)
        return (
            (statistics.median(walls_of(end)[COLD:]) - statistics.median(between[COLD:])) / job.workflow.batches / CHAIN
        )

    one, many = chain(1), chain(MANY)
    alone_s = busy_s("alone", one, separate(one), ALONE)
    return Hops(
        alone_s,
        bare(ray, 1, ALONE),
        busy_s("many", many, separate(many), FEW),
        bare(ray, MANY, FEW),
        busy_s("turns", one, shared_plan(one), FEW) - alone_s,
    )


# ---- saying it ----------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """A line of ours: what Ray prints between them is not shown."""
    print(line, file=sys.__stdout__, flush=True)


@contextmanager
def a_session() -> Iterator[tuple[Any, Any]]:
    """A local Ray with logical GPUs, and a session on it."""
    import ray

    from trimtab.runtime.client.session import connect

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()):
        ray.init(
            address="local", num_cpus=8, num_gpus=GPUS, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            with connect(name="bench") as session:
                yield ray, session
                session.shutdown()
        finally:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
            ray.shutdown()


def say_row(row: Row) -> None:
    """A line of the table."""
    say(
        f"{row.name:<40}{row.components:>3}{row.gpus:>5}  {row.kind:<9}{row.predicted_s:>8.3f}{row.measured_s:>10.3f}"
        f"{row.error:>9.2%}{'-' if row.current is None else f'{row.current:.2%}':>9}{row.unbooked:>10.2%}"
        f"{row.between_s / row.measured_s:>9.2%}{row.load:>6.1f}"
    )


def say_hops(way: Hops) -> None:
    """Both ways, ours against bare actors."""
    say(f"\nPer batch and hop, ms: a chain of {CHAIN} components that take no time, against bare actors")
    say(f"{'':<40}{'run':>8}{'actors':>8}{'added':>8}  [goal {GOAL_ADDED_S * 1e3:g}]")
    for name, ours, theirs in (
        ("one batch alone", way.alone_s, way.bare_alone_s),
        (f"{MANY} batches in the works", way.many_s, way.bare_many_s),
    ):
        say(f"{name:<40}{ours * 1e3:>8.2f}{theirs * 1e3:>8.2f}{(ours - theirs) * 1e3:>8.2f}")
    say(f"{'a turn on GPUs that are shared':<40}{way.turn_s * 1e3:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run_fidelity", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--only", default="", help="workflows whose name holds this")
    parser.add_argument("--plans", action="store_true", help="the plans, and nothing run")
    parser.add_argument("--times", type=float, default=1.0, help="iterations so many times as long (--times=4)")
    parser.add_argument("--data", type=float, default=0.0, help="megabytes that each batch passes on (--data=100)")
    parser.add_argument("--save", type=float, default=0.0, help="seconds that saving a component takes (--save=0.5)")
    parser.add_argument("--seeds", type=int, default=0, help="runs of each workflow with noise (--seeds=10)")
    asked, _ = parser.parse_known_args()
    chosen = [case for case in cases() if asked.only in case.name]
    if asked.plans:
        for case in chosen:
            say(f"{case.name:<40}{planned(case)[1].describe()}")
        return
    if not asked.json:
        iterations, cold = counts(asked.times)
        say(f"Predicted and measured iterations on a real Ray, {GPUS} logical GPUs; median of {iterations - cold}")
        say(
            f"{'':<48}  {'plan':<9}{'predicted':>8}{'measured':>9}{'error':>9}{'current':>9}"
            f"{'unbooked':>10}{'between':>9}{'load':>6}"
        )
    with a_session() as (ray, session), tempfile.TemporaryDirectory(prefix="bench-run-") as folder:
        rows = fidelity(session, Path(folder), chosen, asked, (lambda row: None) if asked.json else say_row)
        way = None if asked.data or asked.seeds or asked.save else hops(ray, session, Path(folder))
    errors = [abs(row.error) for row in rows]
    if asked.json:
        figures = [{**asdict(row), "error": row.error} for row in rows]
        say(json.dumps({"workflows": figures, "hops": way and asdict(way)}))
        return
    if errors:
        between = statistics.median(row.between_s / row.measured_s for row in rows)
        say(
            f"error: median {statistics.median(errors):.2%} [{GOAL_MEDIAN:.0%}], worst {max(errors):.2%} "
            f"[{GOAL_WORST:.0%}]; between two iterations: {between:.2%} of one [{GOAL_BETWEEN:.0%}]"
        )
        current = [row.current for row in rows if row.current is not None]
        if current:
            say(f"by the costs measured just before: median {statistics.median(current):.2%}, worst {max(current):.2%}")
        unbooked, loads = [row.unbooked for row in rows], [row.load for row in rows]
        say(
            f"unbooked: median {statistics.median(unbooked):.2%}, worst {max(unbooked):.2%} of the wall time; load "
            f"{min(loads):.1f} to {max(loads):.1f}"
        )
        for kind in sorted({row.kind for row in rows}):
            some = [abs(row.error) for row in rows if row.kind == kind]
            say(f"{kind}: {len(some)} runs, error at the median {statistics.median(some):.2%}, worst {max(some):.2%}")
    if way is not None:
        say_hops(way)


if __name__ == "__main__":
    main()
