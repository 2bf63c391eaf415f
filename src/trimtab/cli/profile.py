"""`trimtab profile`: measured costs from logs, merged profiles, and memory estimates from model configurations.

This module parses options and prints tables; measuring and estimating is in `formats` and `profile`, imported when a
command runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import FormatOption
from trimtab.render.output import Format, answer, out, text_table, warn

if TYPE_CHECKING:
    from trimtab.model.architecture import Architecture
    from trimtab.model.profile import ComponentProfile, Profile
    from trimtab.plan.estimate.memory import MemoryNeed

app = typer.Typer(help="Costs: times from logs, memory from a model's configuration.", no_args_is_help=True)

OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the profile to this file.")]


@app.command()
def logs(
    files: Annotated[list[Path], typer.Argument(help="Logs of a run, in order, or folders of event files.")],
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", help="GPUs of all components (16) or of a component (rollout=8); repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration of the run (YAML), for its GPU counts.")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option("--framework", help="verl, rlinf, nemo_rl or openrlhf.  [default: detected from the log]"),
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps to skip after every start of the run.")] = 2,
    kind: Annotated[str, typer.Option("--kind", help="GPU kind of the run, e.g. H100.")] = "",
    lengths: Annotated[
        list[Path] | None,
        typer.Option(
            "--lengths", help="Dumped answers (JSON lines, or a folder of them), for the distribution of lengths."
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Answers per prompt in the dump.  [default: grouped by prompt]")
    ] = None,
    output: OutputOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Read the time of each component from the logs of verl, RLinf, NeMo RL or OpenRLHF.

    Warm-up steps, validation and checkpoints are skipped; waiting times are marked and do not count as costs.

    Examples:

        trimtab profile logs verl.jsonl --gpus 16 --output profile.yaml

        trimtab profile logs run.log --gpus rollout=8 --gpus trainer=8 --lengths rollouts/
    """
    from trimtab.formats.logs import gpus as logs_gpus
    from trimtab.formats.logs import reader as log_reader

    profile = log_reader.read(
        files,
        facts=logs_gpus.from_options(gpus or ()),
        framework=framework,
        config=config,
        warmup=warmup,
        kind=kind,
        lengths=lengths or (),
        group_size=group_size,
    )
    _answer_profile(profile, output, form)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Profiles of runs on different GPU counts.")],
    output: OutputOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Merge the profiles of runs on different GPU counts.

    Example:

        trimtab profile merge on-8.yaml on-16.yaml --output profile.yaml
    """
    from trimtab.formats import profile_file

    _answer_profile(profile_file.merge(profile_file.read(path) for path in files), output, form)


@app.command()
def memory(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face config.json, or its folder.")],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the component.")] = 8,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size of trainer and inference.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline-parallel size of trainer and inference.")] = 1,
    ep: Annotated[int, typer.Option("--ep", help="Expert-parallel size.")] = 1,
    zero: Annotated[
        int, typer.Option("--zero", help="ZeRO stage: 0 none, 1 optimiser, 2 and gradients, 3 (FSDP) and weights.")
    ] = 3,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="adam, adam8bit, adafactor, muon, sgd, sgd-momentum.")
    ] = "adam",
    precision: Annotated[str, typer.Option("--precision", help="Precision of the weights in training.")] = "bf16",
    gradients: Annotated[str, typer.Option("--gradients", help="Precision of the gradients.")] = "fp32",
    master_weights: Annotated[
        bool, typer.Option("--master-weights/--no-master-weights", help="Whether the optimiser keeps fp32 weights.")
    ] = True,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Whether activations are recomputed.")
    ] = True,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences in a micro-batch per GPU.")] = 1,
    sequence_length: Annotated[int, typer.Option("--sequence-length", help="Tokens of prompt and answer.")] = 4096,
    offload: Annotated[
        str, typer.Option("--offload", help="What is offloaded while other components run: none, optimizer, all.")
    ] = "all",
    rollout_tp: Annotated[int, typer.Option("--rollout-tp", help="Tensor-parallel size of a rollout engine.")] = 1,
    rollout_precision: Annotated[
        str, typer.Option("--rollout-precision", help="Precision of the weights in the engine.")
    ] = ("bf16"),
    kv_precision: Annotated[str, typer.Option("--kv-precision", help="Precision of the KV cache.")] = "bf16",
    kv_share: Annotated[
        float, typer.Option("--kv-share", help="Share of the GPU for the engine (gpu_memory_utilization).")
    ] = 0.6,
    gpu_memory_gb: Annotated[
        float | None, typer.Option("--gpu-memory-gb", help="Memory of a GPU, for the size of the KV cache.")
    ] = None,
    concurrent: Annotated[
        int, typer.Option("--concurrent", help="Concurrent answers, if --gpu-memory-gb is not given.")
    ] = 64,
    form: FormatOption = Format.text,
) -> None:
    """Estimate the memory of trainer, rollout and inference from the model's configuration, term by term.

    Example:

        trimtab profile memory --model Qwen2.5-7B/ --gpus 16 --tp 2 --zero 1 --gpu-memory-gb 80
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "form")}
    from trimtab.formats import catalogue
    from trimtab.plan.estimate import memory as estimates

    shape = catalogue.read_config(model)
    needs = estimates.estimate(shape, estimates.MemorySettings(**given))
    answer(_memory_data(shape, needs), form, lambda: _memory_text(shape, needs))
    if gpu_memory_gb is not None:
        for need in needs:
            if need.active_gb > gpu_memory_gb:
                warn(f"{need.component} needs {need.active_gb:.1f} GB of a GPU with {gpu_memory_gb:g} GB")


