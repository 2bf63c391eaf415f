"""Rules of sizes that must divide one another: heads, layers, experts, GPUs, nodes, batches.

Each is what a framework or an engine asserts after it has started its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trimtab.plan.check.findings import CheckFinding, CheckRule, Remedy, within
from trimtab.plan.check.setup import RunSetup

NO_COST = "nothing"
LARGEST = 65_536
"""Parallel size or batch that is proposed."""
ADVANTAGE_BY_GROUP = ("grpo", "dapo", "gspo", "rloo", "gpg", "cispo")


def _divides(total: int, by: int) -> bool:
    return by > 0 and total % by == 0


def near_divisors(total: int, wanted: int, most: int | None = None) -> list[int]:
    """Divisors of a number, the nearest to the wanted one first, then the smaller one."""
    found = [size for size in range(1, min(total, most or total, LARGEST) + 1) if total % size == 0]
    return sorted((size for size in found if size != wanted), key=lambda size: (abs(size - wanted), size))


def near_multiples(wanted: int, of: int) -> list[int]:
    """The multiples of a number on both sides of the wanted one, the nearer first."""
    low, high = wanted // of * of, -(-wanted // of) * of
    return sorted((size for size in {low, high} if size > 0), key=lambda size: (abs(size - wanted), -size))


def _set(name: str, values: Iterable[int], cost: str = NO_COST) -> tuple[Remedy, ...]:
    return tuple(Remedy({name: value}, cost) for value in list(values)[:2])


def heads_of_rollout(run: RunSetup) -> Iterator[CheckFinding]:
    if run.model is None:
        return
    tp, heads, kv = run.rollout_tp, run.model.heads, run.model.kv_heads
    good = [
        size
        for size in near_divisors(heads, tp, run.engine_gpus)
        if run.engine_gpus % size == 0 and (kv % size == 0 or size % kv == 0)
    ]
    if not _divides(heads, tp):
        yield CheckFinding(
            f"the engine's tensor-parallel size {tp} does not divide {heads} attention heads",
            "each GPU of an engine holds the same number of heads",
            ("rollout_tp",),
            _set("rollout_tp", good, "fewer or more engines on the same GPUs"),
        )
    elif run.model.kv_shards > 1 and kv % tp and tp % kv:
        yield CheckFinding(
            f"the engine's tensor-parallel size {tp} neither divides {kv} KV heads nor is a multiple of them",
            "KV heads are divided or copied evenly",
            ("rollout_tp",),
            _set("rollout_tp", good, "fewer or more engines on the same GPUs"),
        )


def heads_of_training(run: RunSetup) -> Iterator[CheckFinding]:
    if run.model is None:
        return
    heads, kv = run.model.heads, run.model.kv_heads
    for name, title in (("train_tp", "tensor-parallel"), ("train_sp", "sequence-parallel")):
        size = getattr(run, name)
        if not _divides(heads, size):
            good = [found for found in near_divisors(heads, size, run.train_gpus) if run.train_gpus % found == 0]
            yield CheckFinding(
                f"the trainer's {title} size {size} does not divide {heads} attention heads",
                "attention is divided by heads",
                (name,),
                _set(name, good, "more or fewer replicas on the same GPUs"),
            )
    tp = run.train_tp
    whole = kv % tp == 0 or (run.train_backend == "megatron" and tp % kv == 0)
    if run.model.kv_shards > 1 and not whole and _divides(heads, tp):
        yield CheckFinding(
            f"the trainer's tensor-parallel size {tp} does not divide {kv} KV heads",
            "KV heads are not copied in training" if run.train_backend != "megatron" else "KV heads are divided evenly",
            ("train_tp",),
            _set("train_tp", near_divisors(kv, tp), "more or fewer replicas on the same GPUs"),
        )


def layers(run: RunSetup) -> Iterator[CheckFinding]:
    if run.model is None or run.train_pp == 1:
        return
    count, pp = run.model.layers, run.train_pp
    if pp > count or (not run.train_uneven_stages and count % pp):
        yield CheckFinding(
            f"{count} layers do not make {pp} equal pipeline stages",
            "Megatron divides layers evenly unless the first and last stage state their own number",
            ("train_pp",),
            _set("train_pp", near_divisors(count, pp, run.train_gpus), "more or fewer replicas on the same GPUs"),
        )


def experts(run: RunSetup) -> Iterator[CheckFinding]:
    if run.model is None or not run.model.experts:
        return
    count, ep = run.model.experts, run.train_ep
    if not _divides(count, ep):
        yield CheckFinding(
            f"the expert-parallel size {ep} does not divide {count} experts",
            "each GPU holds whole experts, as many as the others",
            ("train_ep",),
            _set("train_ep", near_divisors(count, ep, run.train_gpus)),
        )
    stage = run.train_gpus // run.train_pp
    if run.gpus and ep > 1 and not _divides(stage, ep * run.train_etp):
        good = [size for size in near_divisors(stage, ep) if count % size == 0]
        yield CheckFinding(
            f"{stage} GPUs of a pipeline stage are no multiple of ep x expert tp = {ep * run.train_etp}",
            "experts are divided over the GPUs of a stage",
            ("train_ep",),
            _set("train_ep", good),
        )


def gpus_of_training(run: RunSetup) -> Iterator[CheckFinding]:
    split = run.model_parallel
    if not run.gpus or _divides(run.train_gpus, split):
        return
    sizes = " x ".join(
        f"{name} {getattr(run, f'train_{name}')}"
        for name in ("tp", "pp", "cp", "sp")
        if getattr(run, f"train_{name}") > 1
    )
    widest = max(("tp", "pp", "cp", "sp"), key=lambda name: getattr(run, f"train_{name}"))
    largest = f"train_{widest}"
    rest = split // getattr(run, largest)
    good = near_divisors(run.train_gpus // rest, getattr(run, largest)) if run.train_gpus % rest == 0 else []
    yield CheckFinding(
        f"{run.train_gpus} GPUs of training are no multiple of {sizes} = {split}",
        "every replica has the same parallel sizes",
        ("gpus", largest),
        (
            *_set(largest, good, "other collectives, more replicas"),
            Remedy({"gpus": -(-run.train_gpus // split) * split + run.rollout_gpus}, "more GPUs"),
        ),
    )


def gpus_of_rollout(run: RunSetup) -> Iterator[CheckFinding]:
    if not run.gpus or _divides(run.engine_gpus, run.engine_size):
        return
    good = near_divisors(run.engine_gpus, run.rollout_tp)
    yield CheckFinding(
        f"{run.engine_gpus} GPUs of rollout are no multiple of an engine's {run.engine_size}",
        "every engine has the same size",
        ("rollout_tp",),
        _set("rollout_tp", good, "fewer or more engines on the same GPUs") if run.engine_size == run.rollout_tp else (),
    )


def width_of_rollout(run: RunSetup) -> Iterator[CheckFinding]:
    if run.model is None or run.model.experts or not run.model.mlp_width % run.rollout_tp:
        return
    yield CheckFinding(
        f"the engine's tensor-parallel size {run.rollout_tp} does not divide the MLP's width {run.model.mlp_width}",
        "columns of a matrix are divided evenly",
        ("rollout_tp",),
        _set("rollout_tp", near_divisors(run.model.heads, run.rollout_tp, run.engine_gpus)),
    )


# ---- nodes -----------------------------------------------------------------------------------------------------------


def across_nodes(run: RunSetup) -> Iterator[CheckFinding]:
    node = run.node_gpus
    if not run.gpus or run.gpus <= node:
        return
    for name, title in (("rollout_tp", "an engine's"), ("train_tp", "the trainer's")):
        tp = getattr(run, name)
        if tp > node:
            slower = run.gpu.intra_node_gbs / run.gpu.inter_node_gbs if run.gpu else 8.0
            yield CheckFinding(
                f"{title} tensor-parallel size {tp} spans nodes of {node} GPUs",
                f"each layer's all-reduces cross the network, {slower:.0f}x slower than links within a node",
                (name,),
                (Remedy({name: node}, "none: usually faster"),),
                "warning",
            )
        elif node % tp and tp > 1:
            yield CheckFinding(
                f"{title} tensor-parallel size {tp} does not divide the {node} GPUs of a node",
                "some groups would lie on two nodes",
                (name,),
                _set(name, near_divisors(node, tp)),
                "warning",
            )


def whole_nodes(run: RunSetup) -> Iterator[CheckFinding]:
    node = run.node_gpus
    if run.gpus and run.gpus > node and run.gpus % node:
        yield CheckFinding(
            f"{run.gpus} GPUs are no whole number of nodes of {node}",
            "workers are placed on nodes evenly",
            ("gpus",),
            _set("gpus", near_multiples(run.gpus, node), "fewer or more GPUs"),
            "warning",
        )


# ---- batches ---------------------------------------------------------------------------------------------------------


def samples_over_replicas(run: RunSetup) -> Iterator[CheckFinding]:
    """verl cuts a batch of samples into equal parts, one for each GPU, or each replica's micro-batches."""
    if run.dynamic or not run.samples or not run.gpus:
        return
    least = run.replicas * (run.micro_batch or 1) if run.train_backend == "megatron" else run.train_gpus
    if _divides(run.samples, least):
        return
    group = run.group or 1
    good = [size for size in near_multiples(run.samples, least) if size % group == 0] or [least * group]
    parts = f"{run.replicas} replicas x micro-batch {run.micro_batch}" if least != run.train_gpus else f"{least} GPUs"
    yield CheckFinding(
        f"{run.samples} samples of a step are no multiple of {parts}",
        "verl divides a batch into equal parts",
        ("prompts", "group"),
        tuple(Remedy({"prompts": size // group}, "another batch size") for size in good[:2]),
    )


def mini_batch_over_replicas(run: RunSetup) -> Iterator[CheckFinding]:
    if not run.mini_batch or not run.gpus:
        return
    group = run.group or 1
    if run.samples and run.samples < run.mini_batch:
        yield CheckFinding(
            f"a mini-batch of {run.mini_batch // group} prompts is larger than the batch of {run.prompts}",
            "a step has at least one mini-batch",
            ("mini_batch", "prompts"),
            (Remedy({"mini_batch": run.samples}, "one optimiser step for each batch"),),
        )
        return
    own, rest = divmod(run.mini_batch, run.replicas)
    least = run.replicas * (1 if run.dynamic else run.micro_batch or 1)
    # Releases before 0.7 wanted whole micro-batches; later ones have a smaller last one.
    whole = run.dynamic or not run.micro_batch or own % run.micro_batch == 0 or not within(run.version, "", "0.7")
    if own and not rest and whole:
        return
    share = run.mini_batch / run.replicas
    what = f"a mini-batch of {run.mini_batch} samples gives each of {run.replicas} replicas {share:g}"
    if own and not rest:
        what += f", no multiple of the micro-batch {run.micro_batch}"
    good = [size for size in near_multiples(run.mini_batch, least) if size % group == 0]
    fitting = near_divisors(own, run.micro_batch or 1) if own and not rest else []
    yield CheckFinding(
        what,
        "gradients are accumulated over whole micro-batches",
        ("mini_batch", "micro_batch"),
        (
            *_set("micro_batch", fitting),
            *(Remedy({"mini_batch": size}, "another batch of an optimiser step") for size in good[:1]),
            *(
                (Remedy({"mini_batch": run.samples}, "one optimiser step for each batch"),)
                if not own and run.samples
                else ()
            ),
        ),
    )


def global_batch(run: RunSetup) -> Iterator[CheckFinding]:
    """Trainers that take a global batch: whole micro-batches on each replica, and whole ones in a step."""
    if not run.mini_batch or not run.gpus:
        return
    micro = 1 if run.dynamic else run.micro_batch or 1
    least = run.replicas * micro
    if not _divides(run.mini_batch, least):
        good = near_multiples(run.mini_batch, least)
        yield CheckFinding(
            f"the global batch {run.mini_batch} is no multiple of {run.replicas} replicas x micro-batch {micro}",
            "gradients are accumulated over whole micro-batches on each replica",
            ("mini_batch", "micro_batch"),
            _set("mini_batch", good, "another batch of an optimiser step"),
        )
    if run.samples and run.samples < run.mini_batch:
        yield CheckFinding(
            f"a step has {run.samples} samples, fewer than the global batch {run.mini_batch}",
            "no optimiser step would be complete",
            ("mini_batch", "prompts"),
            (Remedy({"mini_batch": run.samples}, "one optimiser step for each batch"),),
        )
    elif run.samples and not _divides(run.samples, run.mini_batch):
        yield CheckFinding(
            f"a step's {run.samples} samples are no multiple of the global batch {run.mini_batch}",
            "the rest of a step would make no optimiser step",
            ("mini_batch", "prompts"),
            _set("mini_batch", near_divisors(run.samples, run.mini_batch), "another batch of an optimiser step"),
        )


def groups(run: RunSetup) -> Iterator[CheckFinding]:
    """TRL decodes a batch of samples in which every prompt has its whole group."""
    if run.group and run.samples_of_generation and not _divides(run.samples_of_generation, run.group):
        good = [size for size in near_divisors(run.samples_of_generation, run.group) if size > 1]
        yield CheckFinding(
            f"{run.samples_of_generation} samples of a generation are no multiple of {run.group} per prompt",
            "every prompt of a batch has its whole group",
            ("group", "micro_batch"),
            (*_set("group", good, "another group size"), Remedy({"micro_batch": run.group}, "more activations")),
        )


def single_answers(run: RunSetup) -> Iterator[CheckFinding]:
    if run.algorithm in ADVANTAGE_BY_GROUP and run.group == 1:
        yield CheckFinding(
            f"{run.algorithm} with one answer to a prompt",
            "an advantage is the distance to the mean of a prompt's answers: it would be 0",
            ("group",),
            (Remedy({"group": 8}, "eight answers to a prompt"),),
            "error" if run.framework in ("trl", "openrlhf") else "warning",
        )


def engines_and_trainer(run: RunSetup) -> Iterator[CheckFinding]:
    """With all models on the same GPUs, engines and trainer have as many."""
    if run.shared and run.engines and run.gpus and run.engines * run.engine_size != run.gpus:
        yield CheckFinding(
            f"{run.engines} engines of {run.engine_size} GPUs are not the trainer's {run.gpus} GPUs",
            "with all models on the same GPUs both have as many",
            ("engines",),
            (Remedy({"engines": run.gpus // run.engine_size}, NO_COST),) if run.gpus % run.engine_size == 0 else (),
        )


RULES = (
    CheckRule("rollout-heads", "sizes", heads_of_rollout, "vllm-project/vllm#414", "2026-11"),
    CheckRule(
        "rollout-width", "sizes", width_of_rollout, "vllm-project/vllm model_executor/layers/linear.py", "2026-11"
    ),
    CheckRule(
        "training-heads", "sizes", heads_of_training, "NVIDIA-NeMo/RL nemo_rl/models/dtensor/parallelize.py", "2026-11"
    ),
    CheckRule(
        "pipeline-layers", "sizes", layers, "NVIDIA/Megatron-LM core/transformer/transformer_config.py", "2026-11"
    ),
    CheckRule("experts", "sizes", experts, "NVIDIA/Megatron-LM core/parallel_state.py", "2026-11"),
    CheckRule(
        "training-gpus", "sizes", gpus_of_training, "NVIDIA-NeMo/RL nemo_rl/models/policy/lm_policy.py", "2026-11"
    ),
    CheckRule("rollout-gpus", "sizes", gpus_of_rollout, "vllm-project/vllm#596", "2026-11"),
    CheckRule("across-nodes", "nodes", across_nodes, "vllm-project/vllm#596", "2026-11"),
    CheckRule("whole-nodes", "nodes", whole_nodes, "NVIDIA-NeMo/RL nemo_rl/distributed/virtual_cluster.py", "2026-11"),
    CheckRule(
        "verl-samples", "sizes", samples_over_replicas, "verl-project/verl verl/utils/config.py", "2026-11", ("verl",)
    ),
    CheckRule("verl-mini-batch", "sizes", mini_batch_over_replicas, "PRIME-RL/TTRL#43", "2026-11", ("verl",)),
    CheckRule(
        "global-batch", "sizes", global_batch, "OpenRLHF/OpenRLHF#346", "2026-11", ("openrlhf", "nemo-rl", "slime")
    ),
    CheckRule("whole-groups", "sizes", groups, "huggingface/open-r1#249", "2026-11", ("trl",)),
    CheckRule("single-answers", "sizes", single_answers, "huggingface/trl#3199", "2026-11"),
    CheckRule(
        "as-many-gpus",
        "sizes",
        engines_and_trainer,
        "OpenRLHF/OpenRLHF openrlhf/cli/train_ppo_ray.py",
        "2026-11",
        ("openrlhf",),
    ),
)
