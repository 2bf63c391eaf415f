"""`trimtab run`: runs a job by its plan, on Ray or in this process, from the start or from its folder."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import (
    DashboardOption,
    FormatOption,
    OverridesArgument,
    PortOption,
    RunAddressOption,
    TraceOption,
    save,
)
from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.model.run import ReplanMode
from trimtab.render.output import Format, answer, err, out, print_lines

if TYPE_CHECKING:
    from trimtab.model.plan import Plan
    from trimtab.render.text.run import RunNarrator
    from trimtab.running import Job
    from trimtab.runtime.run.run import RunEnd

STOPPED = 130


def run(
    job: Annotated[
        Path | None, Argument(metavar="[FILE]", help="Job file in trimtab's own form, with `use` or `emulate`.")
    ] = None,
    overrides: OverridesArgument = None,
    local: Annotated[bool, Option("--local", help="Run in this process, without Ray.")] = False,
    address: RunAddressOption = None,
    folder: Annotated[
        Path | None,
        Option("--folder", metavar="DIR", help="Folder for events, summary and checkpoints.  [default: runs/NAME-N]"),
    ] = None,
    resume: Annotated[Path | None, Option(metavar="DIR", help="Resume the run in this folder.")] = None,
    iterations: Annotated[int | None, Option(help="Override run.iterations.")] = None,
    seed: Annotated[int | None, Option(help="Override run.seed.")] = None,
    replan: Annotated[ReplanMode | None, Option(help="What re-planning may do: advise, or migrate the run.")] = None,
    plan: Annotated[
        Path | None, Option(metavar="FILE", help="Use this plan (`trimtab plan -f json`) instead of the best.")
    ] = None,
    dashboard: DashboardOption = False,
    port: PortOption = None,
    trace: TraceOption = None,
    form: FormatOption = Format.text,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Run a job: measure missing costs, plan, run, and re-plan when the plan is no longer the best.

    Ctrl-C stops it after the current iteration, with its state saved; twice stops it at once. Exit status: 0 done; 2
    invalid job or call; 3 infeasible; 4 a component or the cluster failed; 130 stopped.

    Examples:

        trimtab run examples/grpo/job.yaml --local
        trimtab run job.yaml cluster.nodes=2 --iterations 200 --replan auto
        trimtab run --resume runs/grpo-1 --iterations 400
    """
    from trimtab.cli.show import beside
    from trimtab.render.live import RunDisplay, signal_callbacks, stdout_to_stderr
    from trimtab.render.text.run import RunNarrator, last_lines

    if local and address:
        raise InputError("--local and --address exclude each other", where="command line")
    request = _job(job, overrides or [], folder, resume, iterations, seed, replan)
    if resume is not None and _is_over(resume, request.run_job.iterations, form):
        return
    chosen = _plan(request, plan) if plan is not None else None
    story = RunNarrator(request.run_job.iterations, measuring=_measures(request, resume))
    where: dict[str, Any] = {"folder": str(resume or folder or "")}

    def on_event(event: str, facts: dict[str, Any]) -> None:
        if event == "starting":
            where.update(facts)
        display.on_event(event, facts)

    def request_replan() -> None:
        with contextlib.suppress(TrimtabError):  # not started yet, or finished
            request.ask("requested by SIGUSR1")
            display.say("re-planning requested")
            story.report_next_decision()

    def say(line: str) -> None:
        """Prints the dashboard's address, also with --quiet."""
        if quiet:
            err.print(line, markup=False)
        else:
            display.say(line)

    if not local:
        from trimtab.runtime.rayapi.private import mute_ray_messages

        mute_ray_messages()
    with RunDisplay(request.name, story, quiet=quiet) as display:
        display.say(_summary(request))
        with stdout_to_stderr(), signal_callbacks(display.interrupted, request_replan):
            end = request.run(
                local=local,
                address=address,
                folder=resume or folder,
                resume=resume is not None,
                plan=chosen,
                on_event=on_event,
                beside=beside(say, port) if dashboard or port is not None else None,
            )
    again = " --local" if local else f" --address {address}" if address else ""
    data = _end_data(end, story, where["folder"], request)
    if trace is not None:
        from trimtab.render.chrome_trace import run_trace
        from trimtab.render.html.run.story import read_story

        save(trace, run_trace(read_story(Path(where["folder"]))), "trace")
    answer(data, form, lambda: print_lines(last_lines({**data, "again": again})))
    sys.stdout.flush()
    if end.state == "failed":
        raise end.error or UnreachableError(end.reason.sentence)
    if end.state == "stopped":
        raise typer.Exit(STOPPED)


def _job(
    job: Path | None,
    overrides: list[str],
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
        raise InputError("FILE is missing", where="command line", hint="trimtab run FILE, or trimtab run --resume DIR")
    return Job.load(job, overrides, iterations=iterations, seed=seed, mode=word)


def _plan(job: Job, file: Path) -> Plan:
    """The plan in the output of `trimtab plan`."""
    from trimtab.formats.yaml_text import read_mapping

    groups: Any = read_mapping(file).get("groups")
    try:
        ranks = {str(name): tuple(map(int, group["gpus"])) for group in groups for name in group["components"]}
    except (TypeError, KeyError, ValueError):
        raise InputError(
            "not a plan", where=str(file), hint="`trimtab plan FILE --format json > plan.json` writes one"
        ) from None
    return job.plan(ranks)


def _is_over(folder: Path, iterations: int, form: Format) -> bool:
    """Whether all iterations of a run are done; prints that."""
    from trimtab.runtime.run.folder import read_run

    saved = read_run(folder).saved
    if saved < iterations:
        return False
    sentence = f"all {iterations} iterations are done already"
    data = {"state": "done", "reason": sentence, "folder": str(folder), "saved": saved, "asked": iterations}
    answer(data, form, lambda: out.print(f"{sentence}: --iterations N runs more", markup=False))
    return True


def _measures(job: Job, resume: Path | None) -> bool:
    if not job.run_job.unmeasured:
        return False
    from trimtab.runtime.run.folder import read_run

    return resume is None or not read_run(resume).planned


def _summary(job: Job) -> str:
    run, cluster = job.run_job, job.run_job.job.cluster
    nodes = len(cluster.nodes)
    return (
        f"{run.name}: {len(run.parts)} components on {cluster.gpus} GPU{'s' * (cluster.gpus != 1)} of "
        f"{nodes} node{'s' * (nodes != 1)}, {run.iterations} iteration{'s' * (run.iterations != 1)}, "
        f"loop: {run.rules.mode.value}"
    )


def _end_data(end: RunEnd, story: RunNarrator, folder: str, job: Job) -> dict[str, Any]:
    """The result of a run as plain data, for `--format json` and `yaml`."""
    from trimtab.runtime.run.folder import read_saved
    from trimtab.runtime.run.measurements import summary_facts

    off = end.expected_errors
    facts = summary_facts(end.state, end.reason, end.plan, end.iterations, dict(end.metrics), end.since, off)
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
    }
