"""Runs one policy of a scenario with one seed, and says what it came to. Whoever has many runs calls it for each."""

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
    """The cluster of a scenario, with what happens to it under a seed."""
    cluster = scenario.cluster
    names = tuple(f"n{at:05d}" for at in range(cluster.nodes))
    by_chance = cluster.churn.events(list(names), until_s, seed) if cluster.churn else []
    happens = sorted([*cluster.events, *by_chance], key=lambda one: (one.at_s, one.node))
    return PoolReality(names, cluster.gpus, scenario.times, tuple(happens), scenario.checkpoint_s, seed)


def tasks(scenario: PoolScenario, seed: int) -> list[WorkloadTask]:
    """The tasks of a scenario under a seed."""
    said = scenario.tasks
    rows = said.rows(seed)
    most = scenario.cluster.nodes * scenario.cluster.gpus
    for row in rows:
        if row.gpus > most:
            raise InputError(
                f"a job asks {row.gpus} GPUs, and the cluster has {most}",
                where="cluster",
                hint="more nodes, or `most_gpus` under `tasks` to leave larger jobs out",
            )
    return workload(
        rows,
        seed=seed,
        node_gpus=scenario.cluster.gpus,
        classes=said.classes,
        rate=said.rate,
        saves=said.saves,
        estimates=said.estimates,
    )


def run_pool(
    scenario: PoolScenario, policy: PoolPolicy, seed: int, progress: Callable[[float], None] | None = None
) -> PoolFigures:
    """One policy, one seed."""
    asked = tasks(scenario, seed)
    until_s = max(one.submit_s for one in asked) + max(one.work_s for one in asked)
    real = reality(scenario, seed, until_s)
    classes = [one.name for one in scenario.tasks.classes]
    if policy.use == "clairvoyant":
        return figures(Clairvoyant(asked, real).run(), policy.name, seed, classes)
    gpus = scenario.cluster.nodes * scenario.cluster.gpus
    machine, first = scheduler(policy, scenario.cluster.gpus, gpus)
    outcome = PoolReplay(machine, asked, real, first=first, progress=progress).run()
    return figures(outcome, policy.name, seed, classes)
