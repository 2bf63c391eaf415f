"""Estimates the memory of each component from the model's architecture and its settings.

Every term is shown: weights, gradients, optimiser state, activations, logits, KV cache and the fixed cost of a process
on a GPU. It must never be silently optimistic: peaks are added as if they coincided. GB are 2^30 bytes, as in
`nvidia-smi`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError, unknown
from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture

GB = 2**30
ADAPTER_BYTES = 16
"""Of an adapter's value: fp32 weight, gradient and two moments."""
PROCESS_GB = 1.5
"""CUDA context (0.6 GB on an H200) and the buffers of the communication library, per process and GPU."""

FUSED_HEAD = 256
"""The widest heads that FlashAttention has kernels for."""
SCORE_BYTES = 16
"""Of an attention score in a backward pass without a fused kernel, as measured with heads of 512 values."""

LOGIT_BYTES_TRAINING = 12
"""Per token and vocabulary entry: bf16 and fp32, each with its gradient, as a plain cross-entropy keeps them."""
LOGIT_BYTES_FORWARD = 6

OPTIMIZERS: Mapping[str, tuple[float, str]] = {
    "adam": (8, "two fp32 moments"),
    "adamw": (8, "two fp32 moments"),
    "adam8bit": (2, "two 8-bit moments"),
    "adafactor": (0.1, "factored moments"),
    "muon": (4, "one fp32 momentum"),
    "sgd": (0, "no state"),
    "sgd-momentum": (4, "one fp32 momentum"),
}
PRECISIONS: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "nf4": 0.5625}
FOUR_BIT = ("nf4", "int4")
"""Precisions of which only the linear layers are; the rest is fp32 while adapters are trained."""
MAX_COUNT = 10**9
OFFLOADS = ("none", "optimizer", "all")


class MemorySettings(Frozen):
    """How the model is run. Counts are per component; `kv_share` is the engine's share of GPU memory."""

    gpus: int = 8
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 3
    optimizer: str = "adam"
    precision: str = "bf16"
    master_weights: bool = True
    gradients: str = "fp32"
    checkpointing: bool = True
    micro_batch: int = 1
    sequence_length: int = 4096
    offload: str = "all"
    rollout_tp: int = 1
    rollout_precision: str = "bf16"
    kv_precision: str = "bf16"
    kv_share: float = 0.6
    gpu_memory_gb: float | None = None
    concurrent: int = 64
    lora_rank: int = 0
    lora_attention_only: bool = False
    fused_logits: bool = False
    layer_copies: float = 1.0
    expert_copies: float = 0.0
    process_gb: float = PROCESS_GB


class MemoryTerm(Frozen):
    """A summand: its name, its formula, and its GB per GPU."""

    name: str
    formula: str
    gb: float
    divides_by_gpus: bool = False


class MemoryNeed(Frozen):
    """Memory of a component on each of its GPUs, and in host memory per GPU while it is offloaded."""

    component: str
    active: tuple[MemoryTerm, ...]
    resident: tuple[MemoryTerm, ...]
    host: tuple[MemoryTerm, ...]
    gpus: int
    notes: tuple[str, ...] = ()

    @property
    def active_gb(self) -> float:
        return sum(term.gb for term in self.active)

    @property
    def resident_gb(self) -> float:
        """While another component of its group runs."""
        return sum(term.gb for term in self.resident)

    @property
    def host_gb(self) -> float:
        """In host memory while offloaded."""
        return sum(term.gb for term in self.host)

    def block(self) -> dict[str, Any]:
        """The `memory_gb` and `host_memory_gb` of a job file."""
        sharded = sum(term.gb for term in self.active if term.divides_by_gpus) * self.gpus
        memory: dict[str, float] = {}
        if sharded:
            memory["sharded"] = _round_up(sharded)
            memory["per_gpu"] = _round_up(self.active_gb - sharded / self.gpus)
        else:
            memory["active"] = _round_up(self.active_gb)
        memory["resident"] = _round_up(self.resident_gb)
        block: dict[str, Any] = {"memory_gb": memory}
        if self.host_gb:
            block["host_memory_gb"] = _round_up(self.host_gb)
        return block


def estimate(model: Architecture, settings: MemorySettings) -> tuple[MemoryNeed, ...]:
    """The needs of trainer, rollout and inference (or a reference model)."""
    settings = check(settings)
    return _trainer(model, settings), _rollout(model, settings), _inference(model, settings)


