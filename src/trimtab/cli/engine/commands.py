"""`trimtab engine`: serves engines behind one gateway; lists, drains, scales and diagnoses them.

`serve` runs until interrupted. The other commands call a running gateway, found by the file that `serve` wrote or by
--url; changes need its token. Heavy imports happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import (
    DeadlineOption,
    FollowOption,
    FormatOption,
    JobArgument,
    OverridesArgument,
    PortOption,
    ReasonOption,
    TailOption,
    TokenFileOption,
    UrlOption,
    not_installed,
    seconds_of,
)
from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError, meant
from trimtab.render.output import Format, answer, err, warn

if TYPE_CHECKING:
    from trimtab.cli.engine.client import GatewayClient

app = typer.Typer(help="Rollout engines behind one gateway, scaled with the load.", no_args_is_help=True)

EngineArgument = Annotated[str, Argument(help="Engine name, as in `trimtab engine list`.")]


@app.command()
def serve(
    job: JobArgument,
    overrides: OverridesArgument = None,
    port: PortOption = None,
    host: Annotated[str | None, Option(help="Address to listen on; beyond loopback the token is required.")] = None,
    token_file: TokenFileOption = None,
    processes: Annotated[
        int | None,
        Option(help="Processes of the gateway: the pool's own, and those that serve the port.  [default: 1]"),
    ] = None,
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

        trimtab engine serve job.yaml
        trimtab engine serve job.yaml --port 9000
    """
    from trimtab.formats.rollout import job_section as rollout_file
    from trimtab.model.rollout import resume_bounds

    settings = rollout_file.read(job, overrides or ())
    if resume_every is not None:
        tokens, seconds = resume_bounds(resume_every)
        settings = replace(settings, rules=replace(settings.rules, resume_every=tokens, resume_every_s=seconds))
    for sentence in settings.warnings():
        warn(sentence)
    for sentence in settings.remarks():
        err.print(sentence, markup=False)
    served = _import_serve()
    status = served.run_alone(served.serve(settings, host=host, port=port, processes=processes, token_file=token_file))
    if status:
        raise typer.Exit(status)


@app.command("list")
def list_engines(url: UrlOption = None, token_file: TokenFileOption = None, form: FormatOption = Format.text) -> None:
    """List engines with state, load and reasons; queues by class; the last scale steps and their outcomes.

    Examples:

        trimtab engine list
        trimtab engine list --url http://10.0.0.1:8268 --format json
    """
    from trimtab.render.text import rollout as rollout_text

    data = _status(_client(url, token_file))
    answer(data, form, lambda: rollout_text.print_status(data))


