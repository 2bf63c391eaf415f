"""Rules of host memory on each node: loading, what is offloaded, what sleeping engines back up, saving.

Ray's monitor ends workers at 95 % of a node's memory; in a container that is the container's limit. GB are 2^30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.model.architecture import Architecture
from trimtab.plan.check import cures, gpu_memory
from trimtab.plan.check.cures import Change
from trimtab.plan.check.findings import CheckFinding, CheckRule
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.phases import Phase

GB = 2**30
MONITOR = 0.95
"""Of host memory: Ray's RAY_memory_usage_threshold."""
PROCESS_GB = 4.0
"""A worker process with PyTorch and CUDA, for each GPU and each of trainer and engine."""
SYSTEM_GB = 12.0
"""Ray, the driver, datasets and their workers."""
PINNED = 4 / 3
"""PyTorch rounds a pinned buffer up to a power of two: a third more on average."""
CPU_ADAM_BYTES = 16.0
"""fp32 weight, gradient and two moments; DeepSpeed accumulates gradients beside them."""
TOKEN_BYTES, BATCH_COPIES = 64.0, 3
"""Of a padded sample: eight columns of 8 bytes; in the object store, in the driver and in a worker."""
LOADED_BYTES = 2.0

CHANGES = (
    Change(cures.flag("train_save_copies", False), cures.free("save weights only, or save less often")),
    Change(cures.flag("rollout_backup", False), cures.free("a second or two: the next sync brings the weights")),
    Change(cures.flag("rollout_swap", 0.0), cures.free("nothing: preempted answers are computed again")),
    Change(cures.flag("rollout_sleeps", False), cures.free("the engine keeps its share while training")),
    Change(cures.flag("train_loads_everywhere", False), cures.free("nothing: weights are loaded once and broadcast")),
    Change(cures.flag("train_cpu_optimizer", False), cures.free("optimiser state on the GPUs: see GPU memory")),
    Change(
        cures.flag("train_offload_optimizer", False), cures.free("optimiser state stays on the GPUs: see GPU memory")
    ),
    Change(cures.flag("train_offload_weights", False), cures.free("weights stay on the GPUs: see GPU memory")),
    Change(cures.more_gpus, cures.free("twice the nodes: each holds half of the states")),
)


def phases(run: RunSetup) -> Iterator[Phase]:
    """GB of a node's host memory while it loads, in a step, and while it saves."""
    model = run.model
    if model is None or not run.gpus or not run.host_memory:
        return
    node = run.node_gpus
    trainers = min(node, run.train_gpus)
    engines = min(node, run.engine_gpus)
    processes = PROCESS_GB * (trainers + engines) if run.shared else PROCESS_GB * node
    base = [("processes", processes), ("system", SYSTEM_GB), ("engines' swap space", run.rollout_swap * engines)]
    backup = ("engines' backup", _backup(run, model) * engines if run.shared else 0.0)
    states = _states(run, model, trainers)
    once = LOADED_BYTES * model.parameters / GB
    # DeepSpeed's models are made at the same time, each rank with its own copy; FSDP's one after another, by one rank.
    # Megatron's ranks read their own shards.
    roles = 1 + (run.reference and not run.train_lora) + run.critic if run.train_backend == "deepspeed" else 1
    copies = trainers * roles if run.train_loads_everywhere else roles
    sharded = run.train_backend == "megatron"
    loads = ("loading", gpu_memory.states(run, model).weights * trainers if sharded else once * copies)
    limit = run.host_memory * MONITOR
    yield Phase("loading", gpu_memory.stated([*base, backup, loads]), limit, 0.0)
    tokens = (run.samples or 0) * (run.longest or 0) * TOKEN_BYTES * BATCH_COPIES / GB
    nodes = max(1, run.gpus // node)
    batch = ("batch", tokens if nodes == 1 else tokens / 2)
    yield Phase("a step", gpu_memory.stated([*base, backup, *states, batch]), limit, 0.0)
    if run.train_save_copies:
        held = gpu_memory.states(run, model)
        saved = ("copies to save", (held.weights + held.optimizer) * trainers)
        yield Phase("saving", gpu_memory.stated([*base, backup, *states, saved, batch]), limit, 0.0)


def _states(run: RunSetup, model: Architecture, trainers: int) -> list[tuple[str, float]]:
    held = gpu_memory.states(run, model)
    weights = held.weights * trainers if run.train_offload_weights and run.shared else 0.0
    optimizer = held.optimizer * trainers if run.train_offload_optimizer else 0.0
    weights += held.gradients * trainers if run.train_offload_gradients and run.shared else 0.0
    critics = 1 + run.critic
    pinned = PINNED if run.train_backend == "megatron" else 1.0
    parameters = model.parameters / run.shards * trainers
    each = CPU_ADAM_BYTES + (run.train_gradient_bytes if run.train_backend == "deepspeed" else 0.0)
    cpu = each * pinned * parameters / GB if run.train_cpu_optimizer else 0.0
    bare = 2.0 * model.parameters / max(1, run.train_gpus) * trainers / GB
    reference = bare if run.reference and run.reference_offload and not run.train_lora else 0.0
    return [
        ("offloaded weights", weights * critics),
        ("offloaded optimiser", optimizer * critics),
        ("CPU optimiser", cpu * critics),
        ("reference", reference),
    ]


def _backup(run: RunSetup, model: Architecture) -> float:
    """A sleeping engine's weights in pinned memory, for each GPU."""
    return gpu_memory.engine_weights(run, model) * PINNED if run.rollout_backup and run.rollout_sleeps else 0.0


def host(run: RunSetup) -> Iterator[CheckFinding]:
    worst = max(phases(run), key=lambda phase: phase.gb / phase.gpu_gb, default=None)
    if worst is None or worst.gb <= 0.9 * worst.gpu_gb:
        return

    def fits(changed: RunSetup) -> bool:
        return all(phase.gb <= 0.9 * phase.gpu_gb for phase in phases(changed))

    terms = ", ".join(f"{name} {size:.0f}" for name, size in sorted(worst.terms, key=lambda pair: -pair[1]))
    over = worst.gb > worst.gpu_gb
    state = "out of" if over else "close to the end of"
    yield CheckFinding(
        f"{state} host memory while {_title(worst.name)}: {worst.gb:,.0f} GB on a node, "
        f"of {worst.gpu_gb:,.0f} GB before Ray ends workers",
        terms,
        ("host_memory", "train_offload_optimizer", "train_cpu_optimizer"),
        cures.tried(run, CHANGES, fits),
        "error" if over else "warning",
    )


def _title(name: str) -> str:
    return "a step runs" if name == "a step" else name


RULES = (CheckRule("host-memory", "host memory", host, "OpenRLHF/OpenRLHF#198", "2026-11"),)