def check(settings: MemorySettings) -> MemorySettings:
    """The settings with lower-case words; raises InputError that names the option."""
    for name in ("gpus", "tp", "pp", "ep", "micro_batch", "sequence_length", "rollout_tp", "concurrent"):
        if not 1 <= getattr(settings, name) <= MAX_COUNT:
            raise InputError(f"--{name.replace('_', '-')} is a count from 1 to {MAX_COUNT:,}")
    if settings.zero not in (0, 1, 2, 3):
        raise InputError("--zero is 0, 1, 2 or 3", hint="1 is a distributed optimiser, 3 is FSDP")
    if not 0 < settings.kv_share <= 1:
        raise InputError("--kv-share is above 0 and at most 1", hint="it is the engine's gpu_memory_utilization")
    if settings.gpu_memory_gb is not None and not 0 < settings.gpu_memory_gb < math.inf:
        raise InputError("--gpu-memory-gb must be more than 0")
    settings = replace(
        settings,
        optimizer=_word("--optimizer", settings.optimizer, OPTIMIZERS),
        precision=_word("--precision", settings.precision, PRECISIONS),
        gradients=_word("--gradients", settings.gradients, PRECISIONS),
        rollout_precision=_word("--rollout-precision", settings.rollout_precision, PRECISIONS),
        kv_precision=_word("--kv-precision", settings.kv_precision, PRECISIONS),
        offload=_word("--offload", settings.offload, dict.fromkeys(OFFLOADS)),
    )
    split = settings.tp * settings.pp
    if settings.gpus % split:
        raise InputError(f"--gpus {settings.gpus} is no multiple of tp x pp = {split}")
    if settings.gpus // settings.pp % settings.ep:
        raise InputError(f"--ep {settings.ep} does not divide the {settings.gpus // settings.pp} GPUs of a stage")
    if settings.gpus % settings.rollout_tp:
        raise InputError(f"--gpus {settings.gpus} is no multiple of --rollout-tp {settings.rollout_tp}")
    return settings


def adapter_parameters(model: Architecture, rank: int, *, attention_only: bool = False) -> int:
    """Parameters of LoRA adapters on the linear layers; experts count as one MLP of the width that a token uses."""
    query, key_value = model.heads * model.head_size, model.kv_heads * model.head_size
    attention = 2 * (model.hidden + query) + 2 * (model.hidden + key_value)
    mlp = 0 if attention_only else 3 * (model.hidden + model.mlp_width)
    return rank * (model.attention_layers * attention + model.layers * mlp)


def unfused_gb(model: Architecture, sequences: float, length: float) -> float:
    """What a layer's attention scores may take: other kernels than FlashAttention's exist, not in each release."""
    if model.widest_head <= FUSED_HEAD:
        return 0.0
    return SCORE_BYTES * model.heads * sequences * length**2 / GB


def _adapted(model: Architecture, run: MemorySettings) -> MemoryNeed:
    """A trainer of LoRA adapters: frozen weights without gradients, adapters with their optimiser."""
    weights = _states("weights", model, run, PRECISIONS[run.precision], sharded=run.zero >= 3, word=run.precision)
    if run.precision in FOUR_BIT:
        ends = model.embedding + model.head
        more = ends * (4 - PRECISIONS[run.precision]) / (run.gpus if run.zero >= 3 else run.tp) / GB
        formula = f"{weights.formula}; {ends:,} of embeddings x 4 B"
        weights = MemoryTerm("weights", formula, weights.gb + more, divides_by_gpus=weights.divides_by_gpus)
    count = adapter_parameters(model, run.lora_rank, attention_only=run.lora_attention_only)
    parts = run.gpus if run.zero >= 3 else run.tp * run.pp
    formula = f"{count:,} x {ADAPTER_BYTES} B (rank {run.lora_rank}, Adam) / {parts}"
    adapters = MemoryTerm("adapters", formula, count * ADAPTER_BYTES / parts / GB, divides_by_gpus=run.zero >= 3)
    working = [*_activations(model, run, training=True), *_training_logits(model, run), *_gathered(model, run)]
    process = _process(run)
    moved = (weights, adapters) if run.offload == "all" else ()
    kept = () if moved else (weights, adapters)
    return MemoryNeed("trainer", (weights, adapters, *working, process), (*kept, process), moved, run.gpus, model.notes)


def _training_logits(model: Architecture, run: MemorySettings) -> list[MemoryTerm]:
    if run.fused_logits:
        return []
    return [_logits(model, run, LOGIT_BYTES_TRAINING + 4 if PRECISIONS[run.precision] == 4 else LOGIT_BYTES_TRAINING)]


