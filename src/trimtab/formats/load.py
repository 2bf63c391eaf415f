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
    from trimtab.formats.frameworks.common import FrameworkConfig
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
    return OpenedFile(Path(path), overrides).load(profile)


class OpenedFile:
    """A job file, framework config, launch script or command line that is read once, whatever is asked of it.

    `data` is a job file's, with the overrides; else there is a composed config, and the framework that it is of.
    """

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        self.path = path
        self.data: Mapping[str, Any] | None = None
        self.composed: ComposedConfig | None = None
        self.framework: type[FrameworkConfig] | None = None
        self._text = ""
        if is_launch(path, overrides):
            self._take(composed_launch(path, overrides))
            return
        text = yaml_text.read_text(path)
        # A job file has no interpolations, and parsing a framework's config here takes as long as composing it.
        data = {} if "${" in text else yaml_text.parse_config(text, str(path))
        if not isinstance(data, Mapping):
            found = "nothing" if data is None else type(data).__name__
            raise InputError(
                f"a job file is a mapping of keys, this one holds {found}",
                where=str(path),
                hint="see `trimtab plan --help` for a whole example",
            )
        if "${" not in text and job.matches(data):
            self.data, self._text = yaml_text.overridden(data, overrides), "" if overrides else text
            return
        # Framework configs need OmegaConf and Hydra, whose import takes longer than planning.
        from trimtab.formats.frameworks.hydra_config import compose

        try:
            self._take(compose(path, overrides))
        except InputError:
            if not overrides and isinstance(data := data or yaml_text.parse_config(text, str(path)), Mapping):
                refuse_non_rl(data, str(path))
            raise

    def _take(self, composed: ComposedConfig) -> None:
        from trimtab.formats.frameworks.registry import framework_of, titles

        self.path = composed.path
        refuse_non_rl(composed.reader.plain(("runner", "data")), str(self.path))
        framework = composed.launch.framework if composed.launch else framework_of(composed.reader)
        if framework is not None:
            refuse_purpose(framework.purpose(composed.reader), str(self.path))
            self.composed, self.framework = composed, framework
        elif job.matches(composed.config):
            self.data = composed.config
        else:
            raise InputError(
                "unknown job file format",
                where=str(self.path),
                hint=f"known are trimtab's job file (cluster, workflow) and the configs of {titles()}",
            )

    def load(self, profile: Profile | None = None) -> LoadedJob:
        """The job, with measured costs."""
        if self.composed is None or self.framework is None:
            return job.read(self.data or {}, self.path, profile, self._text)
        try:
            loaded = self.framework.read(self.composed, profile)
        except InputError as error:
            error.where = error.where or str(self.path)
            raise
        staleness = loaded.job.workflow.staleness
        if staleness > job.MAX_STALENESS:
            raise InputError(f"staleness is {staleness}: at most {job.MAX_STALENESS} is planned", where=str(self.path))
        return loaded


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
