"""Public measurements as inputs of the estimates: which rows are complete, and what is missing in the others."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.estimate_gpu import architecture
from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import GpuKind
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.serving import EngineReplica, Work, decode_work
from trimtab.plan.estimate.step import DYNAMIC_SAMPLING, PASSES, SEPARATE_FRACTION, SHARED_FRACTION, RunInputs
from trimtab.plan.estimate.training import Trainer

FOLDER = Path(__file__).parent
PROMPT = 200.0
"""Tokens of a prompt where a source does not state them."""


@dataclass(frozen=True)
class StepRow:
    """A published step: its inputs, its seconds, and the stages that were published."""

    row: Mapping[str, str]
    family: str
    run: RunInputs
    seconds: float
    stages: Mapping[str, float]

    @property
    def label(self) -> str:
        gpus = f"{self.row['gpus']} {self.row['gpu']}"
        return f"{self.row['framework']}, {self.row['model']}, {self.row['algorithm']}, {gpus}, {self.row['mode']}"


@dataclass(frozen=True)
class Point:
    """A measured value with the family of its model, which is left out when it is judged."""

    family: str
    label: str
    value: float
    group: str = ""


def read(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def family(model: str) -> str:
    """Models of one architecture are left out together."""
    name = catalogue.canonical(model) or model
    return re.sub(r"deepseek-(r1|v3(\.\d)?)$", "deepseek-v3", name)


def missing(row: Mapping[str, str]) -> list[str]:
    """What a published step does not state and an estimate needs."""
    parts = []
    if catalogue.canonical(bare(row["model"])) is None:
        parts.append("a model of the table")
    try:
        catalogue.gpu(row["gpu"])
    except InputError:
        parts.append("GPU kind")
    parts += [name for name in ("avg_len", "max_len", "samples_per_step", "train_batch") if not row[name]]
    if not re.search(r"tp\d", row["parallelism"], re.IGNORECASE):
        parts.append("parallelism")
    if not row["step_s"].strip():
        parts.append("step_s")
    return parts


def bare(model: str) -> str:
    return re.sub(r" (FP8|RL-Zero|RL-Think|GSM8K|ReTool multi-turn|671B)$", "", model)


@cache
def step_rows() -> tuple[list[StepRow], list[tuple[str, list[str]]]]:
    """(complete rows, (label, what is missing) of the others)."""
    complete, others = [], []
    for row in catalogue.table("rl_steps"):
        lacking = missing(row)
        if lacking:
            label = f"{row['framework']}, {row['model']}, {row['gpus']} {row['gpu']}, {row['mode']}"
            others.append((label, lacking))
            continue
        names = {"generate": "gen_s", "old log-probs": "old_logprob_s", "reference log-probs": "ref_s"}
        stages = {name: float(row[key]) for name, key in (*names.items(), ("update", "update_s")) if row[key].strip()}
        complete.append(StepRow(row, family(bare(row["model"])), run_of(row), float(row["step_s"]), stages))
    return complete, others


def run_of(row: Mapping[str, str]) -> RunInputs:
    """The inputs of a published step; what is not stated is as in the framework's recipe for the model."""
    model = catalogue.model(bare(row["model"]))[1]
    gpu = catalogue.gpu(row["gpu"])
    gpus, apart = int(row["gpus"]), int(row["gen_gpus_if_separate"] or 0)
    rollout, _, train = row["parallelism"].partition(";")
    engine, trainer = _sizes(rollout), _sizes(train)
    if not trainer and model.experts and gpus >= 256:
        trainer = {"ep": 16, "pp": 16}
    precision = "fp8" if "fp8" in row["model"].lower() else "bf16"
    mean, most = float(row["avg_len"]), float(row["max_len"])
    nemo = row["framework"].startswith("NeMo")
    return RunInputs(
        model=model,
        gpu=gpu,
        gpus=gpus,
        samples=int(row["samples_per_step"]),
        train_batch=int(row["train_batch"]),
        lengths=Lengths.capped(min(mean, most), most, min(PROMPT, mean / 2)),
        engine=EngineReplica(model, gpu, tp=engine.get("tp", 1), precision=precision),
        trainer=Trainer(
            model, gpu, gpus - apart, **trainer, precision=precision, micro_tokens=most, recompute=False, fsdp=not nemo
        ),
        rollout_gpus=apart,
        mode="async" if "async" in row["mode"] or "off" in row["mode"] else "sync",
        staleness=1.0 if apart else 0.0,
        partial="partial" in row["mode"],
        passes=PASSES[row["algorithm"].lower()],
        transport="packed" if nemo else "broadcast",
        release=row["framework"],
        oversample=DYNAMIC_SAMPLING if nemo and row["algorithm"] == "DAPO" else 1.0,
        memory_fraction=SEPARATE_FRACTION if apart else SHARED_FRACTION,
    )


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"(tp|pp|cp|ep)(\d+)", text.lower())}


