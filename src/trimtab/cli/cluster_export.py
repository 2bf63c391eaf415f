"""`trimtab cluster advise`, `export` and `hook`: integration with what adds and removes nodes.

`advise` and `export` read a job file and change nothing; `hook` listens for announced node terminations. Heavy imports
happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import FormatOption, NameOption, ProfileOption, not_installed, read_profile
from trimtab.cli.pool import AddressOption
from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.output import Format, answer, err, share

if TYPE_CHECKING:
    from trimtab.formats.loaded import LoadedJob
    from trimtab.model.workflow import Cluster, Node, Profile

export = typer.Typer(help="Export the job's cluster for KubeRay or Slurm.", no_args_is_help=True)

JobArgument = Annotated[
    Path, Argument(help="Job file: trimtab's own form, or an RLinf, verl, NeMo RL or OpenRLHF config.")
]
OutputOption = Annotated[Path | None, Option("--output", "-o", help="Output file.  [default: standard output]")]
ForceOption = Annotated[bool, Option("--force", help="Overwrite an existing file.")]

NODES_KEY = {
    "rlinf": "cluster.num_nodes",
    "verl": "trainer.nnodes",
    "nemo_rl": "cluster.num_nodes",
    "openrlhf": "++trimtab.nodes",
}
"""The key of a framework's config for the number of nodes."""

DEFAULT_PORT = 8267
DEFAULT_RAY = "2.60.0"


# ---- advise -----------------------------------------------------------------------------------------------------