def _answer_profile(profile: Profile, output: Path | None, form: Format) -> None:
    from trimtab.formats import profile_file

    if output is not None:
        profile_file.write(profile, output)
    answer(profile_file.as_data(profile), form, lambda: _profile_text(profile, output))


def _profile_text(profile: Profile, output: Path | None) -> None:
    rows = []
    for component in profile.components:
        for position, (gpus, seconds) in enumerate(component.seconds):
            about = (*_details(component), "wait" if component.waits else "") if not position else ("",) * 5
            rows.append((component.name if not position else "", gpus, f"{seconds:.4g}", *about))
    heads = ("component", ">GPUs", ">seconds", ">spread", ">drift", ">s per 1k tok", ">steps", "")
    out.print(text_table(heads, rows, no_wrap=True, title=f"Profile of {profile.source}: seconds of one iteration"))
    for note in profile.notes:
        out.print(f"- {note}", markup=False)
    if output is not None:
        out.print(f"written to {output}", markup=False)


def _details(component: ComponentProfile) -> tuple[str, str, str, str]:
    return (
        "" if component.spread is None else f"±{component.spread:.1%}",
        "" if component.drift is None else f"{component.drift:+.1%}",
        "" if component.seconds_per_1k_tokens is None else f"{component.seconds_per_1k_tokens:.3g}",
        str(component.steps) if component.steps else "",
    )


def _memory_data(shape: Architecture, needs: Iterable[MemoryNeed]) -> dict[str, Any]:
    return {
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "notes": list(shape.notes),
        "components": {
            need.component: {
                **need.block(),
                "active_gb": round(need.active_gb, 3),
                "resident_gb": round(need.resident_gb, 3),
                "host_gb": round(need.host_gb, 3),
                "terms": [{"name": t.name, "formula": t.formula, "gb": round(t.gb, 3)} for t in need.active],
                "notes": [note for note in need.notes if note not in shape.notes],
            }
            for need in needs
        },
    }


def _memory_text(shape: Architecture, needs: Iterable[MemoryNeed]) -> None:
    from rich.table import Column

    from trimtab.formats.yaml_text import dump

    active = "" if shape.active_parameters == shape.parameters else f", {shape.active_parameters:,} used by a token"
    out.print(f"{shape.parameters:,} parameters{active}; GB are 2^30 bytes on one GPU", markup=False)
    for note in shape.notes:
        out.print(f"- {note}", markup=False)
    blocks: dict[str, Mapping[str, Any]] = {}
    for need in needs:
        heads = (
            Column("while it runs", footer="sum"),
            "computed from",
            Column("GB", footer=f"{need.active_gb:.2f}", justify="right"),
        )
        rows = ((term.name, term.formula, f"{term.gb:.2f}") for term in need.active)
        out.print(text_table(heads, rows, title=need.component, show_footer=True))
        kept = ", ".join(f"{term.name} {term.gb:.2f}" for term in need.resident)
        moved = ", ".join(f"{term.name} {term.gb:.2f}" for term in need.host) or "nothing"
        out.print(f"while parked: {need.resident_gb:.2f} GB on the GPU ({kept})", markup=False)
        out.print(f"              {need.host_gb:.2f} GB per GPU in host memory ({moved})", markup=False)
        for note in need.notes:
            if note not in shape.notes:
                out.print(f"- {note}", markup=False)
        blocks[need.component] = need.block()
    out.print("\nTo paste into a job file's components:\n", markup=False)
    out.print(dump(blocks), markup=False, end="")
