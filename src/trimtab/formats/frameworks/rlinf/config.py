"""Reads RLinf's reasoning configs, with costs in `profile_data` measured with all GPUs shared.

RLinf runs a reasoning workflow in two ways only: everything on all GPUs, where the actor's workers also do the
inference, or every component on its own contiguous GPUs. This module states these as rules, writes a plan as
`cluster.component_placement`, and must never write another. Embodied configs are read in `embodied`.
"""

from __future__ import annotations

from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import AllowedGpuCounts
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.frameworks.rlinf import embodied as rlinf_embodied
from trimtab.formats.frameworks.rlinf import placement as rlinf_placement
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.profile import ComponentProfile, Profile
from trimtab.model.workflow import Component, Workflow

NAME = "rlinf"
TRAINS = ("embodied", "reasoning", "coding_online_rl")
"""Task types that train with RL."""

_COSTS = ("rollout", "inference", "reward", "critic", "actor", "trainer")

_ADD_PROFILE = (
    "add profile_data: {actor_cost: SECONDS, inference_cost: SECONDS, rollout_cost: SECONDS}, each the seconds of one "
    "iteration with all GPUs shared or {GPUS: SECONDS}, or give --profile FILE"
)


def matches(reader: ConfigReader) -> bool:
    return any(reader.has(key) for key in (rlinf_placement.KEY, "profile_data")) or (
        reader.has("runner.task_type") and reader.has("cluster.num_nodes")
    )


