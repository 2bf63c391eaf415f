"""`trimtab pipeline` and `sched-pipeline`: which layers go on which device.

Both read the same files and use the same planner. `sched-pipeline` has the flags, defaults and standard output of the
public tool of that name, except that errors never exit with 0: an infeasible problem prints `[]` and exits with 3.

`--run` and `--emulate` run the planned schedule; running is in `runtime.pipeline`, which is imported when needed.
"""

from __future__ import annotations

import argparse
import enum
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Option

from trimtab.cli.options import FormatOption, ReportOption, RunAddressOption, called, save
from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
from trimtab.formats.pipeline.pipeedge import SplitTarget
from trimtab.render.output import Format, answer, err, out, picked, share, warn

if TYPE_CHECKING:
    from trimtab.formats.pipeline.pipeedge import PartitionRequest
    from trimtab.model.pipeline import PartitionAnswer
    from trimtab.runtime.pipeline.runner import PipelineRun
    from trimtab.runtime.rayapi.nodes import RayNode


MODEL = "google/vit-base-patch16-224"
MODELS, TYPES, DEVICES = Path("models.yml"), Path("device_types.yml"), Path("devices.yml")


class Goal(str, enum.Enum):
    """The objective: time between microbatches, or latency of a microbatch."""

    throughput = "throughput"
    latency = "latency"


def pipeline(
    dtype: Annotated[str, Option(help="PyTorch dtype of the profile.")] = "torch.float32",
    batch_size: Annotated[int, Option("--batch-size", "-b", help="Microbatch size.")] = 8,
    buffers_in: Annotated[int, Option(help="Input buffers of a stage, in microbatches.")] = 2,
    buffers_out: Annotated[int, Option(help="Output buffers of a stage, in microbatches.")] = 2,
    model_name: Annotated[str, Option("--model-name", "-m", help="Model name in the models file.")] = MODEL,
    models_file: Annotated[Path, Option("--models-file", "-M", help="Layers, memory and sizes.")] = MODELS,
    dev_types_file: Annotated[
        Path, Option("--dev-types-file", "-T", help="Bandwidth, memory and profiles of device types.")
    ] = TYPES,
    dev_file: Annotated[Path, Option("--dev-file", "-D", help="Hosts by device type.")] = DEVICES,
    form: FormatOption = Format.text,
    objective: Annotated[
        Goal, Option(help="Minimise the time between microbatches, or the latency of a microbatch.")
    ] = Goal.throughput,
    headroom: Annotated[str, Option(help="Share of every device's memory to keep free.")] = "0%",
    links: Annotated[
        Path | None, Option(help="Bandwidth and latency between hosts; overrides the device types.")
    ] = None,
    source: Annotated[str | None, Option(help="Source host of the data; its transfer counts.")] = None,
    sink: Annotated[str | None, Option(help="Destination host of the results; its transfer counts.")] = None,
    max_devices: Annotated[int | None, Option(help="Maximum number of devices.")] = None,
    cut_every: Annotated[
        int, Option(help="Cut only after multiples of this number of layers (the layers of a decoder block).")
    ] = 1,
    frontier: Annotated[
        bool, Option("--frontier", help="Also show the best bottleneck for 1, 2, ... devices.")
    ] = False,
    emit: Annotated[SplitTarget | None, Option(help="Print only the split, in this engine's form.")] = None,
    report: ReportOption = None,
    devices_from_ray: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Print a devices file of a running Ray cluster (auto: the local cluster)."),
    ] = None,
    run: Annotated[bool, Option("--run", help="Run the schedule with the model, as Ray actors.")] = False,
    emulate: Annotated[
        bool, Option("--emulate", help="Run the schedule with emulated stages, on any machine.")
    ] = False,
    factory: Annotated[
        str | None, Option(help="Factory of the model to run: package.module:factory or file.py:factory.")
    ] = None,
    blocks: Annotated[str, Option(help="Path of the sequence of blocks in the model.")] = "",
    model_input: Annotated[str, Option("--input", help="Input factory, or a shape: 128,2048.")] = "",
    microbatches: Annotated[int, Option(min=1, help="Microbatches to run.")] = 24,
    stretch: Annotated[float | None, Option(help="Factor for emulated times.")] = None,
    threads: Annotated[int, Option(min=1, help="Threads per stage.")] = 1,
    address: RunAddressOption = None,
    timeout: Annotated[float | None, Option(help="Timeout of a run in seconds.")] = None,
) -> None:
    """Assign layers to heterogeneous devices: the pipeline with the best throughput, proven optimal.

    Layers, device types with measured times, and hosts come from three YAML files. Only the forward pass is modelled:
    gradients, optimiser state and training activations are not counted.

    Examples:

        trimtab pipeline -M models.yml -T device_types.yml -D devices.yml --report pipeline.html
        trimtab pipeline --objective latency --headroom 10% --format json
        trimtab pipeline --frontier --max-devices 6
        trimtab pipeline --emit vllm --cut-every 4
        trimtab pipeline --emulate
    """
    if devices_from_ray is not None:
        from trimtab.formats.pipeline.pipeedge import devices_yaml

        sys.stdout.write(devices_yaml(_ray_devices(devices_from_ray)))
        return
    from trimtab.formats.pipeline.pipeedge import PartitionRequest

    request = PartitionRequest(
        model_name,
        dtype,
        batch_size,
        buffers_in,
        buffers_out,
        share(headroom, "--headroom"),
        source,
        sink,
        max_devices,
        cut_every,
    )
    found, searched = _plan((models_file, dev_types_file, dev_file), request, links, objective, frontier)
    if report is not None:
        from trimtab.render.html.partition_report import partition_report

        save(report, partition_report(found, command=called(), search_seconds=searched))
    if emit is not None:
        from trimtab.formats.pipeline.pipeedge import split_lines

        if cut_every == 1:
            warn("the split counts profiled layers; if a decoder block has several, pass --cut-every")
        sys.stdout.write(split_lines(found.schedule, emit, cut_every))
        return
    from trimtab.render.text.partition import as_data, print_text

    if not (run or emulate):
        answer(as_data(found, searched), form, lambda: print_text(found, searched))
        return
    done = run_answer(
        found,
        emulate=emulate,
        dtype=dtype,
        factory=factory,
        blocks=blocks,
        model_input=model_input,
        microbatches=microbatches,
        stretch=stretch,
        threads=threads,
        address=address,
        timeout_s=timeout,
    )

    def text() -> None:
        print_text(found, searched)
        out.print()
        run_text(done)

    answer({**as_data(found, searched), "run": run_data(done)}, form, text)


