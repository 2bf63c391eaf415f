"""`trimtab estimate`: seconds, memory and cost of a run before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import (
    EngineOption,
    ExecuteOption,
    FormatOption,
    GpuOption,
    LaunchOption,
    MaxTokensOption,
    MeanTokensOption,
    ModelOption,
    OverridesArgument,
    ReportOption,
    SamplesOption,
    TrainOption,
    called,
    choose_launch,
    read_profile,
    save,
)
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.model.workflow import Profile


def estimate(
    file: Annotated[Path | None, typer.Argument(help="A framework's config or launch script, or a job file.")] = None,
    overrides: OverridesArgument = None,
    model: ModelOption = None,
    gpu: GpuOption = None,
    rollout_gpu: Annotated[
        str | None, typer.Option("--rollout-gpu", help="GPU kind of rollout, if it differs.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs in all.  [default: the fewest that fit]")] = None,
    rollout_gpus: Annotated[int | None, typer.Option("--rollout-gpus", help="GPUs of rollout alone.")] = None,
    framework: Annotated[
        str | None, typer.Option("--framework", help="Framework: verl, nemo-rl, openrlhf, ...")
    ] = None,
    release: Annotated[str | None, typer.Option("--release", help="Release, as in the public rows.")] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", help="Algorithm: grpo, ppo, dapo, gspo, ...")] = None,
    samples: SamplesOption = None,
    train_batch: Annotated[int | None, typer.Option("--train-batch", help="Answers of an optimiser step.")] = None,
    mean_tokens: MeanTokensOption = None,
    max_tokens: MaxTokensOption = None,
    prompt_tokens: Annotated[float | None, typer.Option("--prompt-tokens", help="Tokens of a prompt.")] = None,
    lengths: Annotated[
        Path | None, typer.Option("--lengths", help="Measured lengths: one a line, tokens,count, or JSONL.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="Mode: sync, async, colocate, separate or colocate-async.")
    ] = None,
    staleness: Annotated[float | None, typer.Option("--staleness", help="Steps that weights may be behind.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Unfinished answers go on with new weights.")] = False,
    rollout: EngineOption = "",
    train: TrainOption = "",
    transport: Annotated[str | None, typer.Option("--transport", help="Weight sync: broadcast, packed, delta.")] = None,
    turns: Annotated[int | None, typer.Option("--turns", help="Turns of an answer.")] = None,
    tool_seconds: Annotated[float | None, typer.Option("--tool-seconds", help="Seconds of tools in a turn.")] = None,
    image_tokens: Annotated[float | None, typer.Option("--image-tokens", help="Tokens of images in a prompt.")] = None,
    judge_seconds: Annotated[
        float | None, typer.Option("--judge-seconds", help="Seconds that a judge on GPUs of its own adds.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option("--judge", help="Model that judges answers on GPUs of its own: MODEL:GPUS:TOKENS.")
    ] = None,
    oversample: Annotated[
        float | None, typer.Option("--oversample", help="Answers decoded for each trained on (dynamic sampling).")
    ] = None,
    switches: Annotated[
        str, typer.Option("--what-if", help="Gain of each: fp8-rollout,spec-decode:0.77,async:1,async+partial,lora,...")
    ] = "",
    measured: Annotated[
        Path | None, typer.Option("--measured", help="A profile, or a run's folder: its seconds scale the model.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps of the run.")] = 100,
    price: Annotated[float | None, typer.Option("--price", help="Price of a GPU-hour.")] = None,
    launch: LaunchOption = None,
    execute: ExecuteOption = False,
    report: ReportOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Estimate seconds, memory and cost of a run from a model, a GPU kind and lengths; nothing is measured.

    Examples:

        trimtab estimate --model qwen3-32b --gpu h100 --gpus 32 --mean-tokens 3206 --max-tokens 4096

        trimtab estimate grpo_config.yaml --gpu h100 --mean-tokens 1060 --steps 300 --price 2.5

        trimtab estimate grpo_config.yaml --gpu h100 --measured profile.yaml

        trimtab estimate --model qwen3-8b --gpu h100 --what-if fp8-rollout,spec-decode:0.77,async:1
    """
    given = {k: v for k, v in locals().items() if v is not None and k not in ("launch", "execute")}
    choose_launch(launch, execute)
    from trimtab.formats import run_settings
    from trimtab.plan.estimate.answer import estimate as compute
    from trimtab.plan.estimate.constants import CONSTANTS
    from trimtab.plan.estimate.what_if import what_if
    from trimtab.render.text import estimate as shown

    if not 1 <= steps <= run_settings.MOST or (price is not None and not 0 <= price <= run_settings.MOST):
        raise InputError("--steps is a count from 1, --price a number from 0")
    inputs: dict[str, Any] = {}
    if file is not None:
        from trimtab.formats.frameworks import run_inputs

        inputs = run_inputs.read(file, overrides or [])
    for key in ("file", "overrides", "measured", "switches", "report"):
        given.pop(key, None)
    settings = run_settings.build(run_settings.merged(inputs, given))
    found = compute(settings.run, CONSTANTS, settings.offload, _profile(measured))
    if measured is not None and not found.measured:
        raise InputError("no component in it is a stage of this run, or has times without waits", where=str(measured))
    larger = [compute(run, CONSTANTS, settings.offload) for run in settings.larger]
    data = shown.as_data(settings, found, steps, price, shown.near_rows(settings), larger)
    asked = [word.strip() for word in switches.split(",") if word.strip()]
    if asked:
        others = [what_if(settings.run, word, CONSTANTS, settings.offload) for word in asked]
        data["what_if"] = shown.what_if_data(others)
    if report is not None:
        from trimtab.render.html.estimate_report import estimate_report

        save(report, estimate_report(data, command=called()))
    answer(data, form, lambda: shown.show(data))
    _refuse_what_does_not_fit(found)


def _profile(path: Path | None) -> Profile | None:
    """Measured costs of a profile, or of the run in a folder."""
    if path is None or not path.is_dir():
        return read_profile(path)
    from trimtab.model.workflow import ANY_KIND, ComponentProfile, Profile
    from trimtab.runtime.run.past_costs import load_from_run

    workflow = load_from_run(path, None, [])[0].job.workflow
    points = {part.name: part.variants[0].seconds for part in workflow.components if part.variants}
    components = (
        ComponentProfile(name, next(iter(kinds.values()), ()), kind=next(iter(kinds), ANY_KIND))
        for name, kinds in points.items()
    )
    return Profile(str(path), tuple(components))


def _refuse_what_does_not_fit(found: Any) -> None:
    """Exit status 3 after the answer, which says where the memory goes."""
    if found.step.slots < 1:
        raise InfeasibleError(
            "the rollout engine has no room for a single answer beside its weights",
            hint="give --rollout a larger tp or memory, or precision=fp8",
        )
    for phase in found.phases:
        if phase.gb > phase.gpu_gb:
            raise InfeasibleError(
                f"{phase.name} needs {phase.gb:.0f} GB of a GPU that has {phase.gpu_gb:g} GB",
                hint="use more GPUs, a larger tp or pp, recompute, offload or lora (--train)",
            )
