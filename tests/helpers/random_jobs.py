"""Random jobs, small enough to enumerate: every feature of the placement model, in every mixture."""

from __future__ import annotations

import random

from trimtab.model.workflow import (
    Cluster,
    Component,
    GpuCurve,
    Memory,
    Node,
    PlacementJob,
    Variant,
    WeightSync,
    Workflow,
)


def random_job(rng: random.Random, components: int, gpus: int, batches: int, staleness: int = 0) -> PlacementJob:
    kinds = ["", ""] if rng.random() < 0.85 else ["A", "B"]
    limit = rng.choice([None, 80.0])
    host = rng.choice([None, None, 40.0 * gpus])
    if kinds[0] == kinds[1]:
        nodes = [Node("n0", gpus, "", limit, host)]
    else:
        first = rng.randint(1, max(1, gpus - 1))
        nodes = [Node("n0", first, "A", limit, host), Node("n1", max(1, gpus - first), "B", limit, host)]
    cluster = Cluster(tuple(nodes))
    names = ["rollout", "inference", "trainer", "critic", "reward"][:components]
    made = []
    for i, name in enumerate(names):
        after = () if i == 0 else tuple(rng.sample(names[:i], k=rng.choice([1, 1, 1, min(2, i)])))
        on_cpu = i > 0 and rng.random() < 0.12 and components > 2
        granularity = rng.choice([1, 1, None, 2, 3, 4])
        completion = ((0.5, 0.2), (0.9, 0.5), (1.0, 1.0)) if rng.random() < 0.25 else ()
        common = {
            "name": name,
            "after": after,
            "granularity": granularity,
            "completion": completion,
            "switch_seconds": rng.choice([0.0, 0.0, 1.0, 4.0]),
            "engine": rng.choice([None, "megatron", "vllm"]),
        }
        if on_cpu:
            made.append(Component(**common, cpu_seconds=rng.choice([1.0, 5.0, 20.0]), cpus=4))
            continue
        variants = tuple(random_variant(rng, gpus, kinds, f"v{v}") for v in range(rng.choice([1, 1, 1, 2])))
        made.append(Component(**common, variants=variants))
    on_gpu = [c.name for c in made if not c.on_cpu]
    sync = None
    if len(on_gpu) > 1 and (staleness or rng.random() < 0.5):
        sync = WeightSync(on_gpu[-1], on_gpu[0], rng.choice([0.0, 1.0]), rng.choice([0.0, 2.0, 6.0]))
    rng.shuffle(made)
    return PlacementJob(cluster, Workflow(tuple(made), batches, staleness if sync else 0, sync))


def random_variant(rng: random.Random, gpus: int, kinds: list[str], name: str) -> Variant:
    def points() -> tuple[tuple[int, float], ...]:
        counts = sorted(rng.sample(range(1, gpus + 1), k=min(gpus, rng.choice([1, 1, 2, 3]))))
        work = rng.uniform(5, 100)
        return tuple((g, round(rng.uniform(0.7, 1.3) * (work / g + 2), 3)) for g in counts)

    seconds = {kind: points() for kind in dict.fromkeys(kinds)}
    if kinds[0] != kinds[1] and rng.random() < 0.3:
        seconds.pop(rng.choice(kinds))
    floor = 0.0 if rng.random() < 0.6 else 0.5 * min(s for p in seconds.values() for _, s in p)
    memory = Memory()
    if rng.random() < 0.5:
        memory = Memory(
            active=rng.choice(
                [GpuCurve(per_gpu=rng.choice([20.0, 50.0, 70.0])), GpuCurve(sharded=150.0, per_gpu=10.0)]
            ),
            resident=GpuCurve(per_gpu=rng.choice([0.0, 5.0, 20.0])),
        )
    return Variant(
        name=name,
        seconds=seconds,
        floor_seconds=floor,
        gpus=None if rng.random() < 0.8 else tuple(sorted(rng.sample(range(1, gpus + 1), k=min(gpus, 3)))),
        multiple_of=rng.choice([1, 1, 1, 2]),
        memory=memory,
        host_memory_gb=rng.choice([0.0, 0.0, 15.0, 35.0]),
    )