def _plan(
    files: tuple[Path, Path, Path], request: PartitionRequest, links: Path | None, objective: Goal, frontier: bool
) -> tuple[PartitionAnswer, float]:
    """Loads, plans, and prints the warnings of loading."""
    from trimtab.formats.pipeline.pipeedge import load
    from trimtab.plan.partition.planner import plan_partition

    loaded = load(*files, request, links)
    for sentence in loaded.warnings:
        warn(escape(sentence))
    began = time.perf_counter()
    with err.status("searching ...") if err.is_terminal else nullcontext():
        try:
            found = plan_partition(loaded.job, objective.value, frontier=frontier)
        except TrimtabError as error:
            # The planner does not know the files.
            error.where = error.where or f"{files[1]} and {files[2]}"
            raise
    return replace(found, warnings=loaded.warnings), time.perf_counter() - began


def _ray_devices(address: str) -> dict[str, list[str]]:
    """Hosts of a running Ray cluster by GPU kind; disconnects afterwards."""
    from trimtab.runtime.rayapi.connect import connected
    from trimtab.runtime.rayapi.nodes import live_nodes

    with connected(address=address) as ray:
        return ray_hosts(live_nodes(ray))


def ray_hosts(nodes: Iterable[RayNode]) -> dict[str, list[str]]:
    """Devices of Ray nodes by kind: GPUs of a multi-GPU node are `address/number`, nodes without are CPU devices."""
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        gpus, name = int(node.gpus), node.address
        kind = next(filter(None, (node.kind_label, *node.kinds)), "GPU") if gpus else "CPU"
        hosts = [name] if gpus <= 1 else [f"{name}/{number}" for number in range(gpus)]
        kinds.setdefault(kind, []).extend(hosts)
    return {kind: sorted(kinds[kind]) for kind in sorted(kinds)}


