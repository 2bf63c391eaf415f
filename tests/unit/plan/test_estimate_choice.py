"""What was not given is chosen: the choice fits, is as fast as any that fits, and uses no more GPUs than it must."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trimtab.formats import catalogue
from trimtab.plan.estimate.choose import FRACTIONS, SIZES, Freedom, choose, even_stages, fits, on, smallest
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.phases import phases
from trimtab.plan.estimate.serving import EngineReplica
from trimtab.plan.estimate.step import RunInputs, step_time
from trimtab.plan.estimate.training import Trainer

C = CONSTANTS
ALL = Freedom(engine=True, fraction=True, trainer=True, micro_batch=True)


def run(name: str = "llama-3.1-8b", gpu: str = "h100", gpus: int = 16, apart: int = 0) -> RunInputs:
    model, kind = catalogue.model(name)[1], catalogue.gpu(gpu)
    return RunInputs(
        model=model,
        gpu=kind,
        gpus=gpus,
        samples=1024,
        train_batch=256,
        lengths=Lengths.capped(1060, 4096, 200),
        engine=EngineReplica(model, kind),
        trainer=Trainer(model, kind, gpus - apart, micro_tokens=4096),
        rollout_gpus=apart,
        mode="async" if apart else "sync",
    )


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "qwen3-32b"])
@pytest.mark.parametrize("gpus", [16, 32])
def test_the_choice_fits_and_no_obvious_other_is_clearly_faster(name: str, gpus: int) -> None:
    base = run(name, gpus=gpus)
    chosen = choose(base, ALL, "all", C)
    assert chosen is not None
    assert fits(chosen, "all", C)
    best = step_time(chosen, C).seconds
    for tp, pp, rollout, fraction in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), FRACTIONS):
        if gpus % (tp * pp) or pp not in even_stages(base.model):
            continue
        trainer = Trainer(base.model, base.gpu, gpus, tp=tp, pp=pp, recompute_timed=False, micro_tokens=4096)
        engine = replace(base.engine, tp=rollout)
        other = replace(base, trainer=trainer, engine=engine, memory_fraction=fraction)
        step = step_time(other, C)
        if step.slots >= 1 and fits(other, "all", C):
            assert best <= step.seconds * 1.05


def test_the_smallest_count_fits_and_no_smaller_one_does() -> None:
    found = smallest(run("qwen2.5-7b"), ALL, "all", C)
    assert found is not None
    smaller = [size for size in SIZES if size < found.gpus]
    assert smaller
    assert all(choose(on(found, size), ALL, "all", C) is None for size in smaller)
    larger = smallest(run("qwen3-32b"), ALL, "all", C)
    assert larger is not None
    assert larger.gpus > found.gpus
    adapters = run("qwen2.5-7b")
    cheap = smallest(replace(adapters, trainer=replace(adapters.trainer, lora_rank=16)), ALL, "all", C)
    assert cheap is not None
    assert cheap.gpus < found.gpus


def test_what_is_not_free_stays() -> None:
    base = run("llama-3.1-8b")
    base = replace(base, trainer=replace(base.trainer, tp=4, pp=2), memory_fraction=0.55)
    chosen = choose(base, Freedom(engine=True), "all", C)
    assert chosen is not None
    assert (chosen.trainer, chosen.memory_fraction) == (base.trainer, 0.55)
    assert choose(replace(base, gpus=12, trainer=replace(base.trainer, gpus=12)), Freedom(), "all", C) is None


def test_the_split_of_an_asynchronous_run_balances_its_sides() -> None:
    chosen = choose(run(gpus=32, apart=8), replace(ALL, split=True), "all", C)
    assert chosen is not None
    fixed = [choose(run(gpus=32, apart=apart), ALL, "all", C) for apart in (8, 16, 24)]
    times = [step_time(each, C).seconds for each in fixed if each]
    assert step_time(chosen, C).seconds <= min(times) * 1.05


def test_nothing_fits_on_one_small_gpu() -> None:
    assert choose(run("qwen3-32b", "l4", 1), ALL, "all", C) is None


def test_frameworks_with_one_kind_of_training_get_that_kind() -> None:
    for backend in ("fsdp", "megatron"):
        chosen = choose(run(), replace(ALL, backends=(backend,)), "all", C)
        assert chosen is not None
        assert chosen.trainer.fsdp is (backend == "fsdp")


def test_a_critic_needs_room_of_its_own() -> None:
    base = run("qwen2.5-32b")
    both = smallest(replace(base, passes=("old", "reference", "critic")), ALL, "all", C)
    alone = smallest(base, ALL, "all", C)
    assert both is not None
    assert alone is not None
    assert both.gpus > alone.gpus


def test_experts_are_divided_over_no_more_gpus_than_there_are() -> None:
    base = run("qwen3-30b-a3b", gpus=8)
    trainer = replace(base.trainer, tp=4, ep=8, fsdp=False)
    weights = [dict(phases(replace(base, trainer=replace(trainer, tp=tp)), C)[0][2].terms)["weights"] for tp in (1, 4)]
    share = base.model.expert_parameters * 2 / 8 / 2**30
    assert all(each >= share for each in weights)
