"""Exports a job's cluster as a Slurm batch script: Ray on all nodes, the user's command, a drain before the time limit.

The script requests what the job file states (nodes, GPUs per node, their kind, CPUs, memory), waits for every node with
a deadline, and always stops what it started. It submits nothing. User input is quoted for the shell, or refused in
#SBATCH lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.core.errors import InputError
from trimtab.model.workflow import Cluster, Node

STOP_MARGIN_S = 15
"""Between the end of a drain and the time limit, for processes to stop."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+-]*")
_TIME = re.compile(r"\d{1,5}(-\d{1,2}(:\d{2}){0,2})?|\d{1,4}(:\d{2}){1,2}")


@dataclass(frozen=True)
class BatchOptions:
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
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{line}" for line in _directives(node, count, options)),
        _BODY.format(
            nodes=count,
            gpus=node.gpus,
            min_nodes=min_nodes,
            join_s=options.join_s,
            drain_s=options.warn_s - STOP_MARGIN_S,
            port=options.port,
            command=shlex.join(options.command or ("sleep", "infinity")),
            setup=f"\n{options.setup.strip()}\n" if options.setup.strip() else "",
        ),
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


_BODY = """\
# Written by `trimtab cluster export slurm`. The first node has Ray's head; every node runs one Ray node.
set -euo pipefail

nodes={nodes}
gpus_per_node={gpus}
min_nodes={min_nodes}   # fewer nodes than this after join_s seconds: the command is not run
join_s={join_s}
drain_s={drain_s}   # time for tasks to checkpoint before the time limit
port="${{RAY_PORT:-{port}}}"
# shellcheck disable=SC2016 # quoted as given
command=({command})
{setup}
# Ray's head requires a token if there is one; all other processes need the same mode.
token_file="${{RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}}"
if [[ -z "${{RAY_AUTH_MODE:-}}" ]] && [[ -n "${{RAY_AUTH_TOKEN:-}}" || -s "$token_file" ]]; then
    export RAY_AUTH_MODE=token
fi
# This script drains nodes itself; Ray's own drain would only take time.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

steps=()
run=""
ends_at=0 # in seconds of this script; 0: not known

# shellcheck disable=SC2329 # called by a trap
stop() {{ # stops everything that this script started
    trap - EXIT
    trap '' USR1 TERM INT
    if [[ -n "$run" ]]; then kill -TERM "$run" 2>/dev/null || true; fi
    if ((${{#steps[@]}})); then kill -TERM "${{steps[@]}}" 2>/dev/null || true; fi
    wait || true
}}

# shellcheck disable=SC2329 # called by a trap
drain() {{ # the time limit is near: tasks on the workers checkpoint
    trap '' USR1
    ends_at=$((SECONDS + drain_s))
    echo "the time limit is near: draining the workers within $drain_s s" >&2
    local host drains=()
    for host in "${{hosts[@]:1}}"; do
        timeout "$drain_s" trimtab cluster drain "$host" --address "$RAY_ADDRESS" --deadline "$drain_s" >&2 &
        drains+=("$!")
    done
    if ((${{#drains[@]}})); then wait "${{drains[@]}}" || true; fi
}}

trap stop EXIT
trap 'exit 143' TERM
trap 'exit 138' USR1 # until there is something to drain
trap 'exit 130' INT

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${{hosts[0]}}"
head_ip="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address |
    awk '{{ for (i = 1; i <= NF; i++) if (ip == "" && $i !~ /^127[.]|:/) ip = $i }} END {{ print ip }}')"
head_ip="${{head_ip:-$head}}"
export RAY_ADDRESS="$head_ip:$port"

on_node() {{ # on_node HOST ray start arguments ...: a step per node, so that the end of a node does not end the others
    local host="$1"
    shift
    srun --nodes=1 --ntasks=1 --nodelist="$host" --overlap --no-kill \\
        ray start --node-name="$host" --num-gpus="$gpus_per_node" --disable-usage-stats --block "$@" >&2 &
    steps+=("$!")
}}

on_node "$head" --head --node-ip-address="$head_ip" --port="$port"
python3 - "$head_ip" "$port" "$join_s" <<'PYTHON'
import socket, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + seconds
while True:
    try:
        socket.create_connection((host, port), timeout=2).close()
        break
    except OSError as fault:
        if time.monotonic() > end:
            sys.exit(f"no Ray at {{host}}:{{port}} after {{seconds:g}} s: {{fault}}")
        time.sleep(0.5)
PYTHON
for host in "${{hosts[@]:1}}"; do
    on_node "$host" --address="$RAY_ADDRESS"
done

python3 - "$min_nodes" "$join_s" "${{hosts[@]}}" <<'PYTHON'
import logging, sys, time
import ray
min_nodes, seconds, hosts = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
end = time.monotonic() + seconds
ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
while True:
    there = {{node["NodeName"] for node in ray.nodes() if node["Alive"]}}
    missing = [host for host in hosts if host not in there]
    if not missing or time.monotonic() > end:
        break
    time.sleep(0.5)
ray.shutdown()
if missing:
    print(f"not there after {{seconds:g}} s: {{', '.join(missing)}}", file=sys.stderr)
if len(hosts) - len(missing) < min_nodes:
    sys.exit(4)
PYTHON

echo "$nodes nodes at $RAY_ADDRESS: ${{command[*]}}" >&2
"${{command[@]}}" &
run="$!"
trap drain USR1

status=0
wait "$run" || status="$?"
if ((ends_at)); then # the signal ended `wait`, not the command
    while kill -0 "$run" 2>/dev/null && ((SECONDS < ends_at)); do sleep 1; done
    kill -TERM "$run" 2>/dev/null || true
    status=0
    wait "$run" || status="$?"
fi
run=""
exit "$status"
"""
