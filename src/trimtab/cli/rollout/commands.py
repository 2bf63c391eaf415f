"""`trimtab rollout`: serves engines behind one gateway; shows, drains, resumes, scales and diagnoses them.

`serve` runs until interrupted. The other commands call a running gateway, found by the file that `serve` wrote or by
--url; changes need its token. Heavy imports happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import FormatOption, not_installed
from trimtab.core.errors import InfeasibleError, InputError, UnreachableError, meant
from trimtab.render.output import Format, answer, err, warn

if TYPE_CHECKING:
    from trimtab.cli.rollout.client import GatewayClient

app = typer.Typer(help="Rollout engines behind one gateway, scaled with the load.", no_args_is_help=True)

UrlOption = Annotated[
    str | None, Option("--url", help="Gateway address.  [default: TRIMTAB_ROLLOUT_URL, or your only local gateway]")
]
TokenOption = Annotated[
    Path | None,
    Option("--token-file", help="File with the token.  [default: TRIMTAB_ROLLOUT_TOKEN, or the file written by serve]"),
]
WorkerArgument = Annotated[str, Argument(help="Worker name, as in `trimtab rollout status`.")]

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@app.command()
def serve(
    job: Annotated[Path, Argument(help="Job file with a `rollout:` section.")],
    port: Annotated[
        int | None, Option(help="Port to listen on; 0: any free port.  [default: as in the job file]")
    ] = None,
    host: Annotated[str | None, Option(help="Address to listen on; beyond loopback the token is required.")] = None,
    token_file: Annotated[Path | None, Option(help="File for the generated token.")] = None,
    resume_every: Annotated[
        str | None,
        Option(help="What a lost engine costs a request: tokens, '10 s', or inf.  [default: as in the job file]"),
    ] = None,
) -> None:
    """Serve the engines of a job file behind one HTTP gateway; show them until Ctrl-C, which drains and stops them.

    The gateway speaks OpenAI completions and chat, and SGLang /generate. Changes need the token: TRIMTAB_ROLLOUT_TOKEN,
    or a generated one in a file that only you can read. A second Ctrl-C stops at once. The smallest job file:

        rollout:
          engines:
            - http://127.0.0.1:8000

    Examples:

        trimtab rollout serve job.yaml
        trimtab rollout serve job.yaml --port 9000
    """
    import asyncio

    from trimtab.formats.rollout import job_section as rollout_file
    from trimtab.model.rollout import resume_bounds

    settings = rollout_file.read(job)
    if resume_every is not None:
        tokens, seconds = resume_bounds(resume_every)
        settings = replace(settings, rules=replace(settings.rules, resume_every=tokens, resume_every_s=seconds))
    for sentence in settings.warnings():
        warn(sentence)
    for sentence in settings.remarks():
        err.print(sentence, markup=False)
    served = _import_serve()
    status = asyncio.run(served.serve(settings, host=host, port=port, token_file=token_file))
    if status:
        raise typer.Exit(status)


@app.command()
def status(
    name: Annotated[str | None, Argument(help="Worker or request: show its story.")] = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Show workers with state, load and reasons; queues by class; the last scale steps and their outcomes.

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
        story_of = client.story(name)
    except InputError:
        raise _unknown(name, seen, "worker or request") from None
    story = rollout_text.story_data(name, story_of, seen)
    answer(story, form, lambda: rollout_text.print_story(story))


@app.command()
def drain(
    worker: WorkerArgument,
    deadline: Annotated[
        str | None, Option(help="When remaining requests move to other workers: 30, 90s, 5m.  [default: drain_timeout]")
    ] = None,
    why: Annotated[str, Option(help="Reason, shown in status.")] = "drained by `trimtab rollout drain`",
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Drain a worker: no new requests until it is resumed; running requests move elsewhere at the deadline.

    Exit status 3 if too few workers would remain.

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
    """Resume a worker that was drained, or given up after too many failures.

    Example:

        trimtab rollout resume engine-2
    """
    client = _client(url, token_file)
    _known(client, worker)
    client.resume(worker)
    _answer_worker(client, worker, "may serve again", form)


@app.command()
def scale(
    workers: Annotated[int | None, Argument(metavar="[N]", help="Number of workers.")] = None,
    for_: Annotated[str | None, Option("--for", help="Duration: 90s, 10m, 2h.  [default: until --release]")] = None,
    release: Annotated[bool, Option("--release", help="Return scaling to the policy.")] = False,
    why: Annotated[str, Option(help="Reason, shown in status.")] = "set by `trimtab rollout scale`",
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Set the number of workers manually: it overrides the policy until released or expired.

    Examples:

        trimtab rollout scale 8 --for 10m
        trimtab rollout scale --release
    """
    from trimtab.render.text import rollout as rollout_text

    if release == (workers is not None):
        raise InputError(
            "pass either a number of workers or --release", where="command line", hint="trimtab rollout scale 4"
        )
    if release and for_ is not None:
        raise InputError("--for needs a number of workers", where="command line: --for")
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
    config: Annotated[Path | None, Option(help="Check this job file only, without a gateway.")] = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Diagnose engines that do not serve or scale, memory that is not freed, and failing requests; with fixes.

    Exit status: 0 notes only; 3 something stays stuck until you act; 4 an engine or a request failed.

    Examples:

        trimtab rollout doctor
        trimtab rollout doctor --config job.yaml
    """
    from trimtab.formats.rollout import job_section as rollout_file
    from trimtab.machines.diagnose.rollout import examine, examine_settings
    from trimtab.machines.diagnose.rollout_findings import Severity
    from trimtab.render.text import rollout as rollout_text
    from trimtab.runtime.procs import gpus

    if config is not None:
        if url is not None:
            raise InputError("--config and --url exclude each other", where="command line")
        settings, of_what = rollout_file.read(config), str(config)
        _import_serve().commands(settings)
        found = examine_settings(settings.warnings(), settings.public_addresses())
    else:
        client = _client(url, token_file)
        found, of_what = examine(_status(client), gpus.pids_by_gpu()), client.at.url
    answer(rollout_text.doctor_data(found, of_what), form, lambda: rollout_text.print_findings(found, of_what))
    worst = {finding.severity for finding in found}
    if Severity.fault in worst:
        raise typer.Exit(UnreachableError.exit_status)
    if Severity.stuck in worst:
        raise typer.Exit(InfeasibleError.exit_status)


def _import_serve() -> Any:
    try:
        from trimtab.cli.rollout import serve as rollout_serve
    except ModuleNotFoundError as fault:
        if (fault.name or "").startswith("trimtab"):
            raise
        raise not_installed("the gateway", fault) from None
    return rollout_serve


def _client(url: str | None, token_file: Path | None) -> GatewayClient:
    from trimtab.cli.rollout.client import GatewayClient, find_gateway

    return GatewayClient(find_gateway(os.environ, url, token_file))


def _status(client: GatewayClient) -> dict[str, Any]:
    from trimtab.render.text import rollout as rollout_text

    return rollout_text.status_data(client.status(), client.at.url, client.at.job)


def _known(client: GatewayClient, worker: str) -> dict[str, Any]:
    seen = _status(client)
    for item in seen["workers"]:
        if item["name"] == worker:
            found: dict[str, Any] = item
            return found
    raise _unknown(worker, seen, "worker")


def _unknown(name: str, seen: dict[str, Any], what: str) -> InputError:
    names = [item["name"] for item in seen["workers"]]
    hint = meant(name, names, f"workers: {', '.join(names[:8]) or 'none'}")
    return InputError(f"there is no {what} {name}", hint=hint)


def _answer_worker(client: GatewayClient, worker: str, verb: str, form: Format) -> None:
    from trimtab.render.text import rollout as rollout_text

    data = _known(client, worker)
    answer(data, form, lambda: rollout_text.print_worker(data, verb))


def _seconds(text: str, option: str) -> float:
    """Parses a duration: 90, 90s, 10m, 1.5h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        raise InputError(f"a time such as 90s, 10m or 2h is expected, not {text}", where=f"command line: {option}")
    return float(match[1]) * UNITS[match[2]]
