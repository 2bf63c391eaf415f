"""Builders for the jobs that tests talk about."""

from __future__ import annotations

from typing import Any

from trimtab.model.workflow import Cluster, Component, Node, PlacementJob, Variant, WeightSync, Workflow


def cluster(gpus: int, per_node: int = 8, **node: Any) -> Cluster:
    sizes = [per_node] * (gpus // per_node) + ([gpus % per_node] if gpus % per_node else [])
    return Cluster(tuple(Node(f"node{i}", size, **node) for i, size in enumerate(sizes)))


def component(name: str, seconds: dict[int, float] | float, after: tuple[str, ...] = (), **more: Any) -> Component:
    if isinstance(seconds, float | int):
        return Component(name, after=after, cpu_seconds=float(seconds), **more)
    variant = {
        k: more.pop(k) for k in ("gpus", "multiple_of", "memory", "floor_seconds", "host_memory_gb") if k in more
    }
    points = tuple(sorted(seconds.items()))
    return Component(name, (Variant(seconds={"": points}, **variant),), after, **more)


def seed_job(gpus: int = 8, measured_on: int | None = None, **more: Any) -> PlacementJob:
    """The costs of RLinf's own example: trainer 95.7, inference 30.8, rollout 59.9 seconds."""
    on = measured_on or gpus
    chain = (
        component("rollout", {on: 59.9}),
        component("inference", {on: 30.8}, ("rollout",), **more),
        component("trainer", {on: 95.7}, ("inference",), **more),
    )
    return PlacementJob(cluster(gpus), Workflow(chain, batches=512))


def ppo_job(gpus: int = 16) -> PlacementJob:
    """Six components with a critic and a reward model."""
    return PlacementJob(
        cluster(gpus, gpu_memory_gb=80.0),
        Workflow(
            (
                component("rollout", {8: 120.0, 16: 70.0}, engine="vllm", switch_seconds=2.0),
                component("reward", {8: 20.0, 16: 11.0}, ("rollout",), engine="megatron", switch_seconds=1.0),
                component("reference", {8: 30.0, 16: 16.0}, ("rollout",), engine="megatron", switch_seconds=1.0),
                component("values", {8: 25.0, 16: 13.0}, ("rollout",), engine="megatron", switch_seconds=1.0),
                component("critic", {8: 80.0, 16: 42.0}, ("reward", "values"), granularity=64, engine="megatron"),
                component(
                    "actor", {8: 100.0, 16: 52.0}, ("reward", "reference", "values"), granularity=64, engine="megatron"
                ),
            ),
            batches=256,
            weight_sync=WeightSync("actor", "rollout", 1.0, 3.0),
        ),
    )
