"""Jobs of the known frameworks that are no reinforcement learning: there is no rollout beside training to place.

Called where a file is no job that can be planned, so that it is told what it is instead of being called unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError

_SFT = "supervised fine-tuning"
_PREFERENCE = "training on preferences (DPO or a reward model)"
_EVALUATION = "an evaluation"

_NEMO_RL = {"sft": _SFT, "dpo": _PREFERENCE, "rm": _PREFERENCE, "eval": _EVALUATION}
_RL_SECTIONS = ("actor_rollout_ref", "grpo", "distillation", "ppo", "vllm")


def what_else(data: Mapping[str, Any]) -> str | None:
    """What a framework's config is for, where it is for something else than reinforcement learning."""
    runner, inputs = _section(data, "runner"), _section(data, "data")
    task = str(runner.get("task_type") or "")
    if task == "sft":
        return _SFT
    if task.endswith("_eval") or (task and runner.get("only_eval") is True):
        return _EVALUATION
    if task or any(_section(data, name) for name in _RL_SECTIONS):
        return None
    for name, meaning in _NEMO_RL.items():
        if _section(data, name):
            return meaning
    if "chosen_key" in inputs:
        return _PREFERENCE
    if "response_key" in inputs and "path" in inputs:
        return _EVALUATION
    if "output_path" in inputs and "path" in inputs:
        return "generation without training"
    trains = "train_files" in inputs and "trainer" in data and ("optim" in data or "engine" in data)
    if trains or ("dataset" in inputs and "output_key" in inputs):
        return _SFT
    return None


def refuse(data: Mapping[str, Any], where: str) -> None:
    """Raise an InputError for a config that is for something else."""
    what = what_else(data)
    if what is not None:
        raise InputError(
            f"not an RL job: this is {what}",
            where=where,
            hint="plans are made for a rollout and training that share a cluster; there is nothing to place here",
        )


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}
