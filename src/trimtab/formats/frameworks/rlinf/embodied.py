"""Reads RLinf's embodied configs (environment, rollout, actor), and keys that both kinds of config share.

Costs are `{environments per instance: seconds}`; with `data.env_num` environments on g GPUs each instance has env_num /
g of them, which gives seconds on g GPUs. RLinf's hybrid mode runs any grouping of the three, and an actor over the GPUs
of both others. What must never happen: a plan with more environments per instance than were measured, because they may
not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from trimtab.core.errors import InputError, meant
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import AllowedGpuCounts
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader, as_number
from trimtab.formats.frameworks.rlinf import placement as rlinf_placement
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.profile import ComponentProfile, Profile
from trimtab.model.workflow import Workflow

COMPONENTS = ("env", "rollout", "actor")
GROUPINGS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("env", "rollout", "actor"),),
    (("env", "rollout"), ("actor",)),
    (("env", "actor"), ("rollout",)),
    (("env",), ("rollout", "actor")),
    (("env",), ("rollout",), ("actor",)),
)
SPANNING = (("env",), ("rollout",), ("actor",))
"""Environment and rollout on separate GPUs, the actor over the GPUs of both."""


def matches(reader: ConfigReader) -> bool:
    return reader.has("profile_data.env_profile_data") or reader.get("runner.task_type") == "embodied"


def cluster_size(reader: ConfigReader) -> tuple[int, int]:
    """(nodes, GPUs per node). RLinf counts GPUs in the live cluster, so a config may not state them."""
    nodes = int(reader.positive_int("cluster.num_nodes", 1))
    stated: int | None = reader.positive_int("cluster.num_gpus_per_node", None)
    if stated is not None:
        common.check_gpus(nodes * stated, f"{nodes:,} nodes of {stated:,} GPUs", reader.where("cluster"))
        return nodes, stated
    highest = rlinf_placement.highest_rank(reader)
    if highest is None or (highest + 1) % nodes:
        raise InputError(
            "how many GPUs a node has is not stated",
            where=reader.where("cluster.num_gpus_per_node"),
            hint="add it to the file, or to the command: ++cluster.num_gpus_per_node=8",
        )
    common.check_gpus(highest + 1, f"GPUs 0 to {highest:,}", reader.where(rlinf_placement.KEY))
    return nodes, (highest + 1) // nodes


def block(reader: ConfigReader, nodes: int, values: dict[str, Any]) -> str:
    """The cluster section as YAML text."""
    _, per_node = cluster_size(reader)
    return block_text(nested({"cluster.num_nodes": nodes, "cluster.num_gpus_per_node": per_node, **values}))


def read(composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
    reader = composed.reader
    nodes, per_node = cluster_size(reader)
    total = nodes * per_node
    placed = rlinf_placement.ranks(reader, total)
    units, granularity, note = _streaming(reader)
    assumptions = [note]
    if profile is not None:
        batches = units
        costs, sizes = common.profiled(profile, COMPONENTS), _checked_sizes(reader, placed, total)
    else:
        batches = int(reader.positive_int("data.env_num", hint="add data.env_num: the number of environments"))
        granularity = None
        costs, sizes = _stated(reader, batches, total)
        assumptions.append(f"actor_cost was measured with {total} GPUs")
        assumptions.append("no instance has more environments than were measured")
    workflow = Workflow(
        components=tuple(
            common.component(
                costs[name],
                after=COMPONENTS[index - 1 : index] if index else (),
                sizes=sizes[name],
                granularity=granularity if name == "rollout" else None,
            )
            for index, name in enumerate(COMPONENTS)
        ),
        batches=batches,
        staleness=_staleness(reader),
        weight_sync=common.weight_sync(profile, "actor", "rollout"),
    )
    rules = _rules()
    current = _current(reader, placed)
    if current is None and placed:
        assumptions.append("your placement is not compared: it leaves components out")

    def settings(plan: Plan) -> PlanSettings:
        _check_counts(plan, workflow)
        values = {rlinf_placement.KEY: _placement(reader, plan, placed, total)}
        return PlanSettings(values=values, block=block(reader, nodes, values))

    cluster = common.even_cluster(nodes, per_node)
    return common.loaded_job(composed, "rlinf", cluster, workflow, rules, settings, assumptions, current)


def _placement(reader: ConfigReader, plan: Plan, placed: dict[str, tuple[int, ...]], total: int) -> dict[str, Any]:
    """The plan as RLinf's mapping; unchanged from the file if nothing moves."""
    gpus = {name: plan.placed(name).gpus for name in COMPONENTS}
    if all(placed.get(name) == gpus[name] for name in COMPONENTS):
        return reader.mapping(rlinf_placement.KEY)
    together: dict[tuple[int, ...], list[str]] = {}
    for name in COMPONENTS:
        together.setdefault(gpus[name], []).append(name)
    placement: dict[str, Any] = {",".join(names): rlinf_placement.text(some, total) for some, names in together.items()}
    stated = rlinf_placement.stated(reader)
    placement.update({name: stated[name] for name in stated if name not in COMPONENTS})  # not moved
    return placement


