"""`trimtab profile layers`: measures a PyTorch model block by block, for the partition planner.

This module parses options and prints tables. Measuring is in `profile.layers`, merging with the files in
`formats.pipeline.layer_files`; both are imported when the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import FormatOption
from trimtab.core.errors import InputError
from trimtab.render.output import Format, answer, err, out, warn

if TYPE_CHECKING:
    from trimtab.formats.pipeline.layer_files import MergedFiles


def layers(
    factory: Annotated[
        str | None,
        typer.Argument(metavar="FACTORY", help="Factory of the model: package.module:factory or file.py:factory."),
    ] = None,
    model_input: Annotated[
        str,
        typer.Option(
            "--input",
            help="Input shape without the batch (128,2048), or package.module:make_input (called with the batch size).",
        ),
    ] = "",
    blocks: Annotated[
        str, typer.Option("--blocks", help="Path of the sequence of blocks in the model, e.g. model.layers.")
    ] = "",
    device_type: Annotated[
        str | None,
        typer.Option("--type", help="Device type to save the profile under; without it nothing is saved."),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option("--model-name", "-m", help="Name of the model in the files.  [default: the factory's]"),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Microbatch size.")] = 8,
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="torch.float32, torch.bfloat16, ...")] = "torch.float32",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:1.")] = "cpu",
    repeats: Annotated[int, typer.Option("--repeats", help="Measured passes; the median counts.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Warm-up passes.")] = 2,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.  [default: torch's]")] = None,
    bw_mbps: Annotated[
        float | None, typer.Option("--bw-mbps", help="Bandwidth of the device type; required for a new type.")
    ] = None,
    mem_mb: Annotated[
        float | None, typer.Option("--mem-mb", help="Memory of the device type.  [default: 90 % of the device's]")
    ] = None,
    models_file: Annotated[Path, typer.Option("--models-file", "-M", help="Models file.")] = Path("models.yml"),
    types_file: Annotated[Path, typer.Option("--dev-types-file", "-T", help="Device types file.")] = Path(
        "device_types.yml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace contradicting entries.")] = False,
    from_json: Annotated[
        Path | None, typer.Option("--from-json", help="Save a profile measured elsewhere, without measuring.")
    ] = None,
    form: FormatOption = Format.text,
) -> None:
    """Measure seconds, memory and transferred elements of each block of a PyTorch model.

    With --type the figures are saved to models.yml and device_types.yml, for `trimtab partition`.

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
    answer(_data(data, merged), form, lambda: _text(data, merged))
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


def _data(data: Mapping[str, Any], merged: MergedFiles | None) -> dict[str, Any]:
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


def _text(data: Mapping[str, Any], merged: MergedFiles | None) -> None:
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
    for note in data.get("notes") or ():
        out.print(f"- {note}", markup=False)
    if merged is not None:
        how = "written to" if merged.changed else "already in"
        out.print(f"{how} {merged.models_file} and {merged.types_file} as {merged.device_type}", markup=False)
