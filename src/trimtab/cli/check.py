"""`trimtab check`: what would kill a run after minutes of loading, before it starts.

Exit status: 0 if nothing is found that stops it (warnings allowed), 3 if something is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from trimtab.cli.options import FormatOption, OverridesArgument
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.plan.check.cluster_rules import LiveNode


def check(
    file: Annotated[
        Path, Argument(metavar="FILE", help="A framework's config or launch script, a job file or a settings file.")
    ],
    overrides: OverridesArgument = None,
    gpu: Annotated[str | None, Option("--gpu", help="GPU kind (h100, a100-80, ...), or a YAML file.")] = None,
    gpus: Annotated[int | None, Option("--gpus", help="GPUs in all, where the file does not say.")] = None,
    model: Annotated[str | None, Option("--model", help="A model's name, or the folder of its config.json.")] = None,
    mean_tokens: Annotated[float | None, Option("--mean-tokens", help="Mean of prompt and answer together.")] = None,
    host_memory: Annotated[
        float | None, Option("--host-memory-gb", help="Host memory of a node, or a container's limit.")
    ] = None,
    version: Annotated[
        str | None, Option("--framework-version", help="Of the framework (0.4, ...): some rules hold for some.")
    ] = None,
    address: Annotated[
        str | None, Option("--address", "-a", help="Ray cluster to compare with, too: host:6379, or auto.")
    ] = None,
    form: FormatOption = Format.text,
) -> None:
    """Check a config for what would kill its run: memory, sizes that do not divide, options that exclude each other.

    Nothing is started. Each finding names its keys and the cheapest cure first. Exit status 3 if the run cannot
    start or would die; warnings alone are 0.

    Examples:

        trimtab check grpo.yaml --gpu h100

        trimtab check grpo.yaml --gpu a100-80 actor_rollout_ref.rollout.gpu_memory_utilization=0.5

        trimtab check grpo.yaml --gpu h100 --host-memory-gb 512 --address 10.0.0.1:6379 --format json
    """
    from trimtab.formats import check_settings
    from trimtab.plan.check.check import check as found
    from trimtab.render.text import check as shown

    given = {
        "gpu": gpu,
        "gpus": gpus,
        "model_name": model,
        "mean_tokens": mean_tokens,
        "host_memory": host_memory,
        "version": version,
    }
    for option, value in (("--gpus", gpus), ("--mean-tokens", mean_tokens), ("--host-memory-gb", host_memory)):
        if value is not None and not 1 <= value < check_settings.MOST:
            raise InputError(f"{option} is {value:g}, not a number from 1", where="command line")
    run = check_settings.read(
        file, overrides or [], {name: value for name, value in given.items() if value is not None}
    )
    result = found(run, check_settings.exclusions(), _nodes(address))
    data = shown.as_data(run, result)
    answer(data, form, lambda: shown.show(data))
    if result.errors:
        raise typer.Exit(InfeasibleError.exit_status)


def _nodes(address: str | None) -> tuple[LiveNode, ...]:
    """The cluster's nodes, none without an address."""
    if address is None:
        return ()
    from trimtab.plan.check.cluster_rules import LiveNode
    from trimtab.runtime.rayapi.gcs_snapshot import GcsReader, find

    nodes = GcsReader(find(address)).alive()
    return tuple(
        LiveNode(
            node.name or node.address,
            int(node.resources.get("GPU", 0)),
            node.resources.get("memory", 0.0) / 2**30,
            node.resources.get("object_store_memory", 0.0) / 2**30,
        )
        for node in nodes
    )
