"""`trimtab plan` and `trimtab demo plan`: reads a job, plans it, shows it, writes it back."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trimtab.cli.options import (
    EngineOption,
    ExecuteOption,
    FormatOption,
    GpuOption,
    LaunchOption,
    MaxTokensOption,
    MeanTokensOption,
    ModelOption,
    NoiseOption,
    OutputOption,
    OverridesArgument,
    PlanAddressOption,
    ProfileOption,
    ReportOption,
    SamplesOption,
    TraceOption,
    TrainOption,
    called,
    choose_launch,
    read_profile,
    save,
)
from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats.files import write_text
from trimtab.render.output import Format, answer, err, out, share

if TYPE_CHECKING:
    from trimtab.formats.estimated_costs import EstimatedJob
    from trimtab.formats.loaded import LoadedJob, PlanSettings
    from trimtab.formats.modes import ModePlan, Reading
    from trimtab.formats.run_settings import Settings
    from trimtab.model.plan import PlacementAnswer, Plan

log = logging.getLogger("trimtab.plan")

EXAMPLE = "grpo.yaml"


def plan(
    file: Annotated[
        Path | None,
        Argument(metavar="[FILE]", help="Job file, or a config or launch script of verl, NeMo RL, OpenRLHF, ..."),
    ] = None,
    overrides: OverridesArgument = None,
    profile: ProfileOption = None,
    from_run: Annotated[
        Path | None, Option(metavar="DIR", help="Costs measured by the run in this folder; without FILE also its job.")
    ] = None,
    model: ModelOption = None,
    gpu: GpuOption = None,
    samples: SamplesOption = None,
    mean_tokens: MeanTokensOption = None,
    max_tokens: MaxTokensOption = None,
    rollout: EngineOption = "",
    train: TrainOption = "",
    launch: LaunchOption = None,
    execute: ExecuteOption = False,
    join: Annotated[
        str | None, Option(metavar="N[xGPUS][:KIND]", help="N nodes join, like the others or of GPUS GPUs of KIND.")
    ] = None,
    leave: Annotated[str | None, Option(metavar="N|NODE", help="The last N nodes leave, or the named node.")] = None,
    address: PlanAddressOption = None,
    form: FormatOption = Format.text,
    as_overrides: Annotated[
        bool, Option("--overrides", help="Print only the placement, as overrides of the framework.")
    ] = False,
    apply: Annotated[bool, Option("--apply", help="Write the placement into FILE (keeps a backup).")] = False,
    output: OutputOption = None,
    report: ReportOption = None,
    svg: Annotated[Path | None, Option(metavar="FILE", help="Write the timeline of the plan as SVG.")] = None,
    trace: TraceOption = None,
    noise: NoiseOption = "5%",
    sensitivity: Annotated[bool, Option(help="Show how far each cost may be off before the choice changes.")] = True,
) -> None:
    """Find the best placement of every component under the job's measured costs, with proof and reasons.

    With --gpu, and --model where FILE names no model of the table, costs that nothing measured are estimated, as
    `trimtab estimate` does; the answer says whether the choice holds over their interval.

    A job file in trimtab's own form:

        cluster: {nodes: 2, gpus_per_node: 8}
        workflow:
          batches: 512
          components:
            rollout: {seconds: {16: 59.9}}
            trainer: {seconds: {16: 95.7}, after: [rollout], granularity: 128}

    Examples:

        trimtab plan job.yaml
        trimtab plan job.yaml cluster.nodes=4 --report plan.html
        trimtab plan verl_config.yaml --profile profile.yaml --overrides
        trimtab plan --from-run runs/grpo-1 cluster.nodes=4
        trimtab plan verl_config.yaml --gpu h100 --mean-tokens 2000
        trimtab plan run_grpo.sh NNODES=2 trainer.n_gpus_per_node=4 --gpu h100
        trimtab plan --gpu h100 -- sbatch --nodes=4 train.slurm
        trimtab plan job.yaml --join 2x4:L40S

    --join, --leave and --address (the nodes that run there) answer for nodes that come or go: what each component
    should get, and whether to keep the current placement.
    """
    choose_launch(launch, execute)
    if join is not None or leave is not None or address is not None:
        from trimtab.cli.plan_nodes import advise

        for option, other in (("--from-run", from_run), ("--report", report), ("--svg", svg), ("--trace", trace),
                              ("--output", output), ("--apply", apply), ("--overrides", as_overrides), ("--gpu", gpu),
                              ("--model", model)):  # fmt: skip
            if other:
                raise InputError(f"{option} does not go with --join, --leave and --address", where="command line")
        advise(file, overrides or [], join, leave, profile, noise, address, form)
        return
    from trimtab.plan.placement.planner import best_plan, explain

    noise_share = share(noise, "--noise")
    sizes = {"model": model, "gpu": gpu, "samples": samples, "mean_tokens": mean_tokens, "max_tokens": max_tokens}
    given = {key: value for key, value in sizes.items() if value is not None}
    widths: tuple[Mapping[str, float], ...] = ()
    run: Settings | None = None
    if given or rollout or train:
        estimated = _estimated(file, overrides or [], profile, from_run, {**given, "rollout": rollout, "train": train})
        loaded, notes, widths, run = estimated.loaded, estimated.notes, estimated.widths, estimated.settings
    else:
        loaded, notes = _read(file, overrides or [], profile, from_run)
    asked, file = file, loaded.path
    log.debug("read %s as %s", file, loaded.file_format)
    try:
        began = time.perf_counter()
        space, outcome = best_plan(loaded.job, loaded.rules)
        searched = time.perf_counter() - began
        with err.status("comparing plans ...") if err.is_terminal else nullcontext():
            result = explain(
                space,
                outcome,
                current=loaded.current,
                assumptions=loaded.assumptions,
                notes=notes,
                noise=noise_share,
                with_sensitivity=sensitivity,
                estimated=widths,
            )
    except TrimtabError as error:
        # The planner knows keys of trimtab's own form only, not the file.
        if error.where is None or not error.where.startswith(str(file)):
            own = loaded.file_format == "trimtab" and error.where is not None
            error.where = f"{file}: {error.where}" if own else str(file)
        raise
    settings = _settings(loaded, result)
    modes: tuple[ModePlan, ...] = ()
    if asked is not None and not as_overrides and from_run is None:
        sizes = {**given, "rollout": rollout, "train": train} if run is not None else {}
        modes = _modes(asked, (loaded, run), result.best, overrides or [], profile, sizes)
    _write_pictures(result, settings, loaded, report, svg, trace, searched)
    if output is not None:
        _write_to(output, loaded, settings)
    if apply:
        _apply(loaded, settings)
    _show(result, settings, loaded, None if as_overrides else form, searched, noise_share, modes)


def _modes(
    path: Path, present: Reading, plan: Plan, overrides: list[str], profile: Path | None, given: dict[str, Any]
) -> tuple[ModePlan, ...]:
    """The framework's modes side by side; `path` is the config or the script that starts it."""
    from trimtab.formats.modes import plan_modes

    if not present[0].modes or not path.is_file():
        return ()

    def read(more: Sequence[str]) -> Reading:
        words = [*overrides, *more]
        if given:
            other = _estimated(path, words, profile, None, given)
            return other.loaded, other.settings
        return _read(path, words, profile, None)[0], None

    return plan_modes(present, plan, read, read_profile(profile))


