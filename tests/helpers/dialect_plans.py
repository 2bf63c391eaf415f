"""Plans made by hand, and configs written on the spot, for tests of dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.formats.frameworks.hydra_config import ComposedConfig, compose
from trimtab.model.plan import ComponentGroup, PlacedComponent, Plan
from trimtab.model.workflow import ComponentProfile, Profile

DATA = Path(__file__).parents[1] / "data"
AREAL = """\
experiment_name: e
trial_name: t
cluster: {n_nodes: 1, n_gpus_per_node: 8}
actor: {backend: "fsdp:d4", path: Qwen/Qwen2.5-1.5B, kl_ctl: 0.0}
rollout: {backend: "sglang:d4t1", max_head_offpolicyness: 0}
train_dataset: {batch_size: 64}
gconfig: {n_samples: 8}
"""
ROLL = """\
rollout_batch_size: 64
num_gpus_per_node: 8
actor_train:
  device_mapping: list(range(0,8))
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 8}
  strategy_args: {strategy_name: megatron_train, strategy_config: {}}
actor_infer:
  device_mapping: list(range(0,8))
  strategy_args: {strategy_name: vllm, strategy_config: {}}
reference: {device_mapping: "list(range(0,8))", strategy_args: {strategy_name: hf_infer, strategy_config: {}}}
"""
TRL = """\
num_processes: 8
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
use_vllm: true
vllm_mode: colocate
"""


def plan_of(groups: Mapping[str, Sequence[int]], total: int = 8) -> Plan:
    """A plan from `{"rollout trainer": ranks}`; only where things lie matters."""
    made = tuple(ComponentGroup(components=tuple(names.split()), gpus=tuple(ranks)) for names, ranks in groups.items())
    placed = tuple(
        PlacedComponent(name=name, gpus=group.gpus, variant="", seconds=1.0, start=0.0, end=1.0, idle_share=0.0)
        for group in made
        for name in group.components
    )
    return Plan(
        groups=made,
        components=placed,
        iteration_seconds=1.0,
        sync_seconds=0.0,
        mode="collocated" if len(made) == 1 else "disaggregated",
        timeline=(),
        timeline_seconds=1.0,
        idle_share=0.0,
        total_gpus=total,
    )


def profile_of(seconds: Mapping[str, Mapping[int, float]], waits: Sequence[str] = ()) -> Profile:
    return Profile(
        source="test",
        components=tuple(
            ComponentProfile(name=name, seconds=tuple(sorted(points.items())), waits=name in waits)
            for name, points in seconds.items()
        ),
    )


def composed(folder: Path, text: str, *overrides: str) -> ComposedConfig:
    path = folder / "job.yaml"
    path.write_text(text)
    return compose(path, overrides)
