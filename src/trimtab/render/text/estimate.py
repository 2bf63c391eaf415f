"""An estimate as data and as text: seconds with their interval, memory by phase, cost, and the public rows near it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.formats.run_settings import Settings
from trimtab.plan.estimate.answer import Estimate, Interval
from trimtab.plan.estimate.step import RunInputs
from trimtab.plan.estimate.what_if import WhatIf
from trimtab.render.output import out, print_list, text_table

NEAR = 3
SHOWN = 2
"""Public rows of a switch in text; all are in the data."""
UNVALIDATED = "memory of sharded full training was compared with one trainer's peaks only, not with whole RL runs"


def near_rows(settings: Settings, limit: int = NEAR) -> list[dict[str, Any]]:
    """The published steps that are most like the run, with what they took."""
    run = settings.run
    found = []
    for row in catalogue.table("rl_steps"):
        known = catalogue.canonical(row["model"].removesuffix(" FP8"))
        if known is None or not row["step_s"].strip():
            continue
        distance = 0.0 if known == settings.model else 0.5
        size = catalogue.model(known)[1].parameters
        distance += abs(math.log(size / run.model.parameters)) + 0.3 * abs(math.log(int(row["gpus"]) / run.gpus))
        distance += 0.0 if _same_gpu(row["gpu"], run.gpu.name) else 0.7
        distance += 0.0 if ("async" in row["mode"]) == (run.mode == "async") else 0.5
        found.append((distance, row))
    keys = ("framework", "model", "algorithm", "gpu", "gpus", "mode", "avg_len", "max_len", "samples_per_step")
    near = sorted(found, key=lambda pair: pair[0])[:limit]
    return [
        {**{key: row[key] for key in keys}, "step_seconds": float(row["step_s"]), "source": row["source"]}
        for _, row in near
    ]


def _same_gpu(written: str, name: str) -> bool:
    try:
        return catalogue.gpu(written).name == name
    except InputError:
        return False


def warnings(settings: Settings) -> list[str]:
    """What was never compared with a measurement."""
    run = settings.run
    rows = [row for row in catalogue.table("rl_steps") if row["step_s"].strip()]
    notes = []
    if not any(_same_gpu(row["gpu"], run.gpu.name) for row in rows):
        notes.append(f"never compared: no public step on {run.gpu.name}")
    if settings.framework not in ("nemo-rl",):
        notes.append(f"never compared: no complete public step of {settings.framework}, the constants are NeMo RL's")
    unlike = {
        "turns, tools and images": run.turns > 1 or run.tool_seconds or run.image_tokens,
        "partial rollouts and staleness above 1": run.mode == "async" and (run.partial or run.staleness > 1),
        "a synchronous run with GPUs of rollout alone": run.mode == "sync" and run.rollout_gpus,
        "rollout on another GPU kind than training": run.engine.gpu != run.gpu,
        "a judge": run.judge or run.judge_seconds,
    }
    notes += [f"never compared: {what}" for what, there in unlike.items() if there]
    if not run.trainer.lora_rank and run.trainer.gpus > 1:
        notes.append(UNVALIDATED)
    return notes


def as_data(
    settings: Settings,
    found: Estimate,
    steps: int,
    price: float | None,
    near: Sequence[Mapping[str, Any]],
    larger: Sequence[Estimate] = (),
) -> dict[str, Any]:
    run = settings.run
    gpu_hours = found.gpu_hours(steps)
    known = {name for correction in found.measured for name in correction.stages}
    data: dict[str, Any] = {
        "model": settings.model,
        "parameters": run.model.parameters,
        "active_parameters": run.model.active_parameters,
        "gpu": run.gpu.name,
        "gpus": run.gpus,
        "rollout_gpus": run.rollout_gpus,
        "judge_gpus": run.judge_gpus,
        "mode": run.mode,
        "step_seconds": _range(found.seconds),
        "stages": {
            name: {**_range(seconds), "limit": limit, "measured": name in known}
            for name, seconds, limit in found.stages
        },
        "memory_gb": {
            phase.name: {
                "likely": round(phase.gb, 2),
                "high": round(phase.high_gb, 2),
                "gpu": phase.gpu_gb,
                "terms": {name: round(size, 2) for name, size in phase.terms if size},
            }
            for phase in found.phases
        },
        "host_memory_gb": round(found.host_gb, 1),
        "fits": found.fits,
        "sequences_at_once": int(found.step.concurrent),
        "tokens_per_second_and_gpu": round(found.tokens_per_gpu, 1),
        "mfu": round(found.mfu, 4),
        "staleness": {"mean": round(found.mean_staleness, 2), "greatest": found.greatest_staleness},
        "steps": steps,
        "hours": _range(found.hours(steps)),
        "gpu_hours": _range(gpu_hours),
        "measured": [correction.text for correction in found.measured],
        "assumed": list(settings.assumed),
        "warnings": warnings(settings),
        "near": [dict(row) for row in near],
    }
    if larger:
        data["sizes"] = [
            {
                "gpus": each.run.gpus,
                "rollout_gpus": each.run.rollout_gpus,
                **_parallelism(each.run),
                "step_seconds": _range(each.seconds),
                "hours": _range(each.hours(steps)),
                "gpu_hours": _range(each.gpu_hours(steps)),
            }
            for each in (found, *larger)
        ]
    if price is not None:
        data["cost"] = _range(gpu_hours.times(price))
    return data


def what_if_data(found: Sequence[WhatIf]) -> list[dict[str, Any]]:
    """Each switch with its gain, its conditions, and what it gave in public."""
    rows = catalogue.table("switches")
    data = []
    for each in found:
        names = {part.partition(":")[0] for part in each.switch.split("+")}
        evidence = [
            {
                **{key: row[key] for key in ("system", "model", "gpu", "stage", "date", "source")},
                "speedup": round(float(row["before"]) / float(row["after"]), 2),
            }
            for row in rows
            if {part.partition(":")[0] for part in row["switch"].split("+")} == names
        ]
        apart = {"rollout_gpus": each.run.rollout_gpus} if each.run.rollout_gpus else {}
        data.append(
            {
                "switch": each.switch,
                "step_seconds": float(f"{each.after.seconds:.4g}"),
                "speedup": round(each.speedup, 3),
                "fits": each.fits,
                **apart,
                "conditions": list(each.conditions),
                "evidence": evidence,
            }
        )
    return data


def _print_what_if(found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for each in found:
        speedups = sorted(row["speedup"] for row in each["evidence"])
        public = f"{speedups[0]:g}x to {speedups[-1]:g}x in {len(speedups)}" if speedups else "none"
        fit = "" if each["fits"] else "  does not fit"
        rows.append((each["switch"], f"{figure(each['step_seconds'])}{fit}", f"{each['speedup']:.2f}x", public))
    out.print()
    out.print(text_table(("what if", ">seconds", ">faster", "public rows"), rows))
    lines = [f"{each['switch']}: {'; '.join(each['conditions'])}" for each in found]
    dated = (
        "{system} {date}, {model}, {gpu}: {stage} {speedup:g}x, {source}".format(**row)
        for each in found
        for row in each["evidence"][:SHOWN]
    )
    print_list("When it pays", lines)
    print_list("Public rows of these switches", dict.fromkeys(dated))


def _parallelism(run: RunInputs) -> dict[str, str]:
    trainer = run.trainer
    sizes = {name: getattr(trainer, name) for name in ("tp", "pp", "cp", "ep")}
    parts = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return {
        "rollout": f"tp={run.engine.tp},memory={run.memory_fraction:g}",
        "train": ",".join([f"backend={'fsdp' if trainer.fsdp else 'megatron'}", *parts]),
    }


def _range(values: Interval) -> dict[str, float]:
    return {name: float(f"{getattr(values, name):.4g}") for name in ("low", "likely", "high")}


def apart(data: Mapping[str, Any]) -> str:
    rollout = f", {data['rollout_gpus']} of them for rollout" if data["rollout_gpus"] else ""
    return rollout + (f" and {data['judge_gpus']} for a judge" if data["judge_gpus"] else "")


def show(data: Mapping[str, Any]) -> None:
    """The data of `as_data` as text."""
    active = data["active_parameters"]
    used = "" if active == data["parameters"] else f", {active / 1e9:.1f}B used by a token"
    out.print(
        f"{data['model']} ({data['parameters'] / 1e9:.1f}B parameters{used}) on {data['gpus']} {data['gpu']}"
        f"{apart(data)}, {data['mode']}",
        markup=False,
    )
    rows = [("step", *_cells(data["step_seconds"]), "")]
    rows += [
        (f"  {name}", *_cells(stage), "measured" if stage["measured"] else stage["limit"])
        for name, stage in data["stages"].items()
    ]
    heads = ("seconds", ">low", ">likely", ">high", "limited by")
    out.print(text_table(heads, rows, no_wrap=True))
    sizes = []
    for name, phase in data["memory_gb"].items():
        parts = ", ".join(f"{term} {size:.1f}" for term, size in phase["terms"].items())
        mark = "" if phase["likely"] <= phase["gpu"] else "  does not fit"
        sizes.append((name, f"{phase['likely']:.1f}", f"{phase['high']:.1f}", f"{phase['gpu']:g}{mark}", parts))
    out.print()
    out.print(text_table(("GB of a GPU", ">likely", ">high", ">has", "of which"), sizes))
    out.print(
        f"\n{data['tokens_per_second_and_gpu']:,.0f} tokens/s/GPU, MFU {data['mfu']:.1%}, "
        f"{data['sequences_at_once']} sequences at once on an engine, "
        f"{data['host_memory_gb']:g} GB of host memory per node",
        markup=False,
    )
    if data["mode"] == "async":
        stale = data["staleness"]
        out.print(f"staleness: {stale['mean']:g} steps on average, {stale['greatest']:g} at most", markup=False)
    hours, gpu_hours = data["hours"], data["gpu_hours"]
    cost = "" if "cost" not in data else ", cost " + _text(data["cost"])
    out.print(f"{data['steps']:,} steps: {_text(hours)} hours, {_text(gpu_hours)} GPU-hours{cost}", markup=False)
    if "sizes" in data:
        rows = [
            (
                *(str(size["gpus"]), _text(size["step_seconds"]), figure(size["gpu_hours"]["likely"])),
                *(size["rollout"], size["train"].removeprefix("backend=")),
            )
            for size in data["sizes"]
        ]
        out.print()
        out.print(text_table((">GPUs", "seconds of a step", ">GPU-hours", "rollout", "training"), rows))
    if "what_if" in data:
        _print_what_if(data["what_if"])
    print_list("Measured", data["measured"])
    print_list("Assumed", data["assumed"])
    print_list("Take care", data["warnings"])
    near = (
        f"{row['framework']}, {row['model']}, {row['gpus']} {row['gpu']}, {row['mode']}: {row['step_seconds']:g} s"
        for row in data["near"]
    )
    print_list("Public steps near it", near)


def _cells(values: Mapping[str, Any]) -> tuple[str, str, str]:
    return figure(values["low"]), figure(values["likely"]), figure(values["high"])


def _text(values: Mapping[str, float]) -> str:
    low, likely, high = _cells(values)
    return f"{likely} ({low} to {high})"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