def _estimated(
    file: Path | None, overrides: list[str], profile: Path | None, from_run: Path | None, given: dict[str, Any]
) -> EstimatedJob:
    """The job with estimates where nothing is measured."""
    from trimtab.formats.estimated_costs import load_estimated
    from trimtab.plan.estimate.constants import CONSTANTS

    if file is None or from_run is not None:
        raise InputError("--model and --gpu go with FILE", where="command line", hint="trimtab plan FILE --gpu h100")
    return load_estimated(file, overrides, read_profile(profile), given, CONSTANTS)


def _read(
    file: Path | None, overrides: list[str], profile: Path | None, from_run: Path | None
) -> tuple[LoadedJob, tuple[str, ...]]:
    """The job to plan, and notes on its costs if a run measured them."""
    if from_run is None:
        from trimtab.formats.load import load

        if file is None:
            raise InputError("FILE is missing: the job to plan", where="command line", hint="trimtab plan FILE")
        return load(file, overrides, read_profile(profile)), ()
    if profile is not None:
        raise InputError("--profile and --from-run exclude each other", where="command line")
    from trimtab.runtime.run.past_costs import load_from_run

    if file is not None and "=" in str(file) and not file.exists():  # FILE is an override, and the job is the run's
        file, overrides = None, [str(file), *overrides]
    return load_from_run(from_run, file, overrides)


def _settings(loaded: LoadedJob, result: PlacementAnswer) -> PlanSettings:
    """The plan in the file's keys; empty if the file's placement is better."""
    from trimtab.formats.loaded import PlanSettings

    if not result.kept:
        return loaded.settings(result.best)
    framework = loaded.rules.framework if loaded.rules else "it"
    text = f"# keep the placement in {loaded.path.name}: it is faster than every plan that can be written for"
    return PlanSettings({}, f"{text} {framework}\n")