def read(composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
    kind = composed.reader.text("runner.task_type", "")
    if (kind and kind not in TRAINS) or composed.reader.boolean("runner.only_eval", False):
        raise InputError(
            f"this is no RL training: runner.task_type is {kind}" if kind not in TRAINS else "this only evaluates",
            where=composed.reader.where("runner"),
            hint=f"plans are made for runner.task_type {', '.join(TRAINS)}",
        )
    if rlinf_embodied.matches(composed.reader):
        return rlinf_embodied.read(composed, profile)
    return _Reasoning(composed, profile).loaded()


class _Reasoning:
    """State while a reasoning config is read."""

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = composed.reader
        self.profile = profile
        self.nodes, self.gpus_per_node = rlinf_embodied.cluster_size(self.reader)
        self.total = self.nodes * self.gpus_per_node
        self.stated_batches: int | None = self.reader.positive_int("data.rollout_batch_size", None)
        self.minibatches: int = self.reader.positive_int("algorithm.n_minibatches", 1)
        # RLinf also recomputes for its importance-sampling correction, whatever recompute_logprobs is.
        self.recompute = any(
            self.reader.boolean(f"algorithm.{key}", default)
            for key, default in (("recompute_logprobs", True), ("importance_sampling_fix", False))
        )
        self.assumptions: list[str] = []
        self.costs = self._costs()
        self.trainer = next(name for name in ("trainer", "actor") if name in self.costs)
        stated = rlinf_placement.stated(self.reader)
        self.written_trainer = next((n for n in ("actor", "trainer") if n in stated), self.trainer)
        self.placed = self._placed()

    def loaded(self) -> LoadedJob:
        components = self._components()
        workflow = Workflow(
            components=components,
            batches=self.stated_batches or 1,
            weight_sync=common.weight_sync(self.profile, self.trainer, "rollout"),
        )
        rules = self._rules(components)
        cluster = common.even_cluster(self.nodes, self.gpus_per_node)
        return common.loaded_job(
            self.composed, NAME, cluster, workflow, rules, self._settings, self.assumptions, self._current()
        )

    def _costs(self) -> dict[str, ComponentProfile]:
        reader = self.reader
        if self.profile is not None:
            names = ["rollout", *(["inference"] if self.recompute else []), self._trainer_in(self.profile)]
            hint = "without a separate inference set algorithm.recompute_logprobs=false"
            found = common.profiled(self.profile, names, inference=hint)
            self.assumptions.extend(common.not_placed(self.profile, [*names, "reward"]))
            return found
        if not reader.has("profile_data"):
            raise InputError(
                "profile_data is missing: component costs are unknown",
                where=reader.where("profile_data"),
                hint=_ADD_PROFILE,
            )
        rlinf_embodied.check_profile_keys(reader, [*(f"{name}_cost" for name in _COSTS), "gpus"])
        both = [name for name in ("trainer", "actor") if reader.has(f"profile_data.{name}_cost")]
        if len(both) > 1:
            raise InputError(
                "trainer_cost and actor_cost are two names for one cost",
                where=reader.where("profile_data"),
                hint="keep the one that is named in cluster.component_placement",
            )
        trainer = both[0] if both else "actor"
        measured_on: int = reader.positive_int("profile_data.gpus", self.total)
        others = [name for name in ("reward", "critic") if reader.has(f"profile_data.{name}_cost")]
        names = ["rollout", *(["inference"] if self.recompute else []), *others, trainer]
        if any(not isinstance(reader.get(f"profile_data.{name}_cost"), dict) for name in names):
            self.assumptions.append(f"the costs in profile_data were measured with {measured_on} GPUs, all shared")
        return {name: self._stated_cost(name, measured_on) for name in names}

    def _trainer_in(self, profile: Profile) -> str:
        return "trainer" if profile.component("trainer") else "actor"

    def _stated_cost(self, name: str, measured_on: int) -> ComponentProfile:
        missing = _ADD_PROFILE
        if name == "inference":
            missing = "add it, or set algorithm.recompute_logprobs: false where the run has no such step"
        return ComponentProfile(name, rlinf_embodied.stated_cost(self.reader, name, measured_on, missing))

    def _components(self) -> tuple[Component, ...]:
        streaming = self._streams()
        minibatch = max(1, (self.stated_batches or 1) // self.minibatches) if streaming else None
        return tuple(
            common.component(
                measured,
                after=self._after(name),
                sizes=self._sizes(name),
                granularity=minibatch if name == self.trainer else (1 if streaming else None),
                on_cpu=self._on_cpu(name),
            )
            for name, measured in self.costs.items()
        )

    def _after(self, name: str) -> list[str]:
        if name == "rollout":
            return []
        before = {"inference": ("rollout",), "reward": ("rollout",), "critic": ("inference", "rollout")}
        last = next(other for other in before.get(name, ("critic", "inference", "rollout")) if other in self.costs)
        return [last, *(["reward"] if name == self.trainer and "reward" in self.costs else [])]

    def _on_cpu(self, name: str) -> bool:
        """A rule-based reward needs no GPU; a reward model uses the rollout's."""
        return name == "reward" and not self.reader.boolean("reward.use_reward_model", False)

    def _streams(self) -> bool:
        """RLinf's pipelined mode streams batches, unless advantages need a whole mini-batch.

        Separate placements select that mode, so a separate plan streams whatever the file has now.
        """
        normalised = self.reader.boolean("algorithm.normalize_advantages", True)
        if not normalised and self.stated_batches is not None:
            self.assumptions.append(
                "streaming where placements are separate (pipelined): algorithm.normalize_advantages is false"
            )
            return True
        why = "algorithm.normalize_advantages is true" if normalised else "data.rollout_batch_size is not stated"
        self.assumptions.append(f"no streaming: each component takes all its inputs at once ({why})")
        return False

    def _sizes(self, name: str) -> AllowedGpuCounts:
        reader = self.reader
        if name == "reward":
            return AllowedGpuCounts()
        if name == "rollout":
            return AllowedGpuCounts(
                common.product(reader, ["rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"])
            )
        section = "actor.model"
        if name in ("inference", "critic") and reader.has(f"{name}.model"):
            section = f"{name}.model"
        keys = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        model_parallel = common.product(reader, [f"{section}.{key}" for key in keys])
        if self.stated_batches is None:
            return AllowedGpuCounts(model_parallel)
        group_size: int = reader.positive_int("algorithm.group_size", 1)
        samples = self.stated_batches * group_size
        if samples % self.minibatches:
            raise InputError(
                f"{samples} samples (data.rollout_batch_size x algorithm.group_size) do not divide into "
                f"{self.minibatches} mini-batches",
                where=reader.where("algorithm.n_minibatches"),
            )
        minibatch = samples // self.minibatches
        allowed = {
            dp * model_parallel
            for dp in range(1, self.total // model_parallel + 1)
            if minibatch % (dp * group_size) == 0
        }
        # The profile was measured on these counts, so they work, whatever the rule for mini-batches.
        allowed.update(g for g, _ in self.costs[name].seconds if g <= self.total and g % model_parallel == 0)
        return AllowedGpuCounts(model_parallel, tuple(sorted(allowed)))

    def _rules(self, components: tuple[Component, ...]) -> FrameworkRules:
        names = [c.name for c in components if not c.on_cpu]
        groupings: list[tuple[AllowedGroup, ...]] = []
        if common.runnable([self.total], components):
            groupings.append((AllowedGroup(frozenset(names), (self.total,)),))
        others = sorted(set(self.placed) - {*names, "reward", "actor", "trainer", "inference"})
        if others:
            self.assumptions.append(
                f"{', '.join(others)} has no cost here, so it stays with everything else on all GPUs"
            )
        elif "critic" in names:
            self.assumptions.append("a critic shares all GPUs with everything else")
        else:
            # The reward is a light worker on the rollout's GPUs.
            beside = [name for name in names if name in ("rollout", "reward")]
            apart = [beside, *([name] for name in names if name not in beside)]
            groupings.append(tuple(AllowedGroup(frozenset(group)) for group in apart))
        if not groupings:
            raise InputError(
                f"everything must share all {self.total} GPUs, and their parallel sizes do not divide that",
                where=self.reader.where("cluster"),
            )
        return FrameworkRules(framework="RLinf", groupings=tuple(groupings))

    def _placed(self) -> dict[str, tuple[int, ...]]:
        placed = rlinf_placement.ranks(self.reader, self.total)
        aliases = {"actor": self.trainer, "trainer": self.trainer}
        placed = {aliases.get(name, name): gpus for name, gpus in placed.items()}
        planned = {name: placed[name] for name in self.costs if name in placed}
        rlinf_placement.refuse_partial_overlap(planned, self.reader)
        for name, gpus in planned.items():
            if gpus != tuple(range(gpus[0], gpus[-1] + 1)):
                raise InputError(
                    f"the GPUs of {name} have gaps, and RLinf requires them to be contiguous",
                    where=self.reader.where(f"{rlinf_placement.KEY}.{name}"),
                )
        return placed

    def _current(self) -> CurrentPlacement | None:
        costs = {name for name in self.costs if not self._on_cpu(name)}
        ranks = {name: self.placed[name] for name in costs if name in self.placed}
        if "inference" in costs and "inference" not in ranks and self.trainer in ranks:
            ranks["inference"] = ranks[self.trainer]  # done by the actor's workers
        if "reward" in costs and "reward" not in ranks and "rollout" in ranks:
            ranks["reward"] = ranks["rollout"]
        if set(ranks) != costs:
            return None
        return CurrentPlacement(ranks=ranks, where=self.reader.where(rlinf_placement.KEY))

    def _settings(self, plan: Plan) -> PlanSettings:
        shared = len(plan.groups) == 1
        placement: dict[str, Any] = {}
        if shared:
            placement[",".join(self._shared_names())] = "all"
        else:
            for name in (name for name in self.costs if name != "reward"):
                written = self.written_trainer if name == self.trainer else name
                placement[written] = rlinf_placement.text(plan.placed(name).gpus, self.total)
            if self.written_trainer == "actor" or "reward" in {*self.placed, *self.costs}:
                placement["reward"] = placement["rollout"]  # a light worker; as in RLinf's own configs
        values: dict[str, Any] = {rlinf_placement.KEY: placement}
        advice = []
        if "inference" in placement and not self.reader.has("inference.group_name"):
            values |= self._inference_section()
            advice.append("a section inference is added: on GPUs of its own it has workers of its own")
        if self.reader.get("cluster.auto_scheduler", False) is True:
            values["cluster.auto_scheduler"] = False
            advice.append("cluster.auto_scheduler is turned off: it moves GPUs by rules of its own")
        if shared and self.reader.has("inference") and "inference" in self.placed:
            advice.append("the inference key is gone: on shared GPUs the actor's own workers do the inference")
        return PlanSettings(
            values=values, block=rlinf_embodied.block(self.reader, self.nodes, values), advice=tuple(advice)
        )

    def _inference_section(self) -> dict[str, Any]:
        """Settings of RLinf's inference workers: the actor's model on other GPUs."""
        values: dict[str, Any] = {"inference.group_name": "InferenceGroup", "inference.load_from_actor": True}
        for key in ("model", "tokenizer", "fsdp_config"):
            if self.reader.has(f"actor.{key}") and not self.reader.has(f"inference.{key}"):
                values[f"inference.{key}"] = f"${{actor.{key}}}"
        return values

    def _shared_names(self) -> list[str]:
        others = [n for n in self.placed if n == "critic" or n not in {*self.costs, "reward", "inference"}]
        if self.written_trainer == "trainer":
            return ["rollout", "trainer", *others, *(["reward"] if "reward" in self.placed else [])]
        return ["actor", *others, "rollout", "reward"]
