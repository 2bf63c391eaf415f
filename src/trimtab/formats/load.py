"""Reads job files: detects the format of a file and calls its reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError
from trimtab.formats import job, yaml_text
from trimtab.formats.launch.read import composed_launch, is_launch
from trimtab.formats.loaded import LoadedJob
from trimtab.model.workflow import Profile

if TYPE_CHECKING:
    from trimtab.formats.frameworks.hydra_config import ComposedConfig

_SFT = "supervised fine-tuning"
_PREFERENCE = "training on preferences (DPO or a reward model)"
_EVALUATION = "an evaluation"

_NEMO_RL = {"sft": _SFT, "dpo": _PREFERENCE, "rm": _PREFERENCE, "eval": _EVALUATION}
_RL_SECTIONS = ("actor_rollout_ref", "grpo", "distillation", "ppo", "vllm")


def load(path: str | Path, overrides: Sequence[str] = (), profile: Profile | None = None) -> LoadedJob:
    """Read a job file, framework config or launch script, with `key=value` overrides and a measured profile.

    The words of a command line may stand for path and overrides.
    """
    path = Path(path)
    if is_launch(path, overrides):
        return _loaded(composed_launch(path, overrides), profile)
    text = yaml_text.read_text(path)
    data = yaml_text.parse_config(text, str(path))
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise InputError(
            f"a job file is a mapping of keys, this one holds {found}",
            where=str(path),
            hint="see `trimtab plan --help` for a whole example",
        )
    if job.matches(data) and "${" not in text:
        return job.read(yaml_text.overridden(data, overrides), path, profile, "" if overrides else text)
    # Framework configs need OmegaConf and Hydra, whose import takes longer than planning.
    from trimtab.formats.frameworks.hydra_config import compose

    try:
        composed = compose(path, overrides)
    except InputError:
        if not overrides:
            refuse_non_rl(data, str(path))
        raise
    return _loaded(composed, profile)


def _loaded(composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
    from trimtab.formats.frameworks.registry import framework_of, titles

    path = composed.path
    refuse_non_rl(composed.config, str(path))
    framework = composed.launch.framework if composed.launch else framework_of(composed.reader)
    if framework is not None:
        refuse_purpose(framework.purpose(composed.reader), str(path))
        try:
            loaded = framework.read(composed, profile)
        except InputError as error:
            error.where = error.where or str(path)
            raise
        staleness = loaded.job.workflow.staleness
        if staleness > job.MAX_STALENESS:
            raise InputError(f"staleness is {staleness}: at most {job.MAX_STALENESS} is planned", where=str(path))
        return loaded
    if job.matches(composed.config):
        return job.read(composed.config, path, profile)
    raise InputError(
        "unknown job file format",
        where=str(path),
        hint=f"known are trimtab's job file (cluster, workflow) and the configs of {titles()}",
    )


def non_rl_purpose(data: Mapping[str, Any]) -> str | None:
    """What a framework config is for, if it is not for reinforcement learning."""
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


def refuse_non_rl(data: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a config without RL: there is no rollout to place beside training."""
    refuse_purpose(non_rl_purpose(data), where)


def refuse_purpose(what: str | None, where: str) -> None:
    if what is not None:
        raise InputError(
            f"not an RL job: this is {what}",
            where=where,
            hint="plans are made for a rollout and training that share a cluster; there is nothing to place here",
        )


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}
