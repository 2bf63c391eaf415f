"""GPU counts of each component of a logged run: from the user, or from the run's config.

Never guessed: a log does not contain them, and a wrong count makes every plan wrong. A config is read with its parents,
as the framework reads it; what it does not state must be given by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

from trimtab.core.errors import InputError, meant
from trimtab.core.frozen import Frozen

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


class RunFacts(Frozen):
    """Facts about a run that its log does not contain.

    `asynchronous` names the mode if it is asynchronous, `synchronous`: it is known not to be; `shared`: all components
    take turns on the same GPUs.
    """

    default_gpus: int | None = None
    by_name: Mapping[str, int] = field(default_factory=dict)
    answers_per_step: int | None = None
    asynchronous: str | None = None
    shared: bool = False
    synchronous: bool = False

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
            synchronous=self.synchronous or other.synchronous,
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
    from trimtab.formats.frameworks.hydra_config import ConfigReader, read_alone
    from trimtab.formats.frameworks.registry import FRAMEWORKS
    from trimtab.formats.launch.read import composed_config, is_launch

    kind = FRAMEWORKS[framework]
    try:
        reader = composed_config(path).reader
    except InputError:
        if not kind.GROUPS or is_launch(path):
            raise
        reader = ConfigReader(read_alone(path), path)  # missing config groups: the file itself may state the counts
    try:
        return kind.facts(reader)
    except InputError as error:
        raise InputError(error.what, where=error.where, hint=f"give the GPUs: {GPUS_HINT}") from None
