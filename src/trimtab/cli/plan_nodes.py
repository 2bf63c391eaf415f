"""`trimtab plan --join | --leave | --address`: what each component should get when nodes join or leave."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli.options import read_profile
from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.output import Format, answer, share

if TYPE_CHECKING:
    from trimtab.formats.loaded import LoadedJob
    from trimtab.model.workflow import Cluster, Node, Profile

NODES_KEY = {
    "rlinf": "cluster.num_nodes",
    "verl": "trainer.nnodes",
    "nemo_rl": "cluster.num_nodes",
    "openrlhf": "++trimtab.nodes",
}
"""The key of a framework's config for the number of nodes."""


def advise(
    file: Path | None,
    overrides: list[str],
    join: str | None,
    leave: str | None,
    profile: Path | None,
    noise: str,
    address: str | None,
    form: Format,
) -> None:
    """Recommends placements for other nodes than the file's: joining, without leaving ones, or those that run."""
    from trimtab.formats.load import load
    from trimtab.machines.nodes import roles
    from trimtab.render.text import plan as plan_text

    if file is None:
        raise InputError("FILE is missing: the job to plan", where="command line", hint="trimtab plan FILE --join 1")
    noise_share = share(noise, "--noise")
    measured = read_profile(profile)
    loaded = load(file, overrides, measured)
    cluster = loaded.job.cluster
    notes: tuple[str, ...] = ()
    if address is not None:
        cluster, notes = roles.as_planned(_running_nodes(None if address == "auto" else address, cluster), cluster)
    if leave is not None:
        cluster = roles.without(cluster, int(leave) if leave.isdecimal() else leave)
    if join is not None:
        cluster = roles.with_joined(cluster, *_parse_join(join))
    after = _on_cluster(loaded, cluster, overrides, measured)
    before = roles.PlanningContext(loaded.job, loaded.rules, loaded.current)
    advice = roles.advise(before, roles.PlanningContext(after.job, after.rules), noise=noise_share)
    advice = replace(advice, notes=(*notes, *advice.notes))
    settings = None if advice.stay else after.settings(advice.after)
    data = plan_text.advice_data(advice, loaded.job.cluster, after.job.cluster, settings)
    answer(data, form, lambda: plan_text.print_advice(advice, loaded.job.cluster, after.job.cluster, settings))


def _parse_join(text: str) -> tuple[int, int | None, str | None]:
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,4}))?(?::([\w.-]+))?", text.strip())
    if match is None:
        raise InputError(
            f"{text!r} is not a number of nodes", where="command line: --join", hint="2, or 2x8:H100: of 8 GPUs each"
        )
    return int(match[1]), int(match[2]) if match[2] else None, match[3]


def _on_cluster(loaded: LoadedJob, cluster: Cluster, given: list[str], measured: Profile | None) -> LoadedJob:
    """The same job on another cluster. A framework's file is read again: its rules depend on its number of nodes."""
    from trimtab.formats import job
    from trimtab.formats.load import load
    from trimtab.model.workflow import ANY_KIND

    if loaded.file_format == job.NAME:
        return replace(
            loaded, job=replace(loaded.job, cluster=cluster), settings=lambda plan: job.settings(plan, cluster)
        )
    own_form = "for nodes of several kinds use trimtab's own form of a job file"
    kinds = {replace(node, name="") for node in (*loaded.job.cluster.nodes, *cluster.nodes)}
    if len({(node.gpus, node.gpu) for node in kinds}) > 1:
        raise InputError(
            f"a {loaded.file_format} config can only describe nodes of one kind", where=str(loaded.path), hint=own_form
        )
    key = NODES_KEY[loaded.file_format]
    overrides = [*given, f"{key}={len(cluster.nodes)}"]
    if loaded.file_format == "rlinf" and measured is None:
        # Costs in an RLinf file refer to all its GPUs unless it states their number: here to those from before.
        points = [v.points(ANY_KIND) for c in loaded.job.workflow.components for v in c.variants]
        overrides += [f"++profile_data.gpus={gpus}" for ((gpus, _),) in [p for p in points if len(p) == 1][:1]]
    again = load(loaded.path, overrides, measured)
    if again.job.cluster.gpus != cluster.gpus:
        raise InputError(f"{key} alone does not set the total number of nodes", where=str(loaded.path), hint=own_form)
    if _costs(again) != _costs(loaded):
        raise InputError(
            "the costs in this file refer to all its GPUs, and would change on another cluster",
            where=str(loaded.path),
            hint="pass measured costs with --profile",
        )
    return again


def _costs(loaded: LoadedJob) -> list[Any]:
    return [[variant.seconds for variant in component.variants] for component in loaded.job.workflow.components]


def _running_nodes(address: str | None, planned: Cluster) -> tuple[Node, ...]:
    """Nodes of the running cluster, without draining ones."""
    from trimtab.model.workflow import Node
    from trimtab.runtime.rayapi.connect import RayConnection
    from trimtab.runtime.rayapi.draining import draining
    from trimtab.runtime.rayapi.nodes import live_nodes

    link = RayConnection(address, start=False)
    try:
        going = draining(link.ray)
        alive = [node for node in live_nodes(link.ray) if node.node_id not in going]
    finally:
        link.close()
    counts_cpus = any(node.cpus is not None for node in planned.nodes)
    nodes = [
        Node(
            name=f"{node.name or 'node'} ({node.node_id[:8]})",
            gpus=int(node.gpus),
            gpu=next(iter(node.kinds), "") if node.gpus >= 1 else "",
            cpus=float(node.resources.get("CPU", 0)) if counts_cpus else None,
        )
        for node in alive
    ]
    if not any(node.gpus for node in nodes):
        raise UnreachableError(
            "the running cluster has no GPU that is not draining", hint="--join and --leave use the job file's cluster"
        )
    return tuple(nodes)
