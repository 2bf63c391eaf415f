"""RLinf's embodied form: an environment, a rollout and an actor, and what both forms share of the cluster's keys.

Costs come as `{environments per instance: seconds}`; with `data.env_num` environments on g GPUs each instance has
env_num / g of them, which turns every point into one of seconds on g GPUs. RLinf's hybrid mode runs any grouping of
the three. More environments per instance than were measured are never planned: nobody knows that they fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from trimtab.formats import rlinf_placement
from trimtab.formats.dialect import Loaded, Settings
from trimtab.formats.framework import (
    Sizes,
    check_expressible,
    component,
    even_cluster,
    refuse_waits,
    runnable,
    weight_sync,
)
from trimtab.formats.hydra_config import Composed, Reader, as_number
from trimtab.formats.write_back import block_text, nested
from trimtab.model.errors import InputError, nearest
from trimtab.model.plan import AllowedGroup, CurrentPlacement, Plan, Rules
from trimtab.model.profile import ComponentProfile, Profile
from trimtab.model.workflow import Job, Workflow, check_workflow

COMPONENTS = ("env", "rollout", "actor")
GROUPINGS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("env", "rollout", "actor"),),
    (("env", "rollout"), ("actor",)),
    (("env", "actor"), ("rollout",)),
    (("env",), ("rollout", "actor")),
    (("env",), ("rollout",), ("actor",)),
)


def matches(reader: Reader) -> bool:
    """Whether this is the embodied form."""
    return reader.has("profile_data.env_profile_data") or reader.get("runner.task_type") == "embodied"


def cluster_size(reader: Reader) -> tuple[int, int]:
    """Nodes and GPUs of each. RLinf itself counts GPUs in the live cluster, so a config may not state them."""
    nodes = int(reader.positive_int("cluster.num_nodes", 1))
    stated: int | None = reader.positive_int("cluster.num_gpus_per_node", None)
    if stated is not None:
        return nodes, stated
    highest = rlinf_placement.highest_rank(reader)
    if highest is None or (highest + 1) % nodes:
        raise InputError(
            "how many GPUs a node has is not stated",
            where=reader.where("cluster.num_gpus_per_node"),
            hint="add it to the file, or to the command: ++cluster.num_gpus_per_node=8",
        )
    return nodes, (highest + 1) // nodes


def block(reader: Reader, nodes: int, values: dict[str, Any]) -> str:
    """The cluster section to read and to paste."""
    _, per_node = cluster_size(reader)
    return block_text(nested({"cluster.num_nodes": nodes, "cluster.num_gpus_per_node": per_node, **values}))


def read(composed: Composed, profile: Profile | None) -> Loaded:
    """An embodied config as a job."""
    reader = composed.reader
    nodes, per_node = cluster_size(reader)
    total = nodes * per_node
    assumptions = ["no streaming: each component takes all its inputs at once"]
    if profile is not None:
        batches = int(reader.positive_int("data.env_num", 1))
        costs, sizes = _profiled(profile), {name: Sizes() for name in COMPONENTS}
    else:
        batches = int(reader.positive_int("data.env_num", hint="add data.env_num: the number of environments"))
        costs, sizes = _stated(reader, batches, total)
        assumptions.append(f"actor_cost was measured with {total} GPUs")
        assumptions.append("no instance has more environments than were measured")
    workflow = Workflow(
        components=tuple(
            component(costs[name], after=COMPONENTS[index - 1 : index] if index else (), sizes=sizes[name])
            for index, name in enumerate(COMPONENTS)
        ),
        batches=batches,
        weight_sync=weight_sync(profile, "actor", "rollout"),
    )
    check_workflow(workflow)
    rules = _rules(workflow, total)
    placed = rlinf_placement.ranks(reader, total)
    current = _current(reader, placed)
    if current is None and placed:
        assumptions.append("your placement is not compared: it leaves components out or lets them overlap in part")

    def settings(plan: Plan) -> Settings:
        check_expressible(plan, rules)
        placement: dict[str, Any] = {}
        for group in plan.groups:
            names = [name for name in COMPONENTS if name in group.components]
            if len(names) == 1:
                placement[names[0]] = rlinf_placement.text(plan.placed(names[0]).gpus, total)
            else:
                placement[",".join(names)] = rlinf_placement.text(group.gpus, total)
        stated = rlinf_placement.stated(reader)
        placement.update({name: stated[name] for name in stated if name not in COMPONENTS})  # they stay where they are
        values = {rlinf_placement.KEY: placement}
        return Settings(values=values, block=block(reader, nodes, values))

    return Loaded(
        dialect="rlinf",
        path=composed.path,
        job=Job(cluster=even_cluster(nodes, per_node), workflow=workflow),
        settings=settings,
        rules=rules,
        assumptions=tuple(assumptions),
        current=current,
        literal=composed.literal,
        states=composed.states,
    )


def _rules(workflow: Workflow, total: int) -> Rules:
    """Any grouping runs; components with one key have the same GPUs, so the size must suit all of them."""
    groupings = []
    for grouping in GROUPINGS:
        groups = []
        for names in grouping:
            members = [workflow.component(name) for name in names]
            groups.append(AllowedGroup(frozenset(names), runnable(range(1, total + 1), members) if names[1:] else None))
        if all(group.sizes is None or group.sizes for group in groups):
            groupings.append(tuple(groups))
    return Rules(framework="RLinf", groupings=tuple(groupings))


def _profiled(profile: Profile) -> dict[str, ComponentProfile]:
    costs = {}
    for name in COMPONENTS:
        measured = profile.component(name)
        if measured is None:
            raise InputError(f"the profile has no {name}", where=f"profile ({profile.source})")
        refuse_waits(measured)
        costs[name] = measured
    return costs


def _stated(reader: Reader, env_num: int, total: int) -> tuple[dict[str, ComponentProfile], dict[str, Sizes]]:
    if not reader.has("profile_data"):
        raise InputError(
            "there is no profile_data: what each component costs is unknown",
            where=reader.where("profile_data"),
            hint="add profile_data: {env_profile_data: {ENVIRONMENTS: SECONDS}, rollout_profile_data: {...}, "
            "actor_cost: SECONDS}",
        )
    check_profile_keys(reader, ("env_profile_data", "rollout_profile_data", "actor_cost", "gpus"))
    env, most_envs = _points(reader, "env_profile_data", env_num, total)
    rollout, most_rollouts = _points(reader, "rollout_profile_data", env_num, total)
    costs = {
        "env": ComponentProfile("env", env),
        "rollout": ComponentProfile("rollout", rollout),
        "actor": ComponentProfile(
            "actor", stated_cost(reader, "actor", int(reader.positive_int("profile_data.gpus", total)))
        ),
    }
    sizes = {
        "env": Sizes(gpus=tuple(g for g in range(1, total + 1) if env_num % g == 0 and env_num / g <= most_envs)),
        "rollout": Sizes(gpus=tuple(g for g in range(1, total + 1) if env_num / g <= most_rollouts)),
        "actor": Sizes(),
    }
    for name in ("env", "rollout"):
        if not sizes[name].gpus:
            most = most_envs if name == "env" else most_rollouts
            raise InputError(
                f"{env_num} environments on up to {total} GPUs are more per instance than the {most:g} measured, or "
                "do not divide evenly",
                where=reader.where(f"profile_data.{name}_profile_data"),
                hint="measure more environments per instance, or change data.env_num",
            )
    return costs, sizes


def check_profile_keys(reader: Reader, known: Sequence[str]) -> None:
    """Refuse keys of `profile_data` that mean nothing here, with the nearest one that does."""
    for key in reader.mapping("profile_data"):
        if key not in known:
            near = nearest(str(key), known)
            raise InputError(
                f"profile_data has no key {key}",
                where=reader.where(f"profile_data.{key}"),
                hint=f"did you mean {near}?" if near else f"it has: {', '.join(known)}",
            )


def stated_cost(reader: Reader, name: str, measured_on: int, hint: str | None = None) -> tuple[tuple[int, float], ...]:
    """A cost of `profile_data` as points: seconds on `measured_on` GPUs, or `{GPUs: seconds}`."""
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


def _points(reader: Reader, name: str, env_num: int, total: int) -> tuple[tuple[tuple[int, float], ...], float]:
    """Measured points (GPUs, seconds), and the most environments per instance that were measured.

    Seconds are linear in the environments between two measurements, which is linear in 1/g: so a count of environments
    that belongs to no whole number of GPUs is carried over to the GPU counts beside it without loss.
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


def _current(reader: Reader, placed: dict[str, tuple[int, ...]]) -> CurrentPlacement | None:
    ranks = {name: placed[name] for name in COMPONENTS if name in placed}
    if len(ranks) < len(COMPONENTS):
        return None
    sets = {frozenset(gpus) for gpus in ranks.values()}
    if sum(len(gpus) for gpus in sets) > len(frozenset().union(*sets)):
        return None
    return CurrentPlacement(ranks=ranks, where=reader.where(rlinf_placement.KEY))
