"""Reads RLinf's reasoning configs, with costs in `profile_data` measured with all GPUs shared.

RLinf runs a reasoning workflow in two ways only: everything on all GPUs, where the actor's workers also do the
inference, or every component on its own contiguous GPUs. This module states these as rules, writes a plan as
`cluster.component_placement`, and must never write another.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from trimtab.core.ranks import ranks_text
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.hydra_config import ComposedConfig
from trimtab.formats.frameworks.rlinf import KEY, Rlinf, stated_placement
from trimtab.formats.loaded import PlanSettings
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import Component, ComponentProfile, Profile, Variant

_ADD_PROFILE = (
    "add profile_data: {actor_cost: SECONDS, inference_cost: SECONDS, rollout_cost: SECONDS}, each the seconds of one "
    "iteration with all GPUs shared or {GPUS: SECONDS}, or give --profile FILE"
)
_NO_INFERENCE = "add it, or set algorithm.recompute_logprobs: false where the run has no such step"


class Reasoning(Rlinf):
    """A reasoning config."""

    COMPONENTS = ("rollout", "inference", "reward", "critic", "actor", "trainer")
    NOT_PLACED = ("reward",)

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        self.trainer = next(name for name in ("trainer", "actor") if name in self.costs)
        stated = stated_placement(self.reader)
        self.written_trainer = next((n for n in ("actor", "trainer") if n in stated), self.trainer)
        aliases = {"actor": self.trainer, "trainer": self.trainer}
        self.placed = {aliases.get(name, name): gpus for name, gpus in self.placed.items()}
        self._check_placed()
        self.stated_batches = self.reader.optional_count("data.rollout_batch_size")
        self.batches = self.stated_batches or 1
        self.minibatches = self.reader.count("algorithm.n_minibatches", 1)
        self.streaming = self._streams()

    def stated_costs(self) -> dict[str, ComponentProfile]:
        reader = self.reader
        # RLinf also recomputes for its importance-sampling correction, whatever recompute_logprobs is.
        recompute = any(
            reader.boolean(f"algorithm.{key}", default)
            for key, default in (("recompute_logprobs", True), ("importance_sampling_fix", False))
        )
        inference = ["inference"] if recompute else []
        if self.profile is not None:
            names = ["rollout", *inference, "trainer" if self.profile.component("trainer") else "actor"]
            hints = {"inference": "without a separate inference set algorithm.recompute_logprobs=false"}
            return self.profiled(names, names, hints)
        self.check_profile_data([*(f"{name}_cost" for name in self.COMPONENTS), "gpus"], _ADD_PROFILE)
        both = [name for name in ("trainer", "actor") if reader.has(f"profile_data.{name}_cost")]
        if len(both) > 1:
            raise reader.error(
                "profile_data",
                "trainer_cost and actor_cost are two names for one cost",
                "keep the one that is named in cluster.component_placement",
            )
        measured_on = reader.count("profile_data.gpus", self.total)
        others = [name for name in ("reward", "critic") if reader.has(f"profile_data.{name}_cost")]
        names = ["rollout", *inference, *others, *(both or ["actor"])]
        if any(not isinstance(reader.get(f"profile_data.{name}_cost"), dict) for name in names):
            self.assumptions.append(f"the costs in profile_data were measured with {measured_on} GPUs, all shared")
        hints = dict.fromkeys(names, _ADD_PROFILE) | {"inference": _NO_INFERENCE}
        return {name: ComponentProfile(name, self.stated_cost(name, measured_on, hints[name])) for name in names}

    def granularity(self, name: str) -> int | None:
        if not self.streaming:
            return None
        return max(1, self.batches // self.minibatches) if name == self.trainer else 1

    def after(self, name: str) -> tuple[str, ...]:
        if name == "rollout":
            return ()
        before = {"inference": ("rollout",), "reward": ("rollout",), "critic": ("inference", "rollout")}
        last = next(other for other in before.get(name, ("critic", "inference", "rollout")) if other in self.costs)
        return (last, *(["reward"] if name == self.trainer and "reward" in self.costs else []))

    def on_cpu(self, name: str) -> bool:
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

    def sizes(self, name: str) -> Variant:
        reader = self.reader
        if name == "reward":
            return Variant()
        if name == "rollout":
            return Variant(multiple_of=reader.product("rollout", "tensor_parallel_size", "pipeline_parallel_size"))
        section = "actor.model"
        if name in ("inference", "critic") and reader.has(f"{name}.model"):
            section = f"{name}.model"
        keys = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        model_parallel = reader.product(section, *keys)
        if self.stated_batches is None:
            return Variant(multiple_of=model_parallel)
        group_size = reader.count("algorithm.group_size", 1)
        samples = self.stated_batches * group_size
        if samples % self.minibatches:
            raise reader.error(
                "algorithm.n_minibatches",
                f"{samples} samples (data.rollout_batch_size x algorithm.group_size) do not divide into "
                f"{self.minibatches} mini-batches",
            )
        minibatch = samples // self.minibatches
        allowed = {
            dp * model_parallel
            for dp in range(1, self.total // model_parallel + 1)
            if minibatch % (dp * group_size) == 0
        }
        # The profile was measured on these counts, so they work, whatever the rule for mini-batches.
        allowed.update(g for g, _ in self.costs[name].seconds if g <= self.total and g % model_parallel == 0)
        return Variant(multiple_of=model_parallel, gpus=tuple(sorted(allowed)))

    def rules(self, members: Mapping[str, Component]) -> FrameworkRules:
        names = [name for name, component in members.items() if not component.on_cpu]
        groupings: list[tuple[AllowedGroup, ...]] = []
        if common.runnable([self.total], members.values()):
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
            raise self.reader.error(
                "cluster", f"everything must share all {self.total} GPUs, and their parallel sizes do not divide that"
            )
        return FrameworkRules(framework="RLinf", groupings=tuple(groupings))

    def _check_placed(self) -> None:
        planned = {name: self.placed[name] for name in self.costs if name in self.placed}
        for (name, gpus), (other, theirs) in combinations(planned.items(), 2):
            both = set(gpus) & set(theirs)
            if both and gpus != theirs:
                raise self.reader.error(
                    KEY,
                    f"{name} and {other} overlap on GPU {ranks_text(sorted(both))} without sharing all their GPUs",
                    "RLinf runs components either on the same GPUs or on GPUs of their own",
                )
        for name, gpus in planned.items():
            if gpus != tuple(range(gpus[0], gpus[-1] + 1)):
                raise self.reader.error(
                    f"{KEY}.{name}", f"the GPUs of {name} have gaps, and RLinf requires them to be contiguous"
                )

    def current(self) -> CurrentPlacement | None:
        costs = {name for name in self.costs if not self.on_cpu(name)}
        ranks = {name: self.placed[name] for name in costs if name in self.placed}
        if "inference" in costs and "inference" not in ranks and self.trainer in ranks:
            ranks["inference"] = ranks[self.trainer]  # done by the actor's workers
        if "reward" in costs and "reward" not in ranks and "rollout" in ranks:
            ranks["reward"] = ranks["rollout"]
        if set(ranks) != costs:
            return None
        return CurrentPlacement(ranks=ranks, where=self.reader.where(KEY))

    def settings(self, plan: Plan) -> PlanSettings:
        shared = len(plan.groups) == 1
        placement: dict[str, Any] = {}
        if shared:
            placement[",".join(self._shared_names())] = self.placement_text(range(self.total))
        else:
            for name in (name for name in self.costs if name != "reward"):
                written = self.written_trainer if name == self.trainer else name
                placement[written] = self.placement_text(plan.placed(name).gpus)
            if self.written_trainer == "actor" or "reward" in {*self.placed, *self.costs}:
                placement["reward"] = placement["rollout"]  # a light worker; as in RLinf's own configs
        values: dict[str, Any] = {KEY: placement}
        advice = []
        if "inference" in placement and not self.reader.has("inference.group_name"):
            values |= self._inference_section()
            advice.append("a section inference is added: on GPUs of its own it has workers of its own")
        if self.reader.get("cluster.auto_scheduler", False) is True:
            values["cluster.auto_scheduler"] = False
            advice.append("cluster.auto_scheduler is turned off: it moves GPUs by rules of its own")
        if shared and self.reader.has("inference") and "inference" in self.placed:
            advice.append("the inference key is gone: on shared GPUs the actor's own workers do the inference")
        return PlanSettings(values, self.block(values), tuple(advice))

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
