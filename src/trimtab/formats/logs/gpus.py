"""GPU counts of each component of a logged run: from the user, or from the run's config.

Never guessed: a log does not contain them, and a wrong count makes every plan wrong. A config is read with its parents,
as the framework reads it; what it does not state must be given by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, meant
from trimtab.core.ranks import rank_range
from trimtab.formats import yaml_text
from trimtab.formats.frameworks.hydra_config import ConfigReader, compose
from trimtab.formats.frameworks.nemo_rl import config as nemo_rl

GPUS_HINT = "--gpus 16, or per component --gpus rollout=8 --gpus trainer=8, or --config with the run's configuration"

ROLES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("rollout", "generation"),
    "trainer": (
        *("update_actor", "old_log_prob", "ref", "values", "update_critic"),
        *("actor", "inference", "critic", "critic_inference"),
        *("policy", "logprobs", "value_inference", "value_training"),
    ),
}
"""Names for several components at once; a component's own name takes precedence."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its log does not contain.

    `asynchronous` names the mode if it is asynchronous; `shared`: all components take turns on the same GPUs.
    """

    default_gpus: int | None = None
    by_name: Mapping[str, int] = field(default_factory=dict)
    answers_per_step: int | None = None
    asynchronous: str | None = None
    shared: bool = False

    def gpus(self, component: str) -> int | None:
        """The GPUs of a component; `None` if unknown."""
        if component in self.by_name:
            return self.by_name[component]
        for role, members in ROLES.items():
            if component in members and role in self.by_name:
                return self.by_name[role]
        if self.default_gpus is None and component == "weight_sync" and self.by_name:
            # The copy reaches every GPU that takes part in it.
            return max(self.by_name.values())
        return self.default_gpus

    def with_defaults(self, other: RunFacts) -> RunFacts:
        """These facts, completed by the other's."""
        return RunFacts(
            default_gpus=self.default_gpus if self.default_gpus is not None else other.default_gpus,
            # A count for all components is not mixed with another source's exceptions.
            by_name=dict(self.by_name) if self.default_gpus is not None else {**other.by_name, **self.by_name},
            answers_per_step=self.answers_per_step or other.answers_per_step,
            asynchronous=self.asynchronous or other.asynchronous,
            shared=self.shared or other.shared,
        )


def from_options(words: Iterable[str]) -> RunFacts:
    """The counts of `--gpus`: `16`, or `rollout=8`."""
    default_gpus: int | None = None
    by_name: dict[str, int] = {}
    for word in words:
        name, equals, count = word.rpartition("=")
        name, count = name.strip(), count.strip()
        gpus = int(count) if count.isascii() and count.isdigit() and len(count) < 8 else 0
        if gpus < 1 or (equals and not name):
            raise InputError(f"--gpus {word} is no count of GPUs", hint="--gpus 16, or --gpus rollout=8")
        if name:
            by_name[name] = gpus
        else:
            default_gpus = gpus
    return RunFacts(default_gpus, by_name)


def check_names(facts: RunFacts, components: Iterable[str]) -> None:
    """Raise InputError for a count of a component that was not measured."""
    known = list(components)
    for name in facts.by_name:
        if name not in known and not (name in ROLES and any(member in known for member in ROLES[name])):
            hint = meant(name, [*known, *ROLES], f"measured here: {', '.join(known)}")
            raise InputError(f"--gpus names {name}, which this log does not hold", hint=hint)


def from_config(path: Path, framework: str) -> RunFacts:
    """The facts in a run's config, with its parents and interpolations resolved."""
    if framework == "nemo_rl":
        return _nemo_rl(compose(path).reader)
    readers = {"verl": _verl, "rlinf": _rlinf, "openrlhf": _openrlhf}
    try:
        config = compose(path).config
    except InputError:  # missing config groups: the file itself may state the counts
        config = yaml_text.read_mapping(path)
    return readers[framework](config, str(path))


