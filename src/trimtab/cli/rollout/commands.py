"""`trimtab rollout`: serve engines behind one door, look at them, and drain, resume, scale and examine them.

`serve` runs until it is interrupted. The others talk to a gateway that runs, found by the file that `serve` left for
them or by --url; what changes something needs its token. What they need is imported when they run, so that the command
line starts quickly.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError, nearest
from trimtab.render.output import Format, answer, warn

if TYPE_CHECKING:
    from trimtab.cli.rollout.client import GatewayClient
    from trimtab.machines.diagnose.rollout_findings import RolloutFinding

app = typer.Typer(
    help="Rollout engines behind one door, and as many of them as the load asks for.", no_args_is_help=True
)

UrlOption = Annotated[
    str | None, typer.Option("--url", help="The gateway; else TRIMTAB_ROLLOUT_URL, else the only one of yours here.")
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="Has its token; else TRIMTAB_ROLLOUT_TOKEN, else the file that serve wrote."),
]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How the answer is written.")]
WorkerArgument = Annotated[str, typer.Argument(help="A worker, as `trimtab rollout status` names it.")]

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@app.command()
def serve(
    job: Annotated[Path, typer.Argument(help="A job file with a `rollout:` section.")],
    port: Annotated[
        int | None, typer.Option(help="Where to listen; 0: any that is free. Else as the file says.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; others than loopback need the token.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Where a token that is made here is written.")] = None,
) -> None:
    """Serve the engines of a job file behind one HTTP door; shows them until Ctrl-C, which drains and ends all of it.

    The door speaks OpenAI's completions and chat and SGLang's /generate. Whatever changes something needs the token:
    TRIMTAB_ROLLOUT_TOKEN, or one that is made and written to a file that only you can read. A second Ctrl-C waits for
    nobody. The smallest job file:

        rollout:
          engines:
            - http://127.0.0.1:8000

    Examples:

        trimtab rollout serve job.yaml

        trimtab rollout serve job.yaml --port 9000
    """
    import asyncio

    from trimtab.formats.rollout import job_section as rollout_file

    settings = rollout_file.read(job)
    for sentence in settings.warnings():
        warn(sentence)
    served = _import_serve()
    status = asyncio.run(served.serve(settings, host=host, port=port, token_file=token_file))
    if status:
        raise typer.Exit(status)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="A worker or a request: its story.")] = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Workers with their states, load and reasons; queues by class; the last scale steps and whether they came true.

    Examples:

        trimtab rollout status

        trimtab rollout status engine-0

        trimtab rollout status --url http://10.0.0.1:8268 --format json
    """
    from trimtab.render.text import rollout as rollout_text

    client = _client(url, token_file)
    if name is None:
        data = _status(client)
        answer(data, form, lambda: rollout_text.print_status(data))
        return
    seen = _status(client)
    try:
        told = client.story(name)
    except InputError:
        raise _unknown(name, seen, "worker or request") from None
    story = rollout_text.story_data(name, told, seen)
    answer(story, form, lambda: rollout_text.print_story(story))


