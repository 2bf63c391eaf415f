"""Each switch is a term of the model that pays where its condition says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.phases import phases
from trimtab.plan.estimate.serving import EngineReplica, step_seconds
from trimtab.plan.estimate.step import RunInputs, refit_seconds, step_time
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


def lent_by_hand(run: RunInputs) -> float:
    """Seconds of a generation: a fluid that flows at one rate, and faster while trainers have nothing to do."""
    alone = step_time(run, C)
    trains = sum(stage.seconds for stage in alone.stages if not stage.beside and stage.name != "refit")
    everywhere = step_time(replace(run, rollout_gpus=run.gpus), C).stage("generate")
    shared = step_time(replace(run, rollout_gpus=0, mode="sync", gpus=run.trainer.gpus), C)
    joined = trains + shared.stage("switch") + shared.stage("refit")
    done, now, step = 0.0, 0.0, 0.01
    while done < 1:
        done += step / (alone.stage("generate") if now < joined else everywhere)
        now += step
    return now


def test_idle_trainers_decode_from_the_end_of_training_less_the_switch() -> None:
    waits = replace(changed(run(), "async:1:4", C)[0], partial=True)
    found = what_if(waits, "lend", C)
    assert found.speedup > 1.2
    assert found.after.stage("generate") == pytest.approx(lent_by_hand(waits), rel=1e-3)
    assert found.after.stage("update") == found.before.stage("update")
    assert {phase.name for phase in phases(found.run, C)[0]} >= {"wake with both weights"}


def test_lending_gains_nothing_where_training_lasts_longer_or_the_switch_does() -> None:
    trains = replace(changed(run(), "async:1:12", C)[0], partial=True)
    assert what_if(trains, "lend", C).speedup == pytest.approx(1)
    slow = replace(C, host_share=1e-4)
    waits = replace(changed(run(), "async:1:4", C)[0], partial=True)
    assert step_time(replace(waits, lend=True), slow).seconds == pytest.approx(step_time(waits, slow).seconds)


def test_trainers_that_wait_for_new_samples_lend_longer() -> None:
    """On-policy samples are waited for from the start: all of that time but the switch is lent."""
    waits = replace(changed(run(), "async:0:4", C)[0], staleness=0.0)
    found = what_if(waits, "lend", C)
    assert found.before.seconds > found.after.seconds > found.after.stage("generate")
    everywhere = step_time(replace(waits, rollout_gpus=16), C).stage("generate")
    assert found.after.stage("generate") > everywhere


def test_weights_that_are_sent_every_fourth_step_cost_a_quarter() -> None:
    ahead = changed(run(), "async:1:8", C)[0]
    found = what_if(ahead, "sync-every:4", C)
    assert found.stage_speedup("refit") == pytest.approx(4)
    assert found.run.staleness == 3
    assert what_if(run(), "sync-every:4+async:1:8", C).run == found.run
    with pytest.raises(InputError, match="synchronous"):
        what_if(run(), "sync-every:2", C)


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
