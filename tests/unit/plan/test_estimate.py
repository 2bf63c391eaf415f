from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.plan.estimate.answer import estimate
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.memory import MemorySettings, adapter_parameters, unfused_gb
from trimtab.plan.estimate.memory import estimate as memory_estimate
from trimtab.plan.estimate.serving import EngineReplica, decode_work, prefill_seconds, rollout_seconds, slots_of
from trimtab.plan.estimate.step import RunInputs, refit_seconds, step_time
from trimtab.plan.estimate.training import Trainer, pass_time

H100 = catalogue.gpu("h100")
LLAMA = catalogue.model("llama-3.1-8b")[1]
DENSE = catalogue.model("qwen3-32b")[1]
SPARSE = catalogue.model("qwen3-30b-a3b")[1]
C = CONSTANTS


def run(**changes: Any) -> RunInputs:
    base = RunInputs(
        model=LLAMA,
        gpu=H100,
        gpus=16,
        samples=2048,
        train_batch=512,
        lengths=Lengths.capped(1060, 4096, 200),
        engine=EngineReplica(LLAMA, H100),
        trainer=Trainer(LLAMA, H100, 16, pp=2, recompute=False),
    )
    return replace(base, **changes)


def apart(**changes: Any) -> RunInputs:
    return run(rollout_gpus=8, mode="async", trainer=Trainer(LLAMA, H100, 8, recompute=False), **changes)


def seconds(engine: EngineReplica, batch: float, context: float) -> float:
    return float(decode_work(engine, batch, context).seconds(C))


@given(st.floats(300, 4000), st.floats(4001, 40_000), st.floats(1, 250))
@settings(max_examples=50, deadline=None)
def test_capped_lengths_have_the_mean_and_the_limit_that_were_given(mean: float, most: float, prompt: float) -> None:
    lengths = Lengths.capped(mean, most, prompt)
    assert sum(share for _, share in lengths.answers) == pytest.approx(1)
    assert lengths.mean == pytest.approx(mean, rel=0.03)
    assert lengths.longest == pytest.approx(most)
    assert lengths.squares >= lengths.mean * 0.999
    widths, middles, alive = lengths.grid(10_000)
    assert np.all(np.diff(middles) > 0)
    assert np.all(np.diff(alive) <= 0)
    assert widths.sum() <= most


def test_a_mean_beyond_the_limit_is_refused() -> None:
    with pytest.raises(InputError, match="does not lie between"):
        Lengths.capped(5000, 4096, 200)


def test_measured_lengths_are_taken_as_they_are() -> None:
    lengths = Lengths.of(((100.0, 0.5), (300.0, 0.5)), 50)
    assert (lengths.mean, lengths.longest) == (200, 300)


def test_a_decode_step_takes_longer_with_more_sequences_and_longer_ones() -> None:
    engine = EngineReplica(LLAMA, H100)
    took = [seconds(engine, batch, context) for batch, context in ((1, 1000), (64, 1000), (256, 1000), (256, 4000))]
    assert took == sorted(took)
    assert 0.004 < seconds(engine, 1, 1000) < 0.012  # 16 GB at 3.35 TB/s are 4.8 ms


def test_more_sequences_touch_more_experts() -> None:
    engine = EngineReplica(SPARSE, H100)
    few, many = (decode_work(engine, batch, 1000.0).experts for batch in (1.0, 256.0))
    assert few * 10 < many < SPARSE.expert_parameters * 2 / H100.bandwidth


def test_links_between_nodes_slow_an_engine_down() -> None:
    inside, across = (decode_work(EngineReplica(DENSE, H100, tp=tp), 64.0, 1000.0) for tp in (8, 16))
    assert across.hops > 2 * inside.hops
    assert across.link > inside.link


def test_smaller_weights_decode_faster() -> None:
    whole = EngineReplica(DENSE, H100)
    assert seconds(replace(whole, precision="fp8"), 8, 1000) < 0.7 * seconds(whole, 8, 1000)


def test_an_engine_that_streams_its_tokens_spends_more_on_each_sequence() -> None:
    streams = replace(EngineReplica(LLAMA, H100), streams=True)
    few, many = (seconds(streams, batch, 1000) - seconds(EngineReplica(LLAMA, H100), batch, 1000) for batch in (1, 256))
    assert 0 < few < many


def test_prompts_alone_take_no_less_than_launching_their_steps_and_need_the_head_once_a_sequence() -> None:
    engine = EngineReplica(LLAMA, H100)
    short, whole, many = (prefill_seconds(engine, C, count, 1024) for count in (0.1, 8, 32))
    assert short == pytest.approx(LLAMA.layers * C.prefill_layer_us * 1e-6)
    assert whole > short
    assert many == pytest.approx(4 * whole)
    every_token = 32 * 1024 * 2 * LLAMA.matmul_parameters / H100.flops("bf16")
    assert many > every_token / C.prefill_share * (1 - LLAMA.head / LLAMA.matmul_parameters)
    assert many / 8 < prefill_seconds(replace(engine, tp=8), C, 32, 1024) < many / 2  # narrower matrices, and links


