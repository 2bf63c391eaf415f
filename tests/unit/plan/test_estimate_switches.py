"""Each switch is a term of the model that pays where its condition says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.formats import catalogue
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.serving import EngineReplica, step_seconds
from trimtab.plan.estimate.step import RunInputs, refit_seconds
from trimtab.plan.estimate.training import Trainer
from trimtab.plan.estimate.what_if import SWITCHES, changed, what_if

C = CONSTANTS


def run(gpu: str = "h100", samples: int = 512, name: str = "qwen3-8b") -> RunInputs:
    model, kind = catalogue.model(name)[1], catalogue.gpu(gpu)
    return RunInputs(
        model=model,
        gpu=kind,
        gpus=16,
        samples=samples,
        train_batch=samples,
        lengths=Lengths.capped(2000, 8192, 200),
        engine=EngineReplica(model, kind),
        trainer=Trainer(model, kind, 16, tp=2, micro_tokens=8192),
    )


def test_speculation_pays_with_few_sequences_on_fast_gpus_and_costs_with_many_on_slow_ones() -> None:
    assert what_if(run("h100", 256), "spec-decode:0.77:3", C).stage_speedup("generate") > 1.5
    assert what_if(run("h20", 16_384), "spec-decode:0.3:4", C).stage_speedup("generate") < 0.9


def test_drafts_that_are_never_accepted_only_cost() -> None:
    assert what_if(run(), "spec-decode:0:3", C).speedup < 1
    engine = EngineReplica(run().model, run().gpu, draft_tokens=3.0, accepted=0.5)
    assert engine.tokens_per_step == 2.5
    plain = replace(engine, draft_tokens=0.0)
    assert float(step_seconds(engine, C, 32.0, 1000.0)) > float(step_seconds(plain, C, 32.0, 1000.0))


def test_smaller_weights_pay_most_where_reading_them_bounds() -> None:
    few, many = (what_if(run(samples=samples), "fp8-rollout", C).stage_speedup("generate") for samples in (32, 16_384))
    assert few > 1.05
    assert many > 1


def test_deltas_are_found_by_each_gpu_of_the_trainer() -> None:
    engine = EngineReplica(run().model, run().gpu)
    few, many = (
        refit_seconds(engine.model, engine, "delta", C, shared=False, trainers=trainers) for trainers in (8, 64)
    )
    whole = refit_seconds(engine.model, engine, "broadcast", C, shared=False)
    assert many < few < whole


def test_asynchrony_takes_the_split_that_is_given_or_the_fastest() -> None:
    fastest, _ = changed(run(), "async:1", C)
    given, _ = changed(run(), "async:2:12", C)
    assert (given.rollout_gpus, given.staleness, given.mode) == (12, 2.0, "async")
    assert what_if(run(), "async:1", C).after.seconds <= what_if(run(), "async:1:12", C).after.seconds
    assert fastest.trainer.gpus + fastest.rollout_gpus == 16


def test_adapters_move_and_multiply_less() -> None:
    found = what_if(run(), "lora", C)
    assert found.stage_speedup("update") > 1
    assert found.stage_speedup("switch") > 1
    assert found.stage_speedup("generate") == pytest.approx(1)


def test_every_switch_of_the_evidence_is_known() -> None:
    for row in catalogue.table("switches"):
        names = {part.partition(":")[0] for part in row["switch"].split("+")}
        assert names <= set(SWITCHES)
        assert float(row["before"]) > 0 < float(row["after"])
        assert row["date"]
        assert row["source"]