def _gathered(model: Architecture, run: MemorySettings) -> list[MemoryTerm]:
    # Weights kept in fp32 are cast to bf16 layer by layer, on one GPU too.
    if run.zero < 3 or (run.gpus // (run.tp * run.pp) <= 1 and PRECISIONS[run.precision] < 4):
        return []
    layer = max(model.layer_parameters / model.layers, model.embedding) / run.tp
    size = min(2.0, PRECISIONS[run.precision])
    terms = [MemoryTerm("gathered layers", f"2 x {layer:,.0f} parameters x bf16", 2 * layer * size / GB)]
    if run.expert_copies and model.experts:
        experts = model.experts * model.expert_mlp / run.tp
        formula = f"{run.expert_copies:.2f} x {experts:,.0f} parameters of experts x bf16"
        terms.append(MemoryTerm("copies of experts", formula, run.expert_copies * experts * size / GB))
    if not run.lora_rank:
        formula = f"{layer:,.0f} gradients x fp32, before they are divided"
        terms.append(MemoryTerm("whole gradients", formula, 4 * layer / GB))
    return terms


def _trainer(model: Architecture, run: MemorySettings) -> MemoryNeed:
    if run.lora_rank:
        return _adapted(model, run)
    weights = _states("weights", model, run, PRECISIONS[run.precision], sharded=run.zero >= 3, word=run.precision)
    gradients = _states(
        "gradients", model, run, PRECISIONS[run.gradients], sharded=run.zero >= 2, word=f"{run.gradients} gradients"
    )
    moments, meaning = OPTIMIZERS[run.optimizer]
    master = 4.0 if run.master_weights and PRECISIONS[run.precision] < 4 else 0.0
    word = f"{run.optimizer}: {meaning}" + (" + fp32 copy" if master else "")
    optimizer = _states("optimiser", model, run, moments + master, sharded=run.zero >= 1, word=word)
    working = [*_activations(model, run, training=True), *_training_logits(model, run), *_gathered(model, run)]
    process = _process(run)
    moved = {"none": (), "optimizer": (optimizer,), "all": (weights, gradients, optimizer)}[run.offload]
    kept = tuple(term for term in (weights, gradients, optimizer) if term not in moved)
    # Gradients are freed between steps, not moved.
    host = tuple(term for term in moved if term is not gradients)
    return MemoryNeed(
        "trainer", (weights, gradients, optimizer, *working, process), (*kept, process), host, run.gpus, model.notes
    )


def _rollout(model: Architecture, run: MemorySettings) -> MemoryNeed:
    precision = PRECISIONS[run.rollout_precision]
    weights = MemoryTerm(
        "weights",
        f"{model.parameters:,} x {precision:g} B / tp {run.rollout_tp}",
        model.parameters * precision / run.rollout_tp / GB,
    )
    values = model.cached_values(run.sequence_length) / run.sequence_length
    per_token = values * PRECISIONS[run.kv_precision] / min(run.rollout_tp, model.kv_shards)
    process = _process(run)
    notes: list[str] = []
    if run.gpu_memory_gb is None:
        cached = run.concurrent * run.sequence_length
        formula = f"{run.concurrent} answers x {run.sequence_length} tokens x {per_token:,.0f} B"
        cache = MemoryTerm("KV cache", formula, cached * per_token / GB)
        notes.append("without --gpu-memory-gb the KV cache is that of --concurrent answers of full length")
    else:
        engine = run.kv_share * run.gpu_memory_gb
        free = engine - weights.gb - process.gb
        formula = f"{run.kv_share:g} x {run.gpu_memory_gb:g} GB - weights - process"
        cache = MemoryTerm("KV cache", formula, max(0.0, free))
        answers = int(free * GB / (per_token * run.sequence_length)) if free > 0 else 0
        notes.append(f"the KV cache holds {answers} answers of {run.sequence_length} tokens at a time")
        if answers < 1:
            notes.append("the KV cache does not hold a single answer: raise --kv-share or --rollout-tp")
    # A sleeping engine frees weights and cache; the next weight sync restores the weights.
    resident = (process,) if run.offload == "all" else (weights, process)
    return MemoryNeed("rollout", (weights, cache, process), resident, (), run.gpus, tuple(notes))


def _inference(model: Architecture, run: MemorySettings) -> MemoryNeed:
    weights = _states("weights", model, run, PRECISIONS[run.precision], sharded=run.zero >= 3, word=run.precision)
    working = [*_activations(model, run, training=False), _logits(model, run, LOGIT_BYTES_FORWARD)]
    process = _process(run)
    moved = run.offload == "all"
    resident = (process,) if moved else (weights, process)
    return MemoryNeed("inference", (weights, *working, process), resident, (weights,) if moved else (), run.gpus)


def _states(
    name: str, model: Architecture, run: MemorySettings, size: float, *, sharded: bool, word: str
) -> MemoryTerm:
    """Bytes per parameter: sharded over all GPUs, or copied on every replica."""
    if sharded:
        formula = f"{model.parameters:,} x {size:g} B ({word}) / {run.gpus} GPUs"
        return MemoryTerm(name, formula, model.parameters * size / run.gpus / GB, divides_by_gpus=True)
    parameters = _largest_stage(model, run)
    formula = f"{parameters:,.0f} x {size:g} B ({word}), the largest of pp {run.pp} / tp {run.tp}"
    return MemoryTerm(name, formula, parameters * size / GB)


def _largest_stage(model: Architecture, run: MemorySettings) -> float:
    """Parameters per GPU of the largest stage."""
    share = math.ceil(model.layers / run.pp) / model.layers
    # Experts are divided over no more GPUs than a stage has.
    experts = model.expert_parameters / min(run.tp * run.ep, max(1, run.gpus // run.pp))
    dense = (model.layer_parameters - model.expert_parameters) / run.tp
    both = model.embedding + model.head
    ends = both if run.pp == 1 else max(model.embedding, model.head or model.embedding)
    return (dense + experts) * share + (ends + model.final_norm + model.extra + model.vision) / run.tp


def _activations(model: Architecture, run: MemorySettings, *, training: bool) -> list[MemoryTerm]:
    """Activations that layers keep for the backward pass: norms, attention (without its scores), MLP.

    The factors are those of plain PyTorch, measured with a 1.5B Qwen2 on an H200 (104,200 bytes per token and layer;
    this gives 103,424) and with a 4B Qwen3 for its query and key norms, and checked with a 1.2B Llama. Fused kernels
    keep less.
    """
    tokens = run.micro_batch * run.sequence_length
    # A norm keeps its input in fp32 and its output in bf16: three values of two bytes each.
    heads = (model.heads + model.kv_heads) * model.head_size
    normed = model.qk_norm and training and not run.checkpointing
    values = (2 + 3 * model.norm_count) * model.hidden + (5 if normed else 2) * heads + 4 * model.mlp_width
    layer = 2 * tokens * values / run.tp / GB
    shown = f"{tokens:,} tokens x {values:,} values x 2 B / tp {run.tp}"
    if not training:
        return [MemoryTerm("one layer", shown, layer)]
    # The first pipeline stage holds as many micro-batches as there are stages.
    depth = math.ceil(model.layers / run.pp) * run.pp
    if not run.checkpointing:
        return [MemoryTerm("activations", f"{depth} layers x {shown}", depth * layer)]
    # Adapters over 4-bit weights keep norms, and so what layers pass on, in fp32.
    size = 4 if run.precision in FOUR_BIT else 2
    inputs = size * tokens * model.hidden * depth / GB
    return [
        MemoryTerm("checkpoints", f"{depth} layers x {tokens:,} tokens x {model.hidden:,} values x {size} B", inputs),
        MemoryTerm("one layer", shown + _copies(run), layer * run.layer_copies),
    ]


def _copies(run: MemorySettings) -> str:
    return "" if run.layer_copies == 1 else f" x {run.layer_copies:.2f} copies"


def _logits(model: Architecture, run: MemorySettings, size: int) -> MemoryTerm:
    tokens = run.micro_batch * run.sequence_length
    formula = f"{tokens:,} tokens x {model.vocabulary:,} words x {size} B / tp {run.tp}"
    return MemoryTerm("logits", formula, size * tokens * model.vocabulary / run.tp / GB)


def _process(run: MemorySettings) -> MemoryTerm:
    return MemoryTerm("process", "CUDA context and communication buffers", run.process_gb)


def _word(option: str, word: str, known: Mapping[str, object]) -> str:
    if word.lower() in known:
        return word.lower()
    raise unknown(word.lower(), known, what=f"{option} {{}} is not known")


def _round_up(gb: float) -> float:
    """Round up to a tenth: an estimate must not fit by rounding."""
    return math.ceil(gb * 10 - 1e-9) / 10
