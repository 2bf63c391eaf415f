"""Rules of the engine's cache and context: what it holds, what is preempted, and what it refuses at its start."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from trimtab.plan.check import cures, gpu_memory
from trimtab.plan.check.cures import Change
from trimtab.plan.check.findings import CheckFinding, CheckRule, Remedy
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.serving import EngineReplica, rollout_seconds

MORE_ROOM = (
    Change(cures.more_share, cures.free("less memory for what shares the GPU")),
    Change(cures.wider_engine, cures.free("collectives in each decode step, fewer engines")),
    Change(cures.flag("rollout_kv", "fp8"), cures.free("an 8-bit cache: check the answers' quality")),
)
DEFAULT_SEQUENCES = {"vllm": 256, "sglang": 1024}


def no_room(run: RunSetup) -> Iterator[CheckFinding]:
    model, gpu = run.model, run.gpu
    if model is None or gpu is None or not run.rollout_memory:
        return
    if gpu_memory.cache_gb(run, model, gpu) > 0:
        return
    yield CheckFinding(
        "no memory for the engine's cache",
        f"weights {gpu_memory.engine_weights(run, model):.1f} GB and activations "
        f"{gpu_memory.prefill_gb(run, model):.1f} GB fill its share of {gpu_memory.engine_share(run, gpu):.1f} GB",
        ("rollout_memory", "rollout_tp"),
        cures.tried(run, MORE_ROOM, lambda other: gpu_memory.cache_gb(other, model, gpu) > 0.02 * gpu.memory_gb),
    )


def one_sequence(run: RunSetup) -> Iterator[CheckFinding]:
    """An engine refuses to start if its longest sequence does not fit into the cache."""
    model, gpu, length = run.model, run.gpu, run.held_tokens
    if model is None or gpu is None or not run.rollout_memory or not length:
        return
    held = gpu_memory.cache_tokens(run, model, gpu, length)
    if not held or held >= length:
        return

    def fits(changed: RunSetup) -> bool:
        needed = changed.held_tokens or 0
        return gpu_memory.cache_tokens(changed, model, gpu, needed) >= needed

    least = run.longest or 0
    shorter = (Remedy({"rollout_max_length": least}, "nothing: no answer is longer"),) if least < held else ()
    yield CheckFinding(
        f"the engine's cache holds {held:,.0f} tokens, fewer than one sequence of {length:,}",
        "an engine that cannot hold its longest sequence does not start",
        ("rollout_max_length", "rollout_memory"),
        (*shorter, *cures.tried(run, MORE_ROOM, fits)),
    )


def preempted(run: RunSetup) -> Iterator[CheckFinding]:
    """Answers that are thrown out of the cache as they grow, and computed again."""
    model, gpu, longest = run.model, run.gpu, run.longest
    if model is None or gpu is None or not run.rollout_memory or not run.samples or not longest:
        return
    lengths = lengths_of(run)
    engines = max(1, run.engine_gpus // run.engine_size)
    most = run.rollout_sequences or DEFAULT_SEQUENCES.get(run.rollout_backend, 256)
    together = min(most * run.rollout_dp, math.ceil(run.samples / engines))
    capacity = gpu_memory.cache_tokens(run, model, gpu, lengths.mean)
    peak = peak_tokens(lengths, together)
    if not capacity or peak <= capacity or capacity < (run.held_tokens or 0):
        return
    engine = EngineReplica(model, gpu, run.engine_size, run.rollout_dp, run.rollout_precision, run.rollout_kv)
    slots = together * capacity / peak
    seconds = [rollout_seconds(engine, engines, run.samples, lengths, count, CONSTANTS) for count in (together, slots)]
    again = (1 - slots / together) * run.samples / engines * lengths.mean / 2
    computed = again * 2 * model.active_parameters / (run.engine_size * gpu.flops(run.rollout_precision) * 0.5)
    cost = max(0.0, seconds[1] - seconds[0]) + computed

    def fits(changed: RunSetup) -> bool:
        return not list(preempted(changed)) and not list(no_room(changed))

    fewer = max(1, math.floor(slots))
    queue = Remedy({"rollout_sequences": fewer}, "answers wait in a queue instead of being computed twice")
    yield CheckFinding(
        f"answers will be preempted: {together} at a time grow to {peak:,.0f} tokens, an engine's cache holds "
        f"{capacity:,.0f}",
        f"about {1 - slots / together:.0%} of them are thrown out and computed again: some {cost:,.0f} s more of "
        f"{seconds[0]:,.0f} s of generation a step",
        ("rollout_memory", "rollout_sequences"),
        (*cures.tried(run, MORE_ROOM, fits), queue),
        "warning",
    )


def lengths_of(run: RunSetup) -> Lengths:
    """As given, or as assumed by the longest."""
    longest = float(run.longest or 1)
    mean = min(run.mean or longest, longest)
    prompt = min(float(run.prompt_tokens or 200) / (1 if not run.answer_tokens else 2), mean / 2)
    return Lengths.capped(max(mean, prompt + 1), max(longest, prompt + 2), prompt)


def peak_tokens(lengths: Lengths, together: int) -> float:
    """The most tokens that so many answers hold at once when they start together and leave as they end."""
    _, middles, alive = lengths.grid(together)
    return float(np.max((lengths.prompt + middles) * alive)) * together


def context(run: RunSetup) -> Iterator[CheckFinding]:
    for name, length in (("rollout_max_length", run.rollout_max_length), ("answer_tokens", run.longest)):
        if run.positions and length and length > run.positions:
            yield CheckFinding(
                f"{length:,} tokens of a sequence are more than the model's {run.positions:,} positions",
                "an engine refuses a longer context than the model was made for, unless its rope is scaled",
                (name,),
                (
                    Remedy(
                        {name: run.positions - ((run.prompt_tokens or 0) if name == "answer_tokens" else 0)},
                        "shorter answers",
                    ),
                ),
            )
            return


def shorter_than_asked(run: RunSetup) -> Iterator[CheckFinding]:
    if run.rollout_max_length and run.longest and run.rollout_max_length < run.longest:
        yield CheckFinding(
            f"the engine's context of {run.rollout_max_length:,} tokens is below prompt and answer, {run.longest:,}",
            "long prompts are refused or answers cut",
            ("rollout_max_length",),
            (Remedy({"rollout_max_length": run.longest}, "nothing, where the cache holds it"),),
            "error" if run.prompt_tokens and run.prompt_tokens >= run.rollout_max_length else "warning",
        )


def batched_tokens(run: RunSetup) -> Iterator[CheckFinding]:
    """Without chunked prefill a whole prompt goes into one step."""
    length = run.held_tokens
    if run.rollout_backend != "vllm" or run.rollout_chunked or not run.rollout_batched_tokens or not length:
        return
    if run.rollout_batched_tokens < length:
        yield CheckFinding(
            f"max_num_batched_tokens {run.rollout_batched_tokens:,} is below the context of {length:,} tokens",
            "without chunked prefill vLLM refuses to start",
            ("rollout_batched_tokens", "rollout_chunked"),
            (
                Remedy({"rollout_chunked": True}, "nothing"),
                Remedy({"rollout_batched_tokens": length}, "more memory for activations of a prefill"),
            ),
        )


def tokens_of_a_micro_batch(run: RunSetup) -> Iterator[CheckFinding]:
    """With dynamic batches a sequence that is longer than the limit makes verl stop."""
    longest, divided = run.longest, run.train_cp * run.train_sp
    if not run.dynamic or not longest:
        return
    for name in ("micro_tokens", "logprob_tokens"):
        tokens = getattr(run, name)
        if tokens and tokens * divided < longest:
            yield CheckFinding(
                f"a micro-batch of {tokens * divided:,} tokens does not hold one sequence of {longest:,}",
                "the run stops at the first answer of that length",
                (name,),
                (Remedy({name: -(-longest // divided)}, "more activations: see GPU memory"),),
            )


RULES = (
    CheckRule("no-cache", "kv cache", no_room, "vllm-project/vllm#2248", "2026-11"),
    CheckRule("one-sequence", "kv cache", one_sequence, "OpenRLHF/OpenRLHF#336", "2026-11"),
    CheckRule("preempted", "kv cache", preempted, "rllm-org/rllm#93", "2026-11"),
    CheckRule("positions", "context", context, "verl-project/verl vllm_async_server.py", "2026-11"),
    CheckRule("engine-context", "context", shorter_than_asked, "verl-project/verl vllm_async_server.py", "2026-11"),
    CheckRule("batched-tokens", "sizes", batched_tokens, "verl-project/verl#7624", "2026-11"),
    CheckRule(
        "micro-batch-tokens",
        "sizes",
        tokens_of_a_micro_batch,
        "verl-project/verl seqlen_balancing.py",
        "2026-11",
        ("verl",),
    ),
)
