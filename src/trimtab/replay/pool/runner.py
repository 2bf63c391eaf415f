"""Runs a policy of a pool scenario with a seed and returns its figures."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.core.errors import InputError
from trimtab.replay.pool.clairvoyant import Clairvoyant
from trimtab.replay.pool.driver import PoolReality, PoolReplay
from trimtab.replay.pool.figures import PoolFigures, figures
from trimtab.replay.pool.policies import PoolPolicy, scheduler
from trimtab.replay.pool.scenario import PoolScenario
from trimtab.replay.pool.workload import WorkloadTask, workload


def reality(scenario: PoolScenario, seed: int, until_s: float) -> PoolReality:
    """The cluster of a scenario, with its churn under a seed."""
    cluster = scenario.cluster
    names = tuple(f"n{at:05d}" for at in range(cluster.nodes))
    by_chance = cluster.churn.events(list(names), until_s, seed) if cluster.churn else []
    events = sorted([*cluster.events, *by_chance], key=lambda event: (event.at_s, event.node))
    return PoolReality(names, cluster.gpus, scenario.times, tuple(events), scenario.checkpoint_s, seed)


def tasks(scenario: PoolScenario, seed: int) -> list[WorkloadTask]:
    """The workload of a scenario under a seed."""
    settings = scenario.tasks
    rows = settings.rows(seed)
    total = scenario.cluster.nodes * scenario.cluster.gpus
    for row in rows:
        if row.gpus > total:
            raise InputError(
                f"a job asks for {row.gpus} GPUs, but the cluster has {total}",
                where="cluster",
                hint="add nodes, or set `most_gpus` under `tasks` to skip larger jobs",
            )
    return workload(
        rows,
        seed=seed,
        node_gpus=scenario.cluster.gpus,
        classes=settings.classes,
        rate=settings.rate,
        saves=settings.saves,
        estimates=settings.estimates,
    )


def run_pool(
    scenario: PoolScenario, policy: PoolPolicy, seed: int, progress: Callable[[float], None] | None = None
) -> PoolFigures:
    submitted = tasks(scenario, seed)
    until_s = max(task.submit_s for task in submitted) + max(task.work_s for task in submitted)
    real = reality(scenario, seed, until_s)
    classes = [priority_class.name for priority_class in scenario.tasks.classes]
    if policy.use == "clairvoyant":
        return figures(Clairvoyant(submitted, real).run(), policy.name, seed, classes)
    gpus = scenario.cluster.nodes * scenario.cluster.gpus
    machine, first = scheduler(policy, scenario.cluster.gpus, gpus)
    outcome = PoolReplay(machine, submitted, real, first=first, progress=progress).run()
    return figures(outcome, policy.name, seed, classes)
