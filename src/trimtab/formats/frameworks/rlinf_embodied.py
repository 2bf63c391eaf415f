"""Reads RLinf's embodied configs: environment, rollout, actor.

Costs are `{environments per instance: seconds}`; with `data.env_num` environments on g GPUs each instance has env_num /
g of them, which gives seconds on g GPUs. RLinf's hybrid mode runs any grouping of the three, and an actor over the GPUs
of both others. What must never happen: a plan with more environments per instance than were measured, because they may
not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from trimtab.core.errors import InputError
from trimtab.formats.frameworks.hydra_config import as_number
from trimtab.formats.frameworks.rlinf import KEY, Rlinf, stated_placement
from trimtab.formats.loaded import PlanSettings
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import Component, ComponentProfile, Variant

_ADD_PROFILE = (
    "add profile_data: {env_profile_data: {ENVIRONMENTS: SECONDS}, rollout_profile_data: {...}, actor_cost: SECONDS}"
)
GROUPINGS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("env", "rollout", "actor"),),
    (("env", "rollout"), ("actor",)),
    (("env", "actor"), ("rollout",)),
    (("env",), ("rollout", "actor")),
    (("env",), ("rollout",), ("actor",)),
)
SPANNING = (("env",), ("rollout",), ("actor",))
"""Environment and rollout on separate GPUs, the actor over the GPUs of both."""


class Embodied(Rlinf):
    """An embodied config."""

    COMPONENTS = ("env", "rollout", "actor")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"actor": ("rollout",)}

    def stated_costs(self) -> dict[str, ComponentProfile]:
        reader = self.reader
        self.batches, self.chunk, note = self._streaming()
        self.assumptions.append(note)
        # RLinf's asynchronous PPO alone has this loss; other asynchronous runners are chosen on the command line.
        if reader.get("algorithm.loss_type") == "decoupled_actor_critic":
            self.staleness = max(1, math.ceil(reader.number("algorithm.staleness_threshold", 1)))
        if self.profile is not None:
            self.allowed = self._checked_sizes()
            return self.profiled(self.COMPONENTS, self.COMPONENTS)
        self.batches = reader.count("data.env_num", hint="add data.env_num: the number of environments")
        self.chunk = None
        self.check_profile_data(("env_profile_data", "rollout_profile_data", "actor_cost", "gpus"), _ADD_PROFILE)
        self.assumptions.append(f"actor_cost was measured with {self.total} GPUs")
        self.assumptions.append("no instance has more environments than were measured")
        env, max_envs = self._points("env_profile_data")
        rollout, max_rollouts = self._points("rollout_profile_data")
        each = {g: self.batches / g for g in range(1, self.total + 1)}
        self.allowed = {
            "env": Variant(gpus=tuple(g for g, some in each.items() if some <= max_envs and some.is_integer())),
            "rollout": Variant(gpus=tuple(g for g, some in each.items() if some <= max_rollouts)),
            "actor": Variant(),
        }
        for name, most in (("env", max_envs), ("rollout", max_rollouts)):
            if not self.allowed[name].gpus:
                raise reader.error(
                    f"profile_data.{name}_profile_data",
                    f"{self.batches} environments on up to {self.total} GPUs are more per instance than the {most:g} "
                    "measured, or do not divide evenly",
                    "measure more environments per instance, or change data.env_num",
                )
        actor = self.stated_cost("actor", reader.count("profile_data.gpus", self.total))
        points = {"env": env, "rollout": rollout, "actor": actor}
        return {name: ComponentProfile(name, found) for name, found in points.items()}

    def sizes(self, name: str) -> Variant:
        return self.allowed[name]

    def granularity(self, name: str) -> int | None:
        return self.chunk if name == "rollout" else None

    def notes(self) -> list[str]:
        left_out = self.placed and self.current() is None
        return ["your placement is not compared: it leaves components out"] if left_out else []

    def rules(self, members: Mapping[str, Component]) -> FrameworkRules:
        """Any grouping works, and components of a group may have different GPU counts."""
        *groupings, over = (
            tuple(AllowedGroup(frozenset(names)) for names in grouping) for grouping in (*GROUPINGS, SPANNING)
        )
        return FrameworkRules(self.TITLE, tuple(groupings), spanning=(over,))

    def current(self) -> CurrentPlacement | None:
        ranks = {name: self.placed[name] for name in self.COMPONENTS if name in self.placed}
        if len(ranks) < len(self.COMPONENTS):
            return None
        return CurrentPlacement(ranks, self.reader.where(KEY), overlap=True)

    def settings(self, plan: Plan) -> PlanSettings:
        for name in self.COMPONENTS:
            count, allowed = len(plan.placed(name).gpus), self.allowed[name]
            if not allowed.allows(count):
                only = f", only {', '.join(map(str, allowed.gpus))}" if allowed.gpus else ""
                raise InputError(f"RLinf cannot run this plan: {name} cannot have {count} GPUs{only}")
        values = {KEY: self._placement(plan)}
        return PlanSettings(values, self.block(values))

    def _placement(self, plan: Plan) -> dict[str, Any]:
        """The plan as RLinf's mapping; unchanged from the file if nothing moves."""
        gpus = {name: plan.placed(name).gpus for name in self.COMPONENTS}
        if all(self.placed.get(name) == gpus[name] for name in gpus):
            return self.reader.mapping(KEY)
        together: dict[tuple[int, ...], list[str]] = {}
        for name, found in gpus.items():
            together.setdefault(found, []).append(name)
        placement: dict[str, Any] = {",".join(n): self.placement_text(some) for some, n in together.items()}
        stated = stated_placement(self.reader)
        return placement | {name: stated[name] for name in stated if name not in gpus}  # others are not moved

    def _streaming(self) -> tuple[int, int | None, str]:
        """(units per iteration, how many the rollout takes at a time (`None`: all), a note).

        With pipeline stages the rollout serves one share of the environments while the other shares step.
        """
        reader = self.reader
        stages = reader.count("rollout.pipeline_stage_num", 1)
        environments = reader.optional_count("data.env_num") or reader.count("env.train.total_num_envs", 1)
        steps = reader.optional_count("env.train.max_steps_per_rollout_epoch")
        if stages == 1 or steps is None:
            return environments, None, "no streaming: each component takes all its inputs at once"
        chunks = max(1, steps // reader.count("actor.model.num_action_chunks", 1))
        units = chunks * reader.count("env.train.rollout_epoch", 1) * stages
        return units, 1, f"streaming between env and rollout: {stages} pipeline stages of {units // stages} steps each"

    def _checked_sizes(self) -> dict[str, Variant]:
        """GPU counts that pass RLinf's start-up checks of environments and of the actor's batch; the file's own do."""
        reader, total, placed = self.reader, self.total, self.placed
        stages = reader.count("rollout.pipeline_stage_num", 1)
        sections = ["train"]
        if float(as_number(reader.get("runner.val_check_interval", 0)) or 0) > 0:
            sections.append("eval")
        allowed = {name: set(range(1, total + 1)) for name in self.COMPONENTS}
        for section in sections:
            count = reader.optional_count(f"env.{section}.total_num_envs")
            each = reader.count(f"env.{section}.group_size", 1)
            if count is not None:
                per_stage = {g: count // g // stages for g in range(1, total + 1) if count % g == 0}
                allowed["env"] &= {g for g, some in per_stage.items() if some and some % each == 0}
                allowed["rollout"] &= {g for g in range(1, total + 1) if count // stages % g == 0}
        batch = reader.optional_count("actor.global_batch_size")
        if batch is not None and reader.get("actor.training_backend") == "fsdp":
            micro = reader.count("actor.micro_batch_size", 1)
            allowed["actor"] = {g for g in range(1, total + 1) if batch % (micro * g) == 0}
        for name in self.COMPONENTS:
            if name in placed:
                allowed[name].add(len(placed[name]))
        return {
            name: Variant(gpus=tuple(sorted(some))) if len(some) < total else Variant()
            for name, some in allowed.items()
        }

    def _points(self, name: str) -> tuple[tuple[tuple[int, float], ...], float]:
        """(measured points (GPUs, seconds), most environments per instance that were measured).

        Between two measurements seconds are linear in the environments, hence in 1/g: so a measured count that belongs
        to no whole number of GPUs is interpolated to the GPU counts beside it without loss.
        """
        reader, env_num, key = self.reader, self.batches, f"profile_data.{name}"
        where = reader.where(key)
        table: list[tuple[float, float]] = []
        for environments, seconds in reader.mapping(key).items():
            count, cost = as_number(environments), as_number(seconds)
            if count is None or count <= 0 or cost is None or cost < 0:
                raise InputError(
                    f"{environments!r}: {seconds!r} is no pair of environments and finite seconds", where=where
                )
            table.append((count, cost))
        if not table:
            raise InputError(
                f"{name} is missing",
                where=where,
                hint=f"add profile_data.{name}: {{ENVIRONMENTS_PER_INSTANCE: SECONDS}}",
            )
        table.sort()
        exact = {round(env_num / count): cost for count, cost in table if env_num % count == 0}
        if len(exact) < len(table):
            for gpus in range(1, self.total + 1):
                between = _interpolated(table, env_num / gpus)
                if between is not None:
                    exact.setdefault(gpus, between)
        if not exact:
            raise InputError(
                "none of the measured environments per instance belongs to a number of GPUs for "
                f"{env_num} environments",
                where=where,
                hint="measure data.env_num divided by a number of GPUs",
            )
        return tuple(sorted(exact.items())), table[-1][0]


def _interpolated(table: list[tuple[float, float]], count: float) -> float | None:
    for (e0, t0), (e1, t1) in itertools.pairwise(table):
        if e0 <= count <= e1 and e1 > e0:
            return t0 + (t1 - t0) * (count - e0) / (e1 - e0)
    return None