def advise(
    file: JobArgument,
    join: Annotated[
        str | None, Option(metavar="N[xGPUS]", help="N nodes join, like the others or with GPUS GPUs each.")
    ] = None,
    leave: Annotated[str | None, Option(metavar="N|NODE", help="The last N nodes leave, or the named node.")] = None,
    kind: Annotated[str | None, Option(help="GPU kind of joining nodes.")] = None,
    profile: ProfileOption = None,
    noise: Annotated[str, Option(help="Gains below this are ignored.")] = "5%",
    address: AddressOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Recommend what each component should get when nodes join or leave, and whether to keep the current placement.

    The job file describes the cluster before. --join and --leave describe the change; without them the nodes of the
    running cluster count. Nothing is changed.

    Examples:

        trimtab cluster advise job.yaml --join 1
        trimtab cluster advise job.yaml --join 2x4 --kind L40S
        trimtab cluster advise job.yaml --leave node3 --format json
        trimtab cluster advise job.yaml --address 10.0.0.1:6379
    """
    from trimtab.formats.load import load
    from trimtab.machines.nodes import roles
    from trimtab.render.text import plan as outside_text

    if kind is not None and join is None:
        raise InputError("--kind needs --join", where="command line", hint="--join 1 --kind H100")
    noise_share = share(noise, "--noise")
    measured = read_profile(profile)
    loaded = load(file, [], measured)
    cluster = loaded.job.cluster
    notes: tuple[str, ...] = ()
    if join is None and leave is None:
        cluster, notes = roles.as_planned(_running_nodes(address, cluster), cluster)
    if leave is not None:
        cluster = roles.without(cluster, int(leave) if leave.isdecimal() else leave)
    if join is not None:
        cluster = roles.with_joined(cluster, *_parse_join(join), kind)
    after = _on_cluster(loaded, cluster, measured)
    before = roles.PlanningContext(loaded.job, loaded.rules, loaded.current)
    advice = roles.advise(before, roles.PlanningContext(after.job, after.rules), noise=noise_share)
    advice = replace(advice, notes=(*notes, *advice.notes))
    settings = None if advice.stay else after.settings(advice.after)
    data = outside_text.advice_data(advice, loaded.job.cluster, after.job.cluster, settings)
    answer(data, form, lambda: outside_text.print_advice(advice, loaded.job.cluster, after.job.cluster, settings))


def _parse_join(text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,4}))?", text.strip())
    if match is None:
        raise InputError(
            f"{text!r} is not a number of nodes", where="command line: --join", hint="2, or 2x8: of 8 GPUs each"
        )
    return int(match[1]), int(match[2]) if match[2] else None


def _on_cluster(loaded: LoadedJob, cluster: Cluster, measured: Profile | None) -> LoadedJob:
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
    overrides = [f"{key}={len(cluster.nodes)}"]
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


# ---- export -----------------------------------------------------------------------------------------------------


@export.command()
def kuberay(
    file: JobArgument,
    output: OutputOption = None,
    force: ForceOption = False,
    cluster_name: Annotated[str | None, Option(help="Name of the RayCluster.  [default: the file's name]")] = None,
    namespace: Annotated[str | None, Option(help="Kubernetes namespace.")] = None,
    image: Annotated[str | None, Option(help="Image of all pods, with Ray and trimtab.")] = None,
    autoscale: Annotated[bool, Option("--autoscale", help="Use Ray's autoscaler (v2).")] = False,
    min_workers: Annotated[int | None, Option("--min", help="Minimum of worker pods, with --autoscale.")] = None,
    max_workers: Annotated[int | None, Option("--max", help="Maximum of worker pods, with --autoscale.")] = None,
    head_gpus: Annotated[int, Option(help="GPUs of the head pod.")] = 0,
    drain: Annotated[int, Option(help="Termination grace period of a pod, in seconds.")] = 120,
    selector: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="Node labels instead of the GPU kind's.")
    ] = None,
    token: Annotated[bool, Option("--token", help="Use Ray's token authentication.")] = False,
) -> None:
    """Write a KubeRay RayCluster manifest for the job's cluster. Nothing is applied.

    Examples:

        trimtab cluster export kuberay job.yaml --image registry/ray-trimtab:1 -o cluster.yaml
        trimtab cluster export kuberay job.yaml --autoscale --min 1 --max 8 | kubectl apply -f -
    """
    from trimtab.formats.export import kuberay as writer
    from trimtab.formats.load import load

    loaded = load(file)
    version = _ray_version()
    options = writer.PodOptions(
        name=cluster_name or _dns_name(file),
        image=image or f"rayproject/ray:{version}-gpu",
        ray_version=version,
        namespace=namespace,
        autoscale=autoscale,
        min_replicas=min_workers,
        max_replicas=max_workers,
        head_gpus=head_gpus,
        drain_s=drain,
        selector=_labels(selector) if selector else None,
        token=token,
    )
    written = writer.manifest(loaded.job.cluster, options)
    _write(written.text, output, force)
    for note in written.notes:
        err.print(f"note: {note}", markup=False)


@export.command()
def slurm(
    file: JobArgument,
    command: Annotated[list[str] | None, Argument(metavar="-- COMMAND", help="Command to run on the cluster.")] = None,
    output: OutputOption = None,
    force: ForceOption = False,
    job_name: Annotated[str | None, Option(help="Slurm job name.  [default: the file's name]")] = None,
    time: Annotated[str, Option(help="Time limit.")] = "24:00:00",
    partition: Annotated[str | None, Option(help="Slurm partition.")] = None,
    account: Annotated[str | None, Option(help="Slurm account.")] = None,
    gpu_type: Annotated[str | None, Option(help="Slurm GPU type; '' for any.  [default: the job's GPU kind]")] = None,
    min_nodes: Annotated[int | None, Option("--min", help="Minimum of nodes to start with.  [default: all]")] = None,
    join_timeout: Annotated[int, Option(help="Timeout for nodes to join, in seconds.")] = 300,
    drain: Annotated[int, Option(help="Drain nodes this many seconds before the time limit.")] = 120,
    port: Annotated[int, Option(help="Port of the Ray head.")] = 6379,
    setup: Annotated[str, Option(help="Shell lines to run first.")] = "",
) -> None:
    """Write a Slurm batch script for the job's cluster: Ray on every node, a command, a drain before the time limit.

    Without a command the cluster runs until the time limit. Nothing is submitted.

    Examples:

        trimtab cluster export slurm job.yaml -o job.sbatch -- python train.py --config job.yaml
        trimtab cluster export slurm job.yaml --partition gpu --setup 'source venv/bin/activate' | sbatch
    """
    from trimtab.formats.export import slurm as writer
    from trimtab.formats.load import load

    loaded = load(file)
    options = writer.BatchOptions(
        name=job_name or re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-.") or "trimtab",
        command=tuple(command or ()),
        time=time,
        partition=partition,
        account=account,
        gpu_type=gpu_type,
        min_nodes=min_nodes,
        join_s=join_timeout,
        warn_s=drain,
        port=port,
        setup=setup,
    )
    _write(writer.script(loaded.job.cluster, options), output, force)


def _write(text: str, output: Path | None, force: bool) -> None:
    from trimtab.formats.files import write_text

    if output is None:
        sys.stdout.write(text)
        return
    if output.is_file() and not force:
        raise InputError(f"{output} exists", where="command line: --output", hint="--force overwrites it")
    write_text(output, text)
    err.print(f"written to {output}", markup=False)


def _labels(texts: list[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9./_-]+", key) or not re.fullmatch(r"[A-Za-z0-9._-]*", value):
            raise InputError(f"{text!r} is not a label", where="command line: --selector", hint="KEY=VALUE")
        labels[key] = value
    return labels


def _dns_name(file: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"ray-{name}".strip("-")


def _ray_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ray")
    except PackageNotFoundError:
        return DEFAULT_RAY


# ---- hook -------------------------------------------------------------------------------------------------------


def hook(
    port: Annotated[int, Option(help="Port to listen on; 0: any free port.")] = DEFAULT_PORT,
    host: Annotated[
        str, Option(help="Address to listen on; beyond loopback, reading needs the token, too.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, Option(help="Host name that callers use (Host header; repeatable).")
    ] = None,
    token_file: Annotated[Path | None, Option(help="File for the generated token.")] = None,
    address: AddressOption = None,
    name: NameOption = None,
) -> None:
    """Serve an HTTP endpoint for announced node terminations: POST /nodes/NODE/drain, with a token.

    The token is TRIMTAB_HOOK_TOKEN, or a generated one in a file that only you can read; it is never printed. NODE is a
    node id or its prefix, a node name or address. GET /desired and /metrics return the wanted number of workers. Ctrl-C
    stops it.

    Examples:

        trimtab cluster hook --address 10.0.0.1:6379
        curl -X POST -H "Authorization: Bearer $(cat TOKEN_FILE)" -d '{"deadline_s": 120, "cause": "spot"}' \\
            http://127.0.0.1:8267/nodes/10.0.0.7/drain
    """
    from trimtab.runtime.http.listening import listening
    from trimtab.runtime.http.tokens import HOOK, token, told
    from trimtab.runtime.procs.interrupts import signals_interrupt
    from trimtab.runtime.rayapi.connect import RayConnection

    server_module, make_calls = _import_hook()
    link = RayConnection(address, start=False)
    try:
        calls = make_calls(link.ray, name)
        with (
            listening(host, port) as socket,
            token(os.environ, HOOK, token_file, f"hook-{socket.getsockname()[1]}") as (secret, kept_in),
        ):
            server = server_module.NodeHookServer(
                calls.drain, calls.look, token=secret, listening=socket, names=tuple(allow_host or ())
            )
            for line in (f"listening on {server.url}", told(kept_in, HOOK), calls.how(), "Ctrl-C stops it"):
                err.print(line, markup=False)
            # SIGTERM and Ctrl-C stop in order: the server finishes the calls under way and passes the signal on.
            with signals_interrupt(), contextlib.suppress(KeyboardInterrupt):
                server.serve()
    finally:
        link.close()
    err.print("stopped")


def _import_hook() -> tuple[Any, Any]:
    try:
        from trimtab.runtime.hook import server as server_module
        from trimtab.runtime.hook.server import NodeHookCalls
    except ImportError as fault:
        raise not_installed("the hook", fault) from None
    return server_module, NodeHookCalls