def _streaming(reader: ConfigReader) -> tuple[int, int | None, str]:
    """(units per iteration, how many the rollout takes at a time (`None`: all), a note).

    With pipeline stages the rollout serves one share of the environments while the other shares step.
    """
    stages = int(reader.positive_int("rollout.pipeline_stage_num", 1))
    environments = int(reader.positive_int("data.env_num", None) or reader.positive_int("env.train.total_num_envs", 1))
    steps: int | None = reader.positive_int("env.train.max_steps_per_rollout_epoch", None)
    if stages == 1 or steps is None:
        return environments, None, "no streaming: each component takes all its inputs at once"
    chunks = max(1, steps // int(reader.positive_int("actor.model.num_action_chunks", 1)))
    units = chunks * int(reader.positive_int("env.train.rollout_epoch", 1)) * stages
    return units, 1, f"streaming between env and rollout: {stages} pipeline stages of {units // stages} steps each"


def _staleness(reader: ConfigReader) -> int:
    """Staleness of RLinf's asynchronous PPO, which alone has this loss; other runners are chosen on the command
    line.
    """
    if reader.get("algorithm.loss_type") != "decoupled_actor_critic":
        return 0
    return max(1, math.ceil(float(reader.number("algorithm.staleness_threshold", 1))))


def _checked_sizes(reader: ConfigReader, placed: dict[str, tuple[int, ...]], total: int) -> dict[str, AllowedGpuCounts]:
    """GPU counts that pass RLinf's start-up checks of environments and of the actor's batch. The file's own always
    do.
    """
    stages = int(reader.positive_int("rollout.pipeline_stage_num", 1))
    sections = ["train"]
    if float(as_number(reader.get("runner.val_check_interval", 0)) or 0) > 0:
        sections.append("eval")
    allowed = {name: set(range(1, total + 1)) for name in COMPONENTS}
    for section in sections:
        count: int | None = reader.positive_int(f"env.{section}.total_num_envs", None)
        each = int(reader.positive_int(f"env.{section}.group_size", 1))
        if count is not None:
            per_stage = {g: count // g // stages for g in range(1, total + 1) if count % g == 0}
            allowed["env"] &= {g for g, some in per_stage.items() if some and some % each == 0}
            allowed["rollout"] &= {g for g in range(1, total + 1) if count // stages % g == 0}
    batch: int | None = reader.positive_int("actor.global_batch_size", None)
    if batch is not None and reader.get("actor.training_backend") == "fsdp":
        micro = int(reader.positive_int("actor.micro_batch_size", 1))
        allowed["actor"] = {g for g in range(1, total + 1) if batch % (micro * g) == 0}
    for name in COMPONENTS:
        if name in placed:
            allowed[name].add(len(placed[name]))
    return {
        name: AllowedGpuCounts(gpus=tuple(sorted(some))) if len(some) < total else AllowedGpuCounts()
        for name, some in allowed.items()
    }


def _rules() -> FrameworkRules:
    """Any grouping works, and components of a group may have different GPU counts."""
    groupings = tuple(tuple(AllowedGroup(frozenset(names)) for names in grouping) for grouping in GROUPINGS)
    over = tuple(AllowedGroup(frozenset(names)) for names in SPANNING)
    return FrameworkRules(framework="RLinf", groupings=groupings, spanning=(over,))


def _check_counts(plan: Plan, workflow: Workflow) -> None:
    for name in COMPONENTS:
        count = len(plan.placed(name).gpus)
        (variant,) = workflow.component(name).variants
        if not variant.allows(count):
            only = f", only {', '.join(map(str, variant.gpus))}" if variant.gpus else ""
            raise InputError(f"RLinf cannot run this plan: {name} cannot have {count} GPUs{only}")


def _stated(
    reader: ConfigReader, env_num: int, total: int
) -> tuple[dict[str, ComponentProfile], dict[str, AllowedGpuCounts]]:
    if not reader.has("profile_data"):
        raise InputError(
            "profile_data is missing: component costs are unknown",
            where=reader.where("profile_data"),
            hint="add profile_data: {env_profile_data: {ENVIRONMENTS: SECONDS}, rollout_profile_data: {...}, "
            "actor_cost: SECONDS}",
        )
    check_profile_keys(reader, ("env_profile_data", "rollout_profile_data", "actor_cost", "gpus"))
    env, max_envs = _points(reader, "env_profile_data", env_num, total)
    rollout, max_rollouts = _points(reader, "rollout_profile_data", env_num, total)
    costs = {
        "env": ComponentProfile("env", env),
        "rollout": ComponentProfile("rollout", rollout),
        "actor": ComponentProfile(
            "actor", stated_cost(reader, "actor", int(reader.positive_int("profile_data.gpus", total)))
        ),
    }
    sizes = {
        "env": AllowedGpuCounts(
            gpus=tuple(g for g in range(1, total + 1) if env_num % g == 0 and env_num / g <= max_envs)
        ),
        "rollout": AllowedGpuCounts(gpus=tuple(g for g in range(1, total + 1) if env_num / g <= max_rollouts)),
        "actor": AllowedGpuCounts(),
    }
    for name in ("env", "rollout"):
        if not sizes[name].gpus:
            most = max_envs if name == "env" else max_rollouts
            raise InputError(
                f"{env_num} environments on up to {total} GPUs are more per instance than the {most:g} measured, or "
                "do not divide evenly",
                where=reader.where(f"profile_data.{name}_profile_data"),
                hint="measure more environments per instance, or change data.env_num",
            )
    return costs, sizes


def check_profile_keys(reader: ConfigReader, known: Sequence[str]) -> None:
    """Refuse unknown keys of `profile_data` with the nearest known one."""
    for key in reader.mapping("profile_data"):
        if key not in known:
            hint = meant(key, known, f"it has: {', '.join(known)}")
            raise InputError(f"profile_data has no key {key}", where=reader.where(f"profile_data.{key}"), hint=hint)


def stated_cost(
    reader: ConfigReader, name: str, measured_on: int, hint: str | None = None
) -> tuple[tuple[int, float], ...]:
    """A cost in `profile_data` as points: seconds on `measured_on` GPUs, or `{GPUs: seconds}`."""
    key = f"profile_data.{name}_cost"
    stated = reader.get(key)
    if not isinstance(stated, dict):
        return ((measured_on, float(reader.number(key, hint=hint if stated is None else None))),)
    points: dict[int, float] = {}
    for gpus, seconds in stated.items():
        count, cost = as_number(gpus), as_number(seconds)
        if count is None or count < 1 or count != int(count) or cost is None or cost < 0:
            raise InputError(f"{gpus!r}: {seconds!r} is no pair of GPUs and finite seconds", where=reader.where(key))
        points[int(count)] = cost
    if not points:
        raise InputError("no time is given", where=reader.where(key), hint=f"write {name}_cost: {{GPUS: SECONDS}}")
    return tuple(sorted(points.items()))


def _points(reader: ConfigReader, name: str, env_num: int, total: int) -> tuple[tuple[tuple[int, float], ...], float]:
    """(measured points (GPUs, seconds), most environments per instance that were measured).

    Between two measurements seconds are linear in the environments, hence in 1/g: so a measured count that belongs to
    no whole number of GPUs is interpolated to the GPU counts beside it without loss.
    """
    key = f"profile_data.{name}"
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
            f"{name} is missing", where=where, hint=f"add profile_data.{name}: {{ENVIRONMENTS_PER_INSTANCE: SECONDS}}"
        )
    table.sort()
    exact = {round(env_num / count): cost for count, cost in table if env_num % count == 0}
    if len(exact) < len(table):
        for gpus in range(1, max(total, 1) + 1):
            between = _interpolated(table, env_num / gpus)
            if between is not None:
                exact.setdefault(gpus, between)
    if not exact:
        raise InputError(
            f"none of the measured environments per instance belongs to a number of GPUs for {env_num} environments",
            where=where,
            hint="measure data.env_num divided by a number of GPUs",
        )
    return tuple(sorted(exact.items())), table[-1][0]


def _interpolated(table: list[tuple[float, float]], count: float) -> float | None:
    for (e0, t0), (e1, t1) in itertools.pairwise(table):
        if e0 <= count <= e1 and e1 > e0:
            return t0 + (t1 - t0) * (count - e0) / (e1 - e0)
    return None


def _current(reader: ConfigReader, placed: dict[str, tuple[int, ...]]) -> CurrentPlacement | None:
    ranks = {name: placed[name] for name in COMPONENTS if name in placed}
    if len(ranks) < len(COMPONENTS):
        return None
    return CurrentPlacement(ranks=ranks, where=reader.where(rlinf_placement.KEY), overlap=True)
