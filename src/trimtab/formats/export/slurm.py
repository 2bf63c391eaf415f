"""Exports a job's cluster as a Slurm batch script: Ray on all nodes, the user's command, a drain before the time limit.

The script requests what the job file states (nodes, GPUs per node, their kind, CPUs, memory), waits for every node with
a deadline, and always stops what it started. It submits nothing. User input is quoted for the shell, or refused in
#SBATCH lines. What is the same for every job is `slurm.sh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.model.workflow import Cluster, Node

STOP_MARGIN_S = 15
"""Between the end of a drain and the time limit, for processes to stop."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+-]*")
_TIME = re.compile(r"\d{1,5}(-\d{1,2}(:\d{2}){0,2})?|\d{1,4}(:\d{2}){1,2}")


class BatchOptions(Frozen):
    """Options beyond the job file."""

    name: str
    command: tuple[str, ...] = ()  # empty: the cluster runs until the time limit
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    gpu_type: str | None = None  # Slurm's name; None: the job's kind in lower case; empty: any
    min_nodes: int | None = None  # the command is not run with fewer; None: all
    join_s: int = 300
    warn_s: int = 120  # before the time limit
    port: int = 6379
    setup: str = ""  # shell lines, used verbatim: `source venv/bin/activate`

    def __post_init__(self) -> None:
        for option, value in (
            ("--job-name", self.name),
            ("--partition", self.partition),
            ("--account", self.account),
            ("--gpu-type", self.gpu_type or None),
        ):
            if value is not None and not _WORD.fullmatch(value):
                raise InputError(f"{value!r} is not allowed in an #SBATCH line", where=f"command line: {option}")
        if not _TIME.fullmatch(self.time):
            raise InputError(
                f"{self.time!r} is no time limit", where="command line: --time", hint="24:00:00, 2-12 or 90 (minutes)"
            )
        if self.warn_s <= 2 * STOP_MARGIN_S:
            raise InputError(f"{self.warn_s} s are too short for a drain", where="command line: --drain")
        if self.join_s < 1 or not 1 <= self.port <= 65_535:
            raise InputError("--join-timeout is 1 s or more, and --port is 1 to 65535", where="command line")


def script(cluster: Cluster, options: BatchOptions) -> str:
    """The batch script for a job's cluster. Raises InputError if its nodes differ."""
    node, count = _single_kind(cluster)
    min_nodes = count if options.min_nodes is None else options.min_nodes
    if not 1 <= min_nodes <= count:
        raise InputError(f"--min {min_nodes}: the job has {count} nodes", where="command line")
    setup = options.setup.strip()
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{line}" for line in _directives(node, count, options)),
        "# Written by `trimtab cluster export slurm`. The first node has Ray's head; every node runs one Ray node.",
        "set -euo pipefail",
        "",
        f"nodes={count}",
        f"gpus_per_node={node.gpus}",
        f"min_nodes={min_nodes}   # fewer nodes than this after join_s seconds: the command is not run",
        f"join_s={options.join_s}",
        f"drain_s={options.warn_s - STOP_MARGIN_S}   # time for tasks to checkpoint before the time limit",
        f'port="${{RAY_PORT:-{options.port}}}"',
        "# shellcheck disable=SC2016 # quoted as given",
        f"command=({shlex.join(options.command or ('sleep', 'infinity'))})",
        *(["", setup, ""] if setup else [""]),
        resources.files("trimtab.formats.export").joinpath("slurm.sh").read_text(encoding="utf-8"),
    ]
    return "\n".join(lines)


def _single_kind(cluster: Cluster) -> tuple[Node, int]:
    kinds = list(dict.fromkeys(replace(node, name="") for node in cluster.nodes))
    if not kinds:
        raise InputError("the job's cluster has no nodes", where="cluster.nodes")
    if len(kinds) > 1:
        shapes = ", ".join(f"{kind.gpus} {kind.gpu or 'GPUs'}" for kind in kinds)
        raise InputError(
            f"the job's nodes differ ({shapes}), and a Slurm batch job has one kind of node",
            where="cluster.nodes",
            hint="export a job file for each kind, and start the second's workers with the first's RAY_ADDRESS",
        )
    return kinds[0], len(cluster.nodes)


def _directives(node: Node, count: int, options: BatchOptions) -> Sequence[str]:
    kind = node.gpu.lower() if options.gpu_type is None else options.gpu_type
    if kind and not _WORD.fullmatch(kind):
        raise InputError(f"{kind!r} is no type of GPU that Slurm could know", where="cluster.gpu", hint="--gpu-type")
    lines = [
        f"job-name={options.name}",
        f"nodes={count}",
        "ntasks-per-node=1",
        f"time={options.time}",
        f"signal=B:USR1@{options.warn_s}",
        "open-mode=append",
    ]
    if node.gpus:
        lines.append(f"gpus-per-node={f'{kind}:' if kind else ''}{node.gpus}")
    if node.cpus is not None:
        lines.append(f"cpus-per-task={max(1, int(node.cpus))}")
    if node.host_memory_gb is not None:
        lines.append(f"mem={max(1, int(node.host_memory_gb))}G")
    named = (("partition", options.partition), ("account", options.account))
    return [*lines, *(f"{key}={value}" for key, value in named if value)]
