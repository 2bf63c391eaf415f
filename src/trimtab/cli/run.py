"""`trimtab run`: a job by its plan, on Ray or in this process, from its beginning or from where its folder stands."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.model.run import ReplanMode
from trimtab.render.output import Format, answer, err, out

if TYPE_CHECKING:
    from trimtab.model.plan import Plan
    from trimtab.render.text.run import RunNarrator
    from trimtab.running import Job
    from trimtab.runtime.run.local_run import RunEnd

STOPPED = 130


def run(
    job: Annotated[
        Path | None, typer.Argument(help="A job file in trimtab's own form, with `use` or `emulate`.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="In this process, without Ray.")] = False,
    address: Annotated[
        str | None,
        typer.Option("--address", "-a", help="A Ray cluster; else RAY_ADDRESS, or a Ray of its own on this machine."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-o", help="Where events, summary and states go.  [default: runs/NAME-N]")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    iterations: Annotated[int | None, typer.Option("--iterations", "-n", help="Instead of run.iterations.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Instead of run.seed.")] = None,
    mode: Annotated[
        ReplanMode | None, typer.Option("--mode", help="What the loop may do: say what it would, or move the run.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="This plan instead of the best: what `trimtab plan -f json` printed.")
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show it on a page on this machine while it runs.")
    ] = False,
    port: Annotated[int | None, typer.Option("--port", help="Of the dashboard: 8270 unless said, or the next.")] = None,
    form: Annotated[Format, typer.Option("--format", "-f", help="How to answer at the end.")] = Format.text,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the answer.")] = False,
) -> None:
    """Run a job: measure it where costs are not stated, plan it, run it, and watch whether the plan is still right.

    Ctrl-C ends it after the iteration under way, with its state saved; twice ends it at once. Exit status: 0 done; 2
    the job or the call is wrong; 3 nothing feasible exists; 4 a component or the cluster failed; 130 stopped.

    Examples:

        trimtab run examples/grpo/job.yaml --local

        trimtab run job.yaml --iterations 200 --mode auto

        trimtab run --resume runs/grpo-1 --iterations 400
    """
    from trimtab.cli.dashboard import beside
    from trimtab.render.live.run import RunDisplay, answers_alone, signals_told
    from trimtab.render.text.run import RunNarrator

    if local and address:
        raise InputError("--local runs without Ray, and --address names one", where="command line")
    form = Format.json if as_json else form
    asked = _job(job, folder, resume, iterations, seed, mode)
    if resume is not None and _is_over(resume, asked.run_job.iterations, form):
        return
    given = _plan(asked, plan) if plan is not None else None
    story = RunNarrator(asked.run_job.iterations, measuring=_measures(asked, resume))
    where: dict[str, Any] = {"folder": str(resume or folder or "")}

    def heard(event: str, facts: dict[str, Any]) -> None:
        if event == "starting":
            where.update(facts)
        display.heard(event, facts)

    def asked_now() -> None:
        with contextlib.suppress(TrimtabError):  # it has not begun, or is over
            asked.ask("asked by SIGUSR1")
            display.say("asked whether the plan is still right")
            story.say_next()

    def said(line: str) -> None:
        """Where the dashboard is; said also to those who want no progress."""
        if quiet:
            err.print(line, markup=False)
        else:
            display.say(line)

    if not local:
        from trimtab.runtime.rayapi.embedded import mute_ray_messages

        mute_ray_messages()
    with RunDisplay(asked.name, story, quiet=quiet) as display:
        display.say(_asked_words(asked))
        with answers_alone(), signals_told(display.interrupted, asked_now):
            end = asked.run(
                local=local,
                address=address,
                folder=resume or folder,
                resume=resume is not None,
                plan=given,
                on_event=heard,
                beside=beside(said, port) if dashboard or port is not None else None,
            )
    again = " --local" if local else f" --address {address}" if address else ""
    _say(_end_data(end, story, where["folder"], asked, again), form)
    _leave(end)


def _job(
    job: Path | None,
    folder: Path | None,
    resume: Path | None,
    iterations: int | None,
    seed: int | None,
    mode: ReplanMode | None,
) -> Job:
    from trimtab.running import Job

    word = mode.value if mode is not None else None
    if resume is not None:
        if folder is not None:
            raise InputError("--resume names the folder already", where="command line: --folder")
        if job is None:
            return Job.of_run(resume, iterations=iterations, seed=seed, mode=word)
    if job is None:
        raise InputError(
            "which job to run is not said", where="command line", hint="trimtab run JOB, or trimtab run --resume DIR"
        )
    return Job.load(job, iterations=iterations, seed=seed, mode=word)


def _plan(job: Job, file: Path) -> Plan:
    """The plan in a file that `trimtab plan` answered with."""
    from trimtab.formats.yaml_text import read_mapping

    groups: Any = read_mapping(file).get("groups")
    try:
        ranks = {str(name): tuple(map(int, group["gpus"])) for group in groups for name in group["components"]}
    except (TypeError, KeyError, ValueError):
        raise InputError(
            "this is no plan", where=str(file), hint="`trimtab plan JOB --format json > plan.json` writes one"
        ) from None
    return job.plan(ranks)


def _is_over(folder: Path, iterations: int, form: Format) -> bool:
    """Whether a run has no iteration left to run; says so."""
    from trimtab.runtime.run.folder import read_run

    saved = read_run(folder).saved
    if saved < iterations:
        return False
    sentence = f"all {iterations} iterations are done already"
    data = {"state": "done", "reason": sentence, "folder": str(folder), "saved": saved, "asked": iterations}
    answer(data, form, lambda: out.print(f"{sentence}: --iterations N goes on to more of them", markup=False))
    return True


def _measures(job: Job, resume: Path | None) -> bool:
    """Whether costs will be measured before there is a plan to speak of."""
    if not job.run_job.unmeasured:
        return False
    from trimtab.runtime.run.folder import read_run

    return resume is None or not read_run(resume).planned


def _asked_words(job: Job) -> str:
    run, cluster = job.run_job, job.run_job.job.cluster
    nodes = len(cluster.nodes)
    return (
        f"{run.name}: {len(run.parts)} components on {cluster.gpus} GPU{'s' * (cluster.gpus != 1)} of "
        f"{nodes} node{'s' * (nodes != 1)}, {run.iterations} iteration{'s' * (run.iterations != 1)}, "
        f"loop: {run.rules.mode.value}"
    )


def _end_data(end: RunEnd, story: RunNarrator, folder: str, job: Job, again: str) -> dict[str, Any]:
    """What a run came to, as plain data: what `--format json` and `yaml` print."""
    from trimtab.runtime.run.folder import read_saved
    from trimtab.runtime.run.measurements import summary_facts

    facts = summary_facts(end.state, end.reason, end.plan, end.iterations, dict(end.metrics), end.since)
    saved, fault = read_saved(Path(folder))
    return {
        **facts,
        "folder": folder,
        "saved": saved,
        "fault": fault,
        "asked": job.run_job.iterations,
        "happened": {
            "moves": story.counts["moves"],
            "moves rolled back": story.counts["rolled back"],
            "pieces of advice": story.counts["advice"],
            "losses": story.counts["lost"],
        },
        "again": again,
    }


def _say(data: dict[str, Any], form: Format) -> None:
    from trimtab.render.text.run import last_lines

    def text() -> None:
        for line in last_lines(data):
            out.print(line, markup=False)

    answer({key: value for key, value in data.items() if key != "again"}, form, text)
    sys.stdout.flush()


def _leave(end: RunEnd) -> None:
    """End the command with the status of the run's end; whatever ended it is said like any error."""
    if end.state == "failed":
        error: TrimtabError = end.error or UnreachableError(end.reason.sentence)
        raise error
    if end.state == "stopped":
        raise typer.Exit(STOPPED)
