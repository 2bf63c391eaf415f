"""`trimtab cluster export` and `hook`: integration with what adds and removes nodes.

`export` reads a job file and changes nothing; `hook` listens for announced node terminations. Heavy imports
happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import (
    AddressOption,
    ForceOption,
    JobArgument,
    NameOption,
    OutputOption,
    OverridesArgument,
    TokenFileOption,
    not_installed,
)
from trimtab.core.errors import InputError
from trimtab.render.output import err

export = typer.Typer(help="Export the job's cluster for KubeRay or Slurm.", no_args_is_help=True)

DEFAULT_PORT = 8267
DEFAULT_RAY = "2.60.0"


# ---- export -----------------------------------------------------------------------------------------------------


@export.command()
def kuberay(
    file: JobArgument,
    overrides: OverridesArgument = None,
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
        list[str] | None, Option(metavar="LABEL=VALUE", help="Node labels instead of the GPU kind's.")
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

    loaded = load(file, overrides or [])
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
    command: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]... [-- COMMAND]", help="Keys of the file to override; command to run there."),
    ] = None,
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

    words = command or []
    given = next((at for at, word in enumerate(words) if "=" not in word), len(words))
    loaded = load(file, words[:given])
    options = writer.BatchOptions(
        name=job_name or re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-.") or "trimtab",
        command=tuple(words[given:]),
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
    port: Annotated[int, Option(help="Port to listen on.")] = DEFAULT_PORT,
    host: Annotated[
        str, Option(help="Address to listen on; beyond loopback, reading needs the token, too.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, Option(help="Host name that callers use (Host header; repeatable).")
    ] = None,
    token_file: TokenFileOption = None,
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