def _other_settings(loaded: LoadedJob, result: PlacementAnswer) -> PlanSettings | None:
    """The plan for imperfect scaling in the file's keys, if there is one and the keys can express it."""
    if result.scaling is None or result.scaling.plan is None:
        return None
    try:
        return loaded.settings(result.scaling.plan)
    except InputError:  # it is the placement in the file
        return None


def _show(
    result: PlacementAnswer,
    settings: PlanSettings,
    loaded: LoadedJob,
    form: Format | None,
    searched: float,
    noise: float,
    modes: Sequence[ModePlan],
) -> None:
    if form is None:
        from trimtab.formats.write_back import shell_words

        sys.stdout.write("".join(f"{word}\n" for word in shell_words(settings)))
        if result.kept:
            err.print(settings.block.strip("# \n"), markup=False)
        if result.scaling is not None and result.scaling.plan is not None:
            err.print(f"assumed: {result.assumptions[0]}", markup=False)
        return
    from trimtab.render.text.plan import as_data, print_text

    other = _other_settings(loaded, result)
    data = as_data(result, settings, loaded.file_format, searched, other, modes)
    answer(data, form, lambda: print_text(result, settings, searched, noise, other, modes))


def _write_pictures(
    result: PlacementAnswer,
    settings: PlanSettings,
    loaded: LoadedJob,
    report: Path | None,
    svg: Path | None,
    trace: Path | None,
    searched: float,
) -> None:
    if report is not None:
        from trimtab.render.html.plan_report import plan_report

        page = plan_report(
            result,
            title=loaded.path.stem,
            source=loaded.path.name,
            block=settings.block,
            command=called(),
            search_seconds=searched,
        )
        save(report, page)
    if svg is not None:
        from trimtab.render.html.kit.timeline import plan_chart
        from trimtab.render.html.kit.timeline import svg as draw

        save(svg, draw(plan_chart(result.best, loaded.path.stem)), "timeline")
    if trace is not None:
        from trimtab.render.chrome_trace import plan_trace

        save(trace, plan_trace(result.best, loaded.path.stem), "trace")


def _write_to(output: Path, loaded: LoadedJob, settings: PlanSettings) -> None:
    from trimtab.formats import yaml_text
    from trimtab.formats.write_back import edited, uneditable_keys

    if loaded.script is not None:
        write_text(output, loaded.script.rewritten(settings))
        err.print(f"{loaded.script.path} with the new placement written to {output}")
        return
    stuck = uneditable_keys(settings, loaded.literal, loaded.states)
    if stuck:
        raise InputError(
            f"not written: {', '.join(stuck)} is not set in the file itself",
            where=str(loaded.path),
            hint="pass the overrides to the run instead (--overrides)",
        )
    write_text(output, edited(yaml_text.read_text(loaded.path), settings.values, str(loaded.path)))
    err.print(f"{loaded.path} with the new placement written to {output}")


def _apply(loaded: LoadedJob, settings: PlanSettings) -> None:
    from trimtab.formats.write_back import apply, apply_to_script, shell_words, uneditable_keys

    path = loaded.path if loaded.script is None else loaded.script.path
    stuck = uneditable_keys(settings, loaded.literal, loaded.states) if loaded.script is None else ()
    why = f"{path} is not changed: {', '.join(stuck)} is not set in the file itself." if stuck else ""
    try:
        if loaded.script is not None:
            backup = apply_to_script(loaded.script, settings)
        elif not stuck:
            backup = apply(path, settings, loaded.literal, loaded.states)
    except InputError as error:
        if loaded.script is None:
            raise
        why = error.what
    if why:
        err.print(why, markup=False)
        err.print("Pass these overrides to the run instead:")
        for word in shell_words(settings):
            err.print(f"  {word}", markup=False)
    else:
        err.print(f"{path} has this placement already" if backup is None else f"{path} changed; backup: {backup}")


def demo(folder: Annotated[Path, Option(help="Folder for the report.")] = Path("out")) -> None:
    """Plan the bundled example and write its report."""
    source = resources.files("trimtab") / "examples" / EXAMPLE
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / EXAMPLE
    job.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    report = folder / "plan.html"
    plan(job, report=report, svg=folder / "plan.svg")
    out.print("\n[bold]Results[/]")
    out.print(f"  {report}   the plan as a timeline, beside rejected plans: open it in a browser")
    out.print(f"  {job}   the job file: change a cost and plan again with")
    # The program as it was called: make runs it from a virtual environment that is not on PATH.
    program = sys.argv[0] if Path(sys.argv[0]).name == "trimtab" else "trimtab"
    out.print(f"  {program} plan {job}")