def sched_pipeline(arguments: Sequence[str] | None = None) -> int:
    """The `sched-pipeline` command: flags and output of the public tool. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sched-pipeline",
        description="Schedule the layers of a model on unlike devices for the best throughput; prints a YAML list.",
    )
    add = parser.add_argument
    add("-d", "--dtype", default="torch.float32", help="PyTorch datatype (default: %(default)s)")
    add("-b", "--batch-size", type=int, default=8, help="microbatch size (default: %(default)s)")
    add("-i", "--buffers-in", type=int, default=2, help="inbound data buffers (default: %(default)s)")
    add("-o", "--buffers-out", type=int, default=2, help="outbound data buffers (default: %(default)s)")
    add("-m", "--model-name", default=MODEL, help="model name (default: %(default)s)")
    add("-M", "--models-file", type=Path, default=MODELS, help="models YAML file (default: %(default)s)")
    add("-T", "--dev-types-file", type=Path, default=TYPES, help="device types YAML file (default: %(default)s)")
    add("-D", "--dev-file", type=Path, default=DEVICES, help="devices YAML file (default: %(default)s)")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    from trimtab.formats.pipeline.pipeedge import PartitionRequest, schedule_yaml

    request = PartitionRequest(given.model_name, given.dtype, given.batch_size, given.buffers_in, given.buffers_out)
    files = (given.models_file, given.dev_types_file, given.dev_file)
    try:
        found, _ = _plan(files, request, None, Goal.throughput, False)
    except TrimtabError as error:
        if isinstance(error, InfeasibleError):
            sys.stdout.write("[]\n")
        for line in error.lines():
            err.print(line, markup=False)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(schedule_yaml(found.schedule))
    return 0


STAGE_TIMES = ("planned_compute_s", "planned_transfer_s", "compute_s", "starved_s", "blocked_s")


def run_answer(
    planned: PartitionAnswer,
    *,
    emulate: bool,
    dtype: str = "torch.float32",
    factory: str | None = None,
    blocks: str = "",
    model_input: str = "",
    **options: Any,
) -> PipelineRun:
    """Runs a planned schedule; `options` are those of `run_pipeline`.

    Raises UnreachableError if the output differs from that of the model.
    """
    from rich.markup import escape

    from trimtab.runtime.pipeline.runner import run_pipeline

    if factory is None and not emulate:
        raise InputError(
            "--factory is missing: the model to run", hint="--factory file.py:factory --input 128,2048, or --emulate"
        )
    with err.status("running") as status:

        def progress(sentence: str) -> None:
            status.update(f"running: {escape(sentence)}")

        chain = make_input = None
        if factory is not None:
            from trimtab.profile import block_chain

            progress(f"building {factory}")
            chain = block_chain.load_chain(factory, blocks=blocks, dtype=dtype)
            make_input = block_chain.input_maker(
                model_input, batch_size=planned.job.batch_size, dtype=dtype, device="cpu"
            )
        done = run_pipeline(
            planned.schedule,
            chain,
            make_input,
            batch_size=planned.job.batch_size,
            buffers_in=planned.job.buffers_in,
            buffers_out=planned.job.buffers_out,
            emulate=emulate,
            progress=progress,
            **options,
        )
    if done.output == "different":
        raise UnreachableError(
            f"the output of the pipeline differs from the model's by up to {done.largest_difference:g}",
            hint="models with dropout or other randomness cannot be compared",
        )
    return done


def run_data(run: PipelineRun) -> dict[str, Any]:
    return {
        **picked(run, "emulated", "stretch", "microbatches", "batch_size"),
        "predicted_throughput": _finite(run.predicted_throughput),
        "measured_throughput": _finite(run.measured_throughput),
        "ratio": _finite(run.ratio),
        **picked(run, "predicted_period_s", "measured_period_s", "output", "largest_difference"),
        "stages": [
            {"host": stage.host, "layers": [stage.first, stage.last], **picked(stage, *STAGE_TIMES)}
            for stage in run.stages
        ],
    }


def run_text(run: PipelineRun) -> None:
    from rich.table import Table

    how = "emulated" if run.emulated else "run"
    slower = f", {run.stretch:.3g} times slower" if run.emulated and run.stretch != 1 else ""
    table = Table(title=f"{run.microbatches} microbatches of {run.batch_size}, {how}{slower}", title_justify="left")
    table.add_column("stage")
    table.add_column("layers", justify="right")
    for heading in ("planned compute s", "planned transfer s", "computed s", "starved s", "blocked s"):
        table.add_column(heading, justify="right")
    for stage in run.stages:
        table.add_row(
            stage.host.replace("[", "\\["),
            f"{stage.first}-{stage.last}",
            *(f"{seconds:.4g}" for seconds in picked(stage, *STAGE_TIMES).values()),
        )
    out.print(table)
    out.print(
        f"throughput: {run.measured_throughput:.4g} items/s measured, {run.predicted_throughput:.4g} predicted "
        f"({run.ratio:.1%})",
        markup=False,
    )
    for stage in run.stages:
        if run.emulated and stage.compute_s > run.stretch * stage.planned_compute_s:
            out.print(f"{stage.host} computes longer than its emulated time: use a larger --stretch", markup=False)
    texts = {
        "equal": "output: bit-identical to the model's",
        "close": f"output: equal to the model's within its precision (largest difference {run.largest_difference:.3g})",
        "different": f"output: differs from the model's (largest difference {run.largest_difference:.3g})",
        "not compared": "output: no model was run",
    }
    out.print(texts[run.output], markup=False)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
