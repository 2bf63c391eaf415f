"""`trimtab profile`: measured costs from logs, merged profiles, memory estimates, and the blocks of a PyTorch model.

This module parses options and prints tables; measuring, estimating and merging is in `formats` and `profile`, imported
when a command runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import ForceOption, FormatOption, FrameworkOption, OutputOption, WarmupOption
from trimtab.core.errors import InputError
from trimtab.render.output import Format, answer, err, out, print_lines, text_table, warn

if TYPE_CHECKING:
    from trimtab.formats.pipeline.layer_files import MergedFiles
    from trimtab.model.architecture import Architecture
    from trimtab.model.workflow import ComponentProfile, Profile
    from trimtab.plan.estimate.memory import MemoryNeed


app = typer.Typer(help="Costs: times from logs, memory from a model's configuration.", no_args_is_help=True)


@app.command()
def logs(
    files: Annotated[list[Path], Argument(help="Logs of a run, in order, or folders of TensorBoard or W&B.")],
    gpus: Annotated[
        list[str] | None, Option(help="GPUs of all components (16) or of a component (rollout=8); repeatable.")
    ] = None,
    config: Annotated[Path | None, Option(help="Configuration of the run (YAML), for its GPU counts.")] = None,
    framework: FrameworkOption = None,
    warmup: WarmupOption = 2,
    gpu: Annotated[str, Option("--gpu", help="GPU kind of the run, e.g. H100.")] = "",
    lengths: Annotated[
        list[Path] | None,
        Option(help="Dumped answers (JSON lines, or a folder of them), for the distribution of lengths."),
    ] = None,
    group_size: Annotated[
        int | None, Option(help="Answers per prompt in the dump.  [default: grouped by prompt]")
    ] = None,
    output: OutputOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Read the time of each component from a training log: of verl, RLinf, NeMo RL, OpenRLHF, slime, SkyRL, AReaL,
    prime-rl, ROLL or TRL; text, JSON lines, TensorBoard, W&B.

    Warm-up steps, validation and checkpoints are skipped; waiting times are marked and do not count as costs. The notes
    say where a step's seconds go, and the share that no timer books.

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
        kind=gpu,
        lengths=lengths or (),
        group_size=group_size,
    )
    _answer_profile(profile, output, form)


@app.command()
def merge(
    files: Annotated[list[Path], Argument(help="Profiles of runs on different GPU counts.")],
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
    model: Annotated[Path, Option(help="Hugging Face config.json, or its folder.")],
    gpus: Annotated[int, Option(help="GPUs of the component.")] = 8,
    tp: Annotated[int, Option(help="Tensor-parallel size of trainer and inference.")] = 1,
    pp: Annotated[int, Option(help="Pipeline-parallel size of trainer and inference.")] = 1,
    ep: Annotated[int, Option(help="Expert-parallel size.")] = 1,
    zero: Annotated[int, Option(help="ZeRO stage: 0 none, 1 optimiser, 2 and gradients, 3 (FSDP) and weights.")] = 3,
    optimizer: Annotated[str, Option(help="Optimiser: adam, adam8bit, adafactor, muon, sgd, sgd-momentum.")] = "adam",
    precision: Annotated[str, Option(help="Precision of the weights in training.")] = "bf16",
    gradients: Annotated[str, Option(help="Precision of the gradients.")] = "fp32",
    master_weights: Annotated[
        bool, Option("--master-weights/--no-master-weights", help="Whether the optimiser keeps fp32 weights.")
    ] = True,
    checkpointing: Annotated[
        bool, Option("--checkpointing/--no-checkpointing", help="Whether activations are recomputed.")
    ] = True,
    micro_batch: Annotated[int, Option(help="Sequences in a micro-batch per GPU.")] = 1,
    sequence_length: Annotated[int, Option(help="Tokens of prompt and answer.")] = 4096,
    offload: Annotated[str, Option(help="What is offloaded while other components run: none, optimizer, all.")] = "all",
    rollout_tp: Annotated[int, Option(help="Tensor-parallel size of a rollout engine.")] = 1,
    rollout_precision: Annotated[str, Option(help="Precision of the weights in the engine.")] = ("bf16"),
    kv_precision: Annotated[str, Option(help="Precision of the KV cache.")] = "bf16",
    kv_share: Annotated[float, Option(help="Share of the GPU for the engine (gpu_memory_utilization).")] = 0.6,
    gpu_memory_gb: Annotated[float | None, Option(help="Memory of a GPU, for the size of the KV cache.")] = None,
    concurrent: Annotated[int, Option(help="Concurrent answers, if --gpu-memory-gb is not given.")] = 64,
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
    print_lines(f"- {note}" for note in profile.notes)
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
    print_lines(f"- {note}" for note in shape.notes)
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
        print_lines(f"- {note}" for note in need.notes if note not in shape.notes)
        blocks[need.component] = need.block()
    out.print("\nTo paste into a job file's components:\n", markup=False)
    out.print(dump(blocks), markup=False, end="")


@app.command()
def layers(
    factory: Annotated[
        str | None, Argument(metavar="FACTORY", help="Factory of the model: package.module:factory or file.py:factory.")
    ] = None,
    model_input: Annotated[
        str,
        Option(
            "--input",
            help="Input shape without the batch (128,2048), or package.module:make_input (called with the batch size).",
        ),
    ] = "",
    blocks: Annotated[str, Option(help="Path of the sequence of blocks in the model, e.g. model.layers.")] = "",
    device_type: Annotated[
        str | None, Option("--type", help="Device type to save the profile under; without it nothing is saved.")
    ] = None,
    model_name: Annotated[
        str | None, Option("--model-name", "-m", help="Name of the model in the files.  [default: the factory's]")
    ] = None,
    batch_size: Annotated[int, Option("--batch-size", "-b", help="Microbatch size.")] = 8,
    dtype: Annotated[str, Option(help="PyTorch dtype: torch.float32, torch.bfloat16, ...")] = "torch.float32",
    device: Annotated[str, Option(help="Device: cpu, cuda or cuda:1.")] = "cpu",
    repeats: Annotated[int, Option(help="Measured passes; the median counts.")] = 5,
    warmup: Annotated[int, Option(help="Warm-up passes.")] = 2,
    threads: Annotated[int | None, Option(help="CPU threads.  [default: torch's]")] = None,
    bw_mbps: Annotated[float | None, Option(help="Bandwidth of the device type; required for a new type.")] = None,
    mem_mb: Annotated[float | None, Option(help="Memory of the device type.  [default: 90 % of the device's]")] = None,
    models_file: Annotated[Path, Option("--models-file", "-M", help="Models file.")] = Path("models.yml"),
    types_file: Annotated[Path, Option("--dev-types-file", "-T", help="Device types file.")] = Path("device_types.yml"),
    force: ForceOption = False,
    from_json: Annotated[Path | None, Option(help="Save a profile measured elsewhere, without measuring.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Measure seconds, memory and transferred elements of each block of a PyTorch model.

    With --type the figures are saved to models.yml and device_types.yml, for `trimtab pipeline`.

    Examples:

        trimtab profile layers my_models.py:decoder --input 128,2048 --type A100 --device cuda --bw-mbps 100000
        trimtab profile layers --from-json h200.json --type H200 --bw-mbps 200000
    """
    from trimtab.formats.pipeline import layer_files

    if (factory is None) == (from_json is None):
        raise InputError(
            "pass a model to measure, or --from-json" + (", not both" if factory else ""),
            hint="trimtab profile layers file.py:factory --input 128,2048, or --from-json FILE",
        )
    data: dict[str, Any]
    if from_json is not None:
        data = layer_files.read_json(from_json)
    else:
        data = _measure(
            factory or "",
            model_name=model_name or "",
            blocks=blocks,
            model_input=model_input,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            warmup=warmup,
            repeats=repeats,
            threads=threads,
        )
    if model_name:
        data["model"] = model_name
    merged = None
    if device_type is not None:
        merged = layer_files.merge(
            data,
            device_type=device_type,
            model_name=model_name,
            models_file=models_file,
            types_file=types_file,
            bw_mbps=bw_mbps,
            mem_mb=mem_mb,
            force=force,
        )
    answer(_layers_data(data, merged), form, lambda: _layers_text(data, merged))
    for note in merged.notes if merged else ():
        warn(note)