@cache
def serving_points() -> tuple[list[Point], Work]:
    """Measured seconds per output token of engines that prefill beside decoding, and the work of their steps."""
    points, works = [], []
    for row in read("serving_points"):
        model = catalogue.model(row["model"])[1]
        gpu = catalogue.gpu(row["gpu"])
        wide = int(row["attention_dp"])
        engine = EngineReplica(
            model,
            gpu,
            max(int(row["tp"]), wide),
            wide,
            precision=row["precision"],
            backend=row["backend"],
            streams=True,
        )
        prompt, answer, batch = float(row["isl"]), float(row["osl"]), float(row["concurrency"])
        works.append(decode_work(engine, batch, prompt + answer / 2, batch / answer * prompt, prompt))
        points.append(Point(family(row["model"]), row["id"], float(row["tpot_ms"]) / 1e3, gpu.name))
    return points, Work.stack(works)


@cache
def trainer_points() -> list[tuple[Point, Trainer, float, float]]:
    """(measured seconds of a micro-batch on each GPU, trainer, tokens, peak GiB)."""
    points = []
    for row in read("prime_rl_trainer"):
        gpus, kind = re.match(r"(\d+)x(.*)", row["hardware"]).groups()  # type: ignore[union-attr]
        model, length = catalogue.model(row["model"])[1], float(row["seq_len"])
        trainer = Trainer(
            model,
            catalogue.gpu(kind),
            int(gpus),
            fsdp=True,
            lora_rank=16 if "LoRA" in row["type"] else 0,
            micro_tokens=length,
        )
        label = ", ".join(row[key] for key in ("model", "type", "seq_len", "activations", "attention", "hardware"))
        point = Point(family(row["model"]), label, float(row["seconds_per_microbatch"].rstrip("s")), row["attention"])
        points.append((point, trainer, length * int(gpus), float(row["peak_mem"].split()[0])))
    return points


@cache
def gpu_points() -> list[tuple[Point, str, Architecture, GpuKind, int, int]]:
    """(seconds, part, model, GPU, sequences, tokens of each) that `python -m bench.estimate_gpu` measured."""
    points = []
    for row in read("gpu_points"):
        label = f"{row['model']}, {row['part']} {row['sequences']}"
        point = Point(row["model"], label, float(row["seconds"]), row["part"])
        sizes = int(row["sequences"]), int(row["length"])
        points.append((point, row["part"], architecture(row["model"]), catalogue.gpu(row["gpu"]), *sizes))
    return points


@cache
def sync_points() -> list[tuple[Point, str, RunInputs]]:
    """(measured seconds of a weight sync, transport, a run with its model)."""
    base = step_rows()[0][0].run
    points = []
    for row in read("weight_sync"):
        known = catalogue.canonical(
            re.sub(r" (offload off|FP8|BF16|NVFP4).*$", "", row["model"]).replace("K2.6", "K2.5")
        )
        if known is None:
            known = {"GLM-4.5 355B-A32B": "glm-4.5", "Kimi-K2 FP8": "kimi-k2"}.get(row["model"], "")
        if not known:
            continue
        method = row["method"]
        transport = "broadcast" if method.startswith("verl nccl") else "packed"
        transport = {"verl delta_sharded": "delta", "slime bf16": "ipc", "slime fp8": "ipc"}.get(method, transport)
        model = catalogue.model(known)[1]
        precision = (
            "fp8" if "FP8" in row["model"] or "fp8" in method else "nvfp4" if "NVFP4" in row["model"] else "bf16"
        )
        engine = replace(base.engine, model=model, precision=precision)
        label = f"{method}, {row['model']}, {row['placement']}"
        nodes = re.search(r"(\d+)\+\d+", row["placement"])  # of eight GPUs, in verl's table of deltas
        trainers = 8 * int(nodes[1]) if nodes and transport == "delta" else 8
        points.append(
            (
                Point(known, label, float(row["seconds"]), transport),
                transport,
                replace(base, model=model, engine=engine, trainer=replace(base.trainer, gpus=trainers)),
            )
        )
    return points


@dataclass(frozen=True)
class MemoryPoint:
    """A measured peak in GiB on one GPU: of training beside a sleeping engine, or of generation."""

    point: Point
    model: Architecture
    gpu: GpuKind
    phase: str
    length: int
    sequences: int
    rank: int
    attention_only: bool
    precision: str
    fraction: float
    device_gb: float
    batched: int
    asleep_gb: float


@cache
def memory_points() -> list[MemoryPoint]:
    points = []
    for row in read("memory_points"):
        model = catalogue.model(row["model"])[1]
        device = row["device"] if row["device"] != "not stated" else "NVIDIA L4"
        at_once = min(int(row["micro_batch"]), int(row["group_size"]) * int(row["prompts"]))
        label = f"{row['file']}, {row['phase']}, {row['seq_len']} tokens x {at_once}, rank {row['lora_rank']}"
        points.append(
            MemoryPoint(
                Point(family(row["model"]), label, float(row["peak_gb"]), row["file"]),
                model,
                catalogue.gpu(device),
                row["phase"],
                int(row["seq_len"]),
                at_once,
                int(row["lora_rank"]),
                "q_proj" in row["lora_modules"],
                "nf4" if row["quantization"] == "nf4" else "bf16",
                float(row["fraction"]),
                float(row["device_gb"] or 22.5),
                int(row["seq_len"]) * int(row["group_size"]),
                float(row["sleeping_gb"] or 0.0),
            )
        )
    return points