def _verl(config: Mapping[str, Any], name: str) -> RunFacts:
    total = _count(config, "trainer.nnodes", name) * _count(config, "trainer.n_gpus_per_node", name)
    by_name: dict[str, int] = {}
    nodes = _get(config, "actor_rollout_ref.rollout.nnodes")
    if isinstance(nodes, int) and nodes > 0:
        by_name["rollout"] = nodes * _count(config, "actor_rollout_ref.rollout.n_gpus_per_node", name)
    if _get(config, "reward.reward_model.enable_resource_pool") is True:
        by_name["reward"] = _count(config, "reward.reward_model.nnodes", name) * _count(
            config, "reward.reward_model.n_gpus_per_node", name
        )
    mode = _get(config, "trainer.v1.trainer_mode")
    return RunFacts(total, by_name, asynchronous=mode if mode in ("colocate_async", "separate_async") else None)


def _openrlhf(config: Mapping[str, Any], name: str) -> RunFacts:
    training = _count(config, "actor.num_nodes", name) * _count(config, "actor.num_gpus_per_node", name)
    engine_gpus = _get(config, "vllm.tensor_parallel_size")
    rollout = _count(config, "vllm.num_engines", name) * (engine_gpus if _is_count(engine_gpus) else 1)
    answers = _product(config, "rollout.batch_size", "rollout.n_samples_per_prompt")
    return RunFacts(by_name={"rollout": rollout, "trainer": training}, answers_per_step=answers)


def _nemo_rl(reader: ConfigReader) -> RunFacts:
    try:
        gpus = nemo_rl.gpus_of(reader)
    except InputError as error:
        raise InputError(error.what, where=error.where, hint=f"give the GPUs: {GPUS_HINT}") from None
    by_name = {"generation": gpus.generation, **({"reward": gpus.reward} if gpus.reward else {})}
    algorithm = next((name for name in ("grpo", "ppo", "distillation") if reader.has(name)), "grpo")
    keys = (f"{algorithm}.num_prompts_per_step", f"{algorithm}.num_generations_per_prompt")
    prompts, each = (reader.get(key) for key in keys)
    answers = prompts * each if _is_count(prompts) and _is_count(each) else None
    return RunFacts(gpus.policy, {} if gpus.colocated and not gpus.reward else by_name, answers)


def _rlinf(config: Mapping[str, Any], name: str) -> RunFacts:
    nodes, per_node = _get(config, "cluster.num_nodes"), _get(config, "cluster.num_gpus_per_node")
    total = nodes * per_node if _is_count(nodes) and _is_count(per_node) else None
    answers = _product(config, "data.rollout_batch_size", "algorithm.group_size")
    by_name: dict[str, int] = {}
    placement = _get(config, "cluster.component_placement")
    places = {str(value).strip().lower() for value in placement.values()} if isinstance(placement, Mapping) else set()
    for names, value in placement.items() if isinstance(placement, Mapping) else ():
        gpus = _ranks(value, total)
        for component in str(names).split(","):
            if gpus is None:
                raise InputError(
                    f"the GPUs of {component.strip()} cannot be counted from {value!r:.80}",
                    where=f"{name}: cluster.component_placement",
                    hint=GPUS_HINT,
                )
            by_name[component.strip()] = gpus
    if "actor" in by_name:
        # Components without a placement (inference in shared mode) run on the actor's GPUs.
        by_name.setdefault("trainer", by_name["actor"])
    if total is None and not by_name:
        _count(config, "cluster.num_gpus_per_node", name)
    return RunFacts(total, by_name, answers, shared=len(places) == 1)


def _ranks(value: Any, total: int | None) -> int | None:
    """GPUs of an RLinf placement: `all`, `3`, `0-7`, `0-3,6`, `0:0-4,1:5-9`."""
    text = str(value).strip().lower()
    if text == "all":
        return total
    ranges = [rank_range(part.partition(":")[0]) for part in text.split(",")]  # after the colon: processes
    return None if None in ranges else sum(len(ranks or ()) for ranks in ranges)


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count(config: Mapping[str, Any], dotted: str, name: str) -> int:
    value = _get(config, dotted)
    if not _is_count(value):
        found = "is not stated" if value is None else f"is {value!r:.60}, no plain number above 0"
        raise InputError(f"{dotted} {found}", where=name, hint=f"give the GPUs: {GPUS_HINT}")
    return int(value)


def _product(config: Mapping[str, Any], *keys: str) -> int | None:
    product = 1
    for key in keys:
        value = _get(config, key)
        if not _is_count(value):
            return None
        product *= value
    return product