def _measure(factory: str, **settings: Any) -> dict[str, Any]:
    from rich.markup import escape

    from trimtab.profile.layers import profile_layers

    with err.status("measuring") as status:
        profile = profile_layers(
            factory, progress=lambda sentence: status.update(f"measuring: {escape(sentence)}"), **settings
        )
    return profile.as_data()


def _layers_data(data: Mapping[str, Any], merged: MergedFiles | None) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if merged is not None:
        written = {
            "written": {
                "type": merged.device_type,
                "models_file": str(merged.models_file),
                "types_file": str(merged.types_file),
                "changed": merged.changed,
                "notes": list(merged.notes),
            }
        }
    return {**data, **written}


def _layers_text(data: Mapping[str, Any], merged: MergedFiles | None) -> None:
    from rich.table import Table

    where = data.get("device_name") or data.get("device") or "an unknown device"
    table = Table(
        title=f"{data['model']} on {where}: {data['dtype']}, batch {data['batch_size']}",
        title_justify="left",
        show_footer=True,
    )
    names = data.get("names") or [""] * len(data["time_s"])
    slowest = data.get("slowest_s") or data["time_s"]
    memory = data["mem_MB"]
    table.add_column("layer", justify="right", footer="")
    table.add_column("block", footer="sum", no_wrap=True)
    table.add_column("ms", justify="right", footer=f"{1000 * sum(data['time_s']):.3f}")
    table.add_column("slowest ms", justify="right", footer="")
    table.add_column("MB", justify="right", footer=f"{sum(memory):.1f}")
    table.add_column("elements out", justify="right", footer="")
    for index, seconds in enumerate(data["time_s"]):
        table.add_row(
            str(index + 1),
            str(names[index]).replace("[", "\\["),
            f"{1000 * seconds:.3f}",
            f"{1000 * slowest[index]:.3f}",
            f"{memory[index]:.1f}",
            f"{data['parameters_out'][index]:,}",
        )
    out.print(table)
    out.print(f"model input: {data['parameters_in']:,} elements per batch item", markup=False)
    print_lines(f"- {note}" for note in data.get("notes") or ())
    if merged is not None:
        how = "written to" if merged.changed else "already in"
        out.print(f"{how} {merged.models_file} and {merged.types_file} as {merged.device_type}", markup=False)