def test_a_rollout_lasts_at_least_as_long_as_its_longest_answers() -> None:
    lengths = Lengths.capped(1060, 4096, 200)
    engine = EngineReplica(LLAMA, H100)
    whole = rollout_seconds(engine, 16, 2048, lengths, 1024, C)
    assert whole > 3896 * seconds(engine, 1, 4096) * 0.9
    assert rollout_seconds(engine, 16, 2048, lengths, 16, C) > whole  # in waves
    assert rollout_seconds(engine, 16, 2048, lengths, 1024, C, steady=1.0) < whole  # without the tail


def test_the_cache_limits_how_many_sequences_run_at_once() -> None:
    lengths = Lengths.capped(3206, 4096, 200)
    slots, limit = slots_of(EngineReplica(DENSE, H100, tp=4), lengths, 0.6, 1024, 4.0)
    assert limit == "KV cache"
    assert 100 < slots < 400
    assert slots_of(EngineReplica(DENSE, H100), lengths, 0.6, 1024, 4.0)[0] == 0
    assert slots_of(EngineReplica(LLAMA, H100), lengths, 0.9, 8, 4.0) == (8, "max sequences")


def test_an_update_costs_three_forward_passes_and_four_with_recompute() -> None:
    kept = Trainer(LLAMA, H100, 1, recompute=False)
    forward = pass_time(kept, 1e5, 2000, 1, C, backward=False).compute
    assert pass_time(kept, 1e5, 2000, 1, C, backward=True).compute == pytest.approx(3 * forward)
    again = pass_time(replace(kept, recompute=True), 1e5, 2000, 1, C, backward=True)
    assert again.compute == pytest.approx(4 * forward)
    assert pass_time(replace(kept, lora_rank=16), 1e5, 2000, 1, C, backward=True).compute < 3 * forward


def test_small_micro_batches_of_an_eager_trainer_are_bound_by_kernel_launches() -> None:
    eager = Trainer(LLAMA, H100, 1, fsdp=True, micro_tokens=256.0)
    few, many = (pass_time(eager, tokens, 256, 1, C, backward=True) for tokens in (256, 2560))
    assert few.limit == many.limit == "kernel launches"
    assert few.seconds == pytest.approx(4 * LLAMA.layers * C.launch_ms * 1e-3)
    assert many.seconds == pytest.approx(10 * few.seconds)
    wide = pass_time(replace(eager, micro_tokens=2560.0), 2560, 256, 1, C, backward=True)
    assert wide.seconds < many.seconds / 3
    assert pass_time(replace(eager, fsdp=False), 256, 256, 1, C, backward=True).launches == 0


def test_pipelines_have_bubbles_and_parallel_training_crosses_links() -> None:
    plain = pass_time(Trainer(LLAMA, H100, 16), 1e6, 2000, 4, C, backward=True)
    deep = pass_time(Trainer(LLAMA, H100, 16, pp=4), 1e6, 2000, 4, C, backward=True)
    assert plain.bubble == 0 < deep.bubble
    wide = pass_time(Trainer(LLAMA, H100, 16, tp=8), 1e6, 2000, 4, C, backward=True)
    assert wide.links > plain.links
    sparse = Trainer(SPARSE, H100, 32)
    inside = pass_time(replace(sparse, ep=8), 1e6, 2000, 4, C, backward=False)
    assert pass_time(replace(sparse, ep=32), 1e6, 2000, 4, C, backward=False).links > inside.links


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["sync", "async"]), st.integers(64, 4096))
@settings(max_examples=40, deadline=None)
def test_more_gpus_never_make_a_step_slower(factor: int, mode: str, samples: int) -> None:
    def took(gpus: int) -> float:
        own = gpus // 2 if mode == "async" else gpus
        trainer = Trainer(LLAMA, H100, own, recompute=False)
        rollout = gpus - own
        return step_time(
            run(gpus=gpus, samples=samples, train_batch=samples, rollout_gpus=rollout, mode=mode, trainer=trainer), C
        ).seconds

    assert took(16 * factor) <= took(16) * 1.02


def test_training_waits_for_the_samples_that_may_not_be_of_older_weights() -> None:
    ahead, half, none = (step_time(apart(staleness=staleness), C) for staleness in (1.0, 0.5, 0.0))
    generate = ahead.stage("generate")
    others = none.seconds - generate
    assert ahead.seconds < half.seconds < none.seconds
    assert half.seconds == pytest.approx(max(ahead.seconds, others + generate / 2))
    assert step_time(apart(staleness=0.5, partial=True), C).seconds < half.seconds


def test_asynchronous_training_hides_the_shorter_side() -> None:
    found = step_time(apart(), C)
    shown = {stage.name: stage for stage in found.stages}
    assert shown["generate"].beside
    assert found.seconds < sum(stage.seconds for stage in found.stages)
    assert step_time(run(), C).seconds == pytest.approx(sum(stage.seconds for stage in step_time(run(), C).stages))


