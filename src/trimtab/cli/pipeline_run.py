"""`trimtab partition --run` and `--emulate`: runs the planned schedule and prints the results.

Running is in `runtime.pipeline`, which is imported when needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.output import err, out, picked

if TYPE_CHECKING:
    from trimtab.model.pipeline import PartitionAnswer
    from trimtab.runtime.pipeline.runner import PipelineRun

STAGE_TIMES = ("planned_compute_s", "planned_transfer_s", "compute_s", "starved_s", "blocked_s")


def run_answer(
    planned: PartitionAnswer,
    *,
    emulate: bool,
    dtype: str = "torch.float32",
    factory: str | None = None,
    blocks: str = "",
    model_input: str = "",
    microbatches: int = 24,
    stretch: float | None = None,
    devices: Mapping[str, str] | None = None,
    address: str | None = None,
    threads: int = 1,
    timeout_s: float | None = None,
) -> PipelineRun:
    """Runs a planned schedule. Raises UnreachableError if the output differs from that of the model."""
    from rich.markup import escape

    from trimtab.runtime.pipeline.runner import run_pipeline

    if factory is None and not emulate:
        raise InputError(
            "--factory is missing: the model to run",
            hint="--factory file.py:factory --input 128,2048, or --emulate",
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
            microbatches=microbatches,
            emulate=emulate,
            stretch=stretch,
            devices=devices,
            address=address,
            threads=threads,
            timeout_s=timeout_s,
            progress=progress,
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
            out.print(
                f"{stage.host} computes longer than its emulated time: use a larger --stretch",
                markup=False,
            )
    texts = {
        "equal": "output: bit-identical to the model's",
        "close": f"output: equal to the model's within its precision (largest difference {run.largest_difference:.3g})",
        "different": f"output: differs from the model's (largest difference {run.largest_difference:.3g})",
        "not compared": "output: no model was run",
    }
    out.print(texts[run.output], markup=False)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
