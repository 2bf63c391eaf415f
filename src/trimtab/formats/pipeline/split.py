"""Formats a schedule as an uneven pipeline split for serving engines and trainers.

These count whole decoder blocks and give stage n to pipeline rank n; they do not take hosts. So the schedule must be
cut between blocks, and the hosts are listed beside the split in rank order.
"""

from __future__ import annotations

import enum
from itertools import groupby

from trimtab.core.errors import InfeasibleError
from trimtab.model.pipeline import Schedule


class SplitTarget(str, enum.Enum):
    """Software that runs the stages."""

    vllm = "vllm"
    sglang = "sglang"
    megatron = "megatron"


def split_lines(schedule: Schedule, engine: SplitTarget, layers_per_block: int = 1) -> str:
    """Shell text: the split as an environment variable or flags, and the hosts in rank order as a comment."""
    sizes = [(stage.last - stage.first + 1) // layers_per_block for stage in schedule.stages]
    if not sizes:
        raise InfeasibleError("there are no layers to split")
    listed = ",".join(map(str, sizes))
    hosts = " ".join(stage.host for stage in schedule.stages)
    count = len(sizes)
    if engine is SplitTarget.vllm:
        lines = [f'export VLLM_PP_LAYER_PARTITION="{listed}"', f"# vllm serve ... --pipeline-parallel-size {count}"]
    elif engine is SplitTarget.sglang:
        lines = [
            f'export SGLANG_PP_LAYER_PARTITION="{listed}"',
            f"# python -m sglang.launch_server ... --pp-size {count}",
        ]
    else:
        lines = [
            f"--num-layers {sum(sizes)} --pipeline-model-parallel-size {count} "
            f'--pipeline-model-parallel-layout "{layout(sizes)}"'
        ]
        inner = sizes[1:-1]
        if inner and len(set(inner)) == 1 and len(set(sizes)) > 1:
            lines.append(
                f"# the same without a layout: --decoder-first-pipeline-num-layers {sizes[0]} "
                f"--decoder-last-pipeline-num-layers {sizes[-1]}"
            )
    return "\n".join([*lines, f"# pipeline ranks 0 to {count - 1} on: {hosts}"]) + "\n"


def layout(sizes: list[int]) -> str:
    """Megatron's layout: embedding with the first stage, loss with the last, equal neighbours folded."""
    if len(sizes) == 1:
        return f"E{_layers(sizes[0])}L"
    parts = [f"E{_layers(sizes[0])}|"]
    for size, run in groupby(sizes[1:-1]):
        count = len(list(run))
        parts.append(f"{_layers(size)}|" if count == 1 else f"({_layers(size)}|)*{count}")
    return "".join(parts) + f"{_layers(sizes[-1])}L"


def _layers(count: int) -> str:
    return "t" * count if count <= 2 else f"t*{count}"