@app.command()
def drain(
    worker: WorkerArgument,
    deadline: Annotated[
        str | None,
        typer.Option("--deadline", help="Then what is left goes to others: 30, 90s, 5m. Else drain_timeout."),
    ] = None,
    why: Annotated[str, typer.Option(help="Why, for those who ask.")] = "drained by `trimtab rollout drain`",
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Have a worker take nothing new until it is resumed; what it has goes on until the deadline, then elsewhere.

    Exit status 3 where too few would be left to serve.

    Examples:

        trimtab rollout drain engine-2

        trimtab rollout drain engine-2 --deadline 5m --why "its GPU is needed"
    """
    client = _client(url, token_file)
    deadline_s = None if deadline is None else _seconds(deadline, "--deadline")
    _known(client, worker)
    client.drain(worker, deadline_s, why)
    _answer_worker(client, worker, "drains", form)


@app.command()
def resume(
    worker: WorkerArgument, url: UrlOption = None, token_file: TokenOption = None, form: FormatOption = Format.text
) -> None:
    """Let a worker serve again that was drained, or that was given up because it failed too often.

    Example:

        trimtab rollout resume engine-2
    """
    client = _client(url, token_file)
    _known(client, worker)
    client.resume(worker)
    _answer_worker(client, worker, "may serve again", form)


@app.command()
def scale(
    workers: Annotated[int | None, typer.Argument(metavar="[N]", help="So many are to serve.")] = None,
    for_: Annotated[str | None, typer.Option("--for", help="So long: 90s, 10m, 2h. Else until --release.")] = None,
    release: Annotated[bool, typer.Option("--release", help="Let the policy decide again.")] = False,
    why: Annotated[str, typer.Option(help="Why, for those who ask.")] = "set by `trimtab rollout scale`",
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Set the number of workers by hand: it wins over the policy until it is released or expires.

    Examples:

        trimtab rollout scale 8 --for 10m

        trimtab rollout scale --release
    """
    from trimtab.render.text import rollout as rollout_text

    if release == (workers is not None):
        raise InputError(
            "either a number of workers or --release", where="command line", hint="trimtab rollout scale 4"
        )
    if release and for_ is not None:
        raise InputError("--for goes with a number of workers", where="command line: --for")
    for_s = None if for_ is None else _seconds(for_, "--for")
    client = _client(url, token_file)
    if workers is None:
        client.release()
    else:
        client.scale(workers, for_s, why)
    data = _status(client)
    answer({"scaling": data["scaling"], "range": data["range"]}, form, lambda: rollout_text.print_scaled(data))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="Examine this job file alone; no gateway.")] = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """What is wrong, and what to do: engines that do not serve, that do not scale, memory kept, requests that fail.

    Exit status 0: nothing but notes; 3: something stays as it is until somebody does something; 4: an engine or a
    request failed.

    Examples:

        trimtab rollout doctor

        trimtab rollout doctor --config job.yaml
    """
    from trimtab.machines.diagnose.rollout_findings import Severity
    from trimtab.render.text import rollout as rollout_text

    if config is not None:
        if url is not None:
            raise InputError("--config and --url do not go together", where="command line")
        found, of_what = _examined_file(config), str(config)
    else:
        client = _client(url, token_file)
        found, of_what = _examined(client), client.at.url
    answer(rollout_text.doctor_data(found, of_what), form, lambda: rollout_text.print_findings(found, of_what))
    worst = {one.severity for one in found}
    if Severity.fault in worst:
        raise typer.Exit(UnreachableError.exit_status)
    if Severity.stuck in worst:
        raise typer.Exit(InfeasibleError.exit_status)


# ---- the parts of commands ----------------------------------------------------------------------------------------


def _examined(client: GatewayClient) -> tuple[RolloutFinding, ...]:
    from trimtab.machines.diagnose.rollout import examine
    from trimtab.runtime.localcluster import gpus

    return examine(_status(client), gpus.gpu_processes())


def _examined_file(path: Path) -> tuple[RolloutFinding, ...]:
    from trimtab.formats.rollout import job_section as rollout_file
    from trimtab.machines.diagnose.rollout import examine_settings

    settings = rollout_file.read(path)
    _import_serve().commands(settings)
    return examine_settings(settings.warnings(), settings.public_addresses())


def _import_serve() -> Any:
    try:
        from trimtab.cli.rollout import serve as rollout_serve
    except ModuleNotFoundError as fault:
        if (fault.name or "").startswith("trimtab"):
            raise
        raise InputError(
            f"the gateway needs {fault.name}, which is not installed here", hint="pip install 'trimtab[serve]'"
        ) from None
    return rollout_serve


def _client(url: str | None, token_file: Path | None) -> GatewayClient:
    from trimtab.cli.rollout.address_files import reached
    from trimtab.cli.rollout.client import GatewayClient

    return GatewayClient(reached(os.environ, url, token_file))


def _status(client: GatewayClient) -> dict[str, Any]:
    from trimtab.render.text import rollout as rollout_text

    return rollout_text.status_data(client.status(), client.at.url, client.at.job)


def _known(client: GatewayClient, worker: str) -> dict[str, Any]:
    seen = _status(client)
    for one in seen["workers"]:
        if one["name"] == worker:
            found: dict[str, Any] = one
            return found
    raise _unknown(worker, seen, "worker")


def _unknown(name: str, seen: dict[str, Any], what: str) -> InputError:
    names = [one["name"] for one in seen["workers"]]
    near = nearest(name, names)
    hint = f"did you mean {near}?" if near else f"workers: {', '.join(names[:8]) or 'none'}"
    return InputError(f"there is no {what} {name}", hint=hint)


def _answer_worker(client: GatewayClient, worker: str, verb: str, form: Format) -> None:
    from trimtab.render.text import rollout as rollout_text

    data = _known(client, worker)
    answer(data, form, lambda: rollout_text.print_worker(data, verb))


def _seconds(text: str, option: str) -> float:
    """A length of time as people write it: 90, 90s, 10m, 1.5h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        raise InputError(f"a time such as 90s, 10m or 2h is expected, not {text}", where=f"command line: {option}")
    return float(match[1]) * UNITS[match[2]]