@app.command()
def show(
    name: Annotated[str, Argument(help="Engine or request.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Show an engine or a request: its state, load and story.

    Example:

        trimtab engine show engine-0
    """
    from trimtab.render.text import rollout as rollout_text

    client = _client(url, token_file)
    seen = _status(client)
    try:
        story_of = client.story(name)
    except InputError:
        raise _unknown(name, seen, "engine or request") from None
    story = rollout_text.story_data(name, story_of, seen)
    answer(story, form, lambda: rollout_text.print_story(story))


def knows(name: str) -> bool:
    """Whether the only gateway of this user has an engine or a request of this name."""
    try:
        _client(None, None).story(name)
    except TrimtabError:
        return False
    return True


@app.command()
def logs(
    name: EngineArgument,
    tail: TailOption = 1000,
    follow: FollowOption = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Print what an engine that the gateway started on this machine has written.

    Engines on slots of a pool are tasks: `trimtab task logs`.

    Example:

        trimtab engine logs engine-2 --tail 50 --follow
    """
    from trimtab.runtime.rollout.launch.launcher import safe_name

    client = _client(url, token_file)
    worker = _known(client, name)
    path = Path(client.at.logs) / f"{safe_name(worker['name'])}.log" if client.at.logs else None
    if path is None or not path.is_file():
        raise InputError(
            f"{name} has no log here: the gateway of this machine did not start it",
            hint="an attached engine writes where it was started; `trimtab task logs` has those of pools",
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
        sys.stdout.writelines(lines if tail < 0 else lines[max(0, len(lines) - tail) :])
        while follow:
            sys.stdout.write(file.read())
            sys.stdout.flush()
            time.sleep(0.2)


@app.command()
def drain(
    worker: EngineArgument,
    deadline: DeadlineOption = None,
    reason: ReasonOption = "drained by `trimtab engine drain`",
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Drain an engine: no new requests until `undrain`; running requests move elsewhere at the deadline.

    Exit status 3 if too few engines would remain.

    Examples:

        trimtab engine drain engine-2
        trimtab engine drain engine-2 --deadline 5m --reason "its GPU is needed"
    """
    client = _client(url, token_file)
    deadline_s = None if deadline is None else seconds_of(deadline, "--deadline")
    _known(client, worker)
    client.drain(worker, deadline_s, reason)
    _answer_worker(client, worker, "drains", form)


@app.command()
def undrain(
    worker: EngineArgument, url: UrlOption = None, token_file: TokenFileOption = None, form: FormatOption = Format.text
) -> None:
    """Let an engine serve again that was drained, or given up after too many failures.

    Example:

        trimtab engine undrain engine-2
    """
    client = _client(url, token_file)
    _known(client, worker)
    client.resume(worker)
    _answer_worker(client, worker, "may serve again", form)


@app.command()
def scale(
    workers: Annotated[int | None, Argument(metavar="[N]", help="Number of engines.")] = None,
    for_: Annotated[str | None, Option("--for", help="Duration: 90s, 10m, 2h.  [default: until --auto]")] = None,
    auto: Annotated[bool, Option("--auto", help="Return scaling to the policy.")] = False,
    reason: ReasonOption = "set by `trimtab engine scale`",
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Set the number of engines by hand: it overrides the policy until --auto or the end of --for.

    Examples:

        trimtab engine scale 8 --for 10m
        trimtab engine scale --auto
    """
    from trimtab.render.text import rollout as rollout_text

    if auto == (workers is not None):
        raise InputError(
            "pass either a number of engines or --auto", where="command line", hint="trimtab engine scale 4"
        )
    if auto and for_ is not None:
        raise InputError("--for needs a number of engines", where="command line: --for")
    for_s = None if for_ is None else seconds_of(for_, "--for")
    client = _client(url, token_file)
    if workers is None:
        client.release()
    else:
        client.scale(workers, for_s, reason)
    data = _status(client)
    answer({"scaling": data["scaling"], "range": data["range"]}, form, lambda: rollout_text.print_scaled(data))


@app.command()
def doctor(
    job: Annotated[Path | None, Argument(metavar="[FILE]", help="Check this job file only, without a gateway.")] = None,
    overrides: OverridesArgument = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Diagnose engines that do not serve or scale, memory that is not freed, and failing requests; with fixes.

    Exit status: 0 notes only; 3 something stays stuck until you act; 4 an engine or a request failed.

    Examples:

        trimtab engine doctor
        trimtab engine doctor job.yaml
    """
    from trimtab.formats.rollout import job_section as rollout_file
    from trimtab.machines.diagnose.rollout import examine, examine_settings
    from trimtab.machines.diagnose.rollout_findings import Severity
    from trimtab.render.text import rollout as rollout_text
    from trimtab.runtime.procs import gpus

    if job is not None:
        if url is not None:
            raise InputError("FILE and --url exclude each other", where="command line")
        settings, of_what = rollout_file.read(job, overrides or ()), str(job)
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
        from trimtab.cli.engine import serve as engine_serve
    except ModuleNotFoundError as fault:
        if (fault.name or "").startswith("trimtab"):
            raise
        raise not_installed("the gateway", fault) from None
    return engine_serve


def _client(url: str | None, token_file: Path | None) -> GatewayClient:
    from trimtab.cli.engine.client import GatewayClient, find_gateway

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
    raise _unknown(worker, seen, "engine")


def _unknown(name: str, seen: dict[str, Any], what: str) -> InputError:
    names = [item["name"] for item in seen["workers"]]
    hint = meant(name, names, f"engines: {', '.join(names[:8]) or 'none'}")
    return InputError(f"there is no {what} {name}", hint=hint)


def _answer_worker(client: GatewayClient, worker: str, verb: str, form: Format) -> None:
    from trimtab.render.text import rollout as rollout_text

    data = _known(client, worker)
    answer(data, form, lambda: rollout_text.print_worker(data, verb))