def test_algorithms_decide_which_passes_exist() -> None:
    names = {stage.name for stage in step_time(run(passes=("old", "reference", "critic")), C).stages}
    assert {"old log-probs", "reference log-probs", "values", "critic update"} <= names
    assert "reference log-probs" not in {stage.name for stage in step_time(run(passes=("old",)), C).stages}


def test_transports_differ_and_small_models_sync_faster() -> None:
    engines = [EngineReplica(model, H100) for model in (DENSE, LLAMA)]
    big, small = (refit_seconds(engine.model, engine, "broadcast", C, shared=False) for engine in engines)
    assert small < big
    assert refit_seconds(DENSE, EngineReplica(DENSE, H100), "packed", C, shared=False) < big


def test_the_interval_holds_the_likely_value_and_is_no_wider_than_two_and_a_half() -> None:
    found = estimate(run(), C)
    assert found.seconds.low < found.seconds.likely < found.seconds.high
    assert found.seconds.high / found.seconds.low <= 2.5
    assert found.gpu_hours(10).likely == pytest.approx(found.seconds.likely * 10 / 3600 * 16)
    assert 0 < found.mfu < 0.6


def test_staleness_is_zero_in_step_and_bounded_beside_it() -> None:
    assert (estimate(run(), C).mean_staleness, estimate(run(), C).greatest_staleness) == (0, 0)
    found = estimate(apart(staleness=2.0), C)
    assert 0 < found.mean_staleness <= found.greatest_staleness == 2


def test_memory_is_told_for_every_phase_with_both_sets_of_weights() -> None:
    phases = {phase.name: phase for phase in estimate(run(), C).phases}
    assert set(phases) == {"generate", "log-probs", "update", "wake with both weights"}
    assert phases["generate"].gb == pytest.approx(80 * 0.6 + dict(phases["generate"].terms)["process"])
    assert all(phase.high_gb >= phase.gb for phase in phases.values())
    assert "wake with both weights" not in {phase.name for phase in estimate(apart(), C).phases}


def test_the_stated_high_has_the_scores_of_heads_that_no_fused_kernel_may_have() -> None:
    gemma, narrow = catalogue.model("gemma-4-e2b")[1], catalogue.model("gemma-2-2b")[1]
    assert (gemma.widest_head, narrow.widest_head) == (512, 256)
    assert unfused_gb(gemma, 8, 4096) == pytest.approx(16 * 8 * 8 * 4096**2 / 2**30)
    assert unfused_gb(narrow, 8, 4096) == 0
    wide = run(model=gemma, trainer=Trainer(gemma, H100, 16, recompute=False, micro_tokens=8192))
    update = next(phase for phase in estimate(wide, C).phases if phase.name == "update")
    assert update.residue_gb == pytest.approx(C.residue_gb + unfused_gb(gemma, 8192 / 4096, 4096))


def test_lent_gpus_hold_an_engine_beside_a_trainer_that_sleeps() -> None:
    lent, kept = ({phase.name: phase for phase in estimate(apart(lend=each), C).phases} for each in (True, False))
    assert set(lent) - set(kept) == {"wake with both weights"}
    assert (lent["generate"].residue_gb, kept["generate"].residue_gb) == (C.residue_gb, 0)


def test_adapters_need_no_gradients_of_the_frozen_weights() -> None:
    whole, _, _ = memory_estimate(LLAMA, MemorySettings(gpus=1, zero=0))
    adapted, _, _ = memory_estimate(LLAMA, MemorySettings(gpus=1, zero=0, lora_rank=16))
    assert adapted.active_gb < 0.5 * whole.active_gb
    assert {term.name for term in adapted.active} >= {"weights", "adapters"}
    assert adapter_parameters(LLAMA, 16) == 41_943_040  # as published for rank 16 on all linear layers
    assert adapter_parameters(LLAMA, 16, attention_only=True) < 41_943_040 / 2


@pytest.mark.parametrize(
    ("name", "gpus", "engine_tp", "train", "mean", "measured"),
    [
        ("llama-3.1-8b", 16, 1, {"pp": 2}, 1019, 92.8),
        ("qwen3-32b", 32, 4, {"tp": 4, "pp": 4}, 3251, 376.0),
        ("qwen3-30b-a3b", 32, 2, {"ep": 8}, 3196, 198.0),
    ],
)
def test_published_steps_lie_within_the_stated_interval(
    name: str, gpus: int, engine_tp: int, train: dict[str, int], mean: float, measured: float
) -> None:
    model = catalogue.model(name)[1]
    found = estimate(
        run(
            model=model,
            gpus=gpus,
            lengths=Lengths.capped(mean, 4096, 200),
            engine=EngineReplica(model, H100, tp=engine_tp),
            trainer=Trainer(model, H100, gpus, **train, recompute=False),
        ),
        C,
    )
    assert found.seconds.low <= measured <= found.seconds.high
    assert math.isfinite(found.tokens_per_gpu)
