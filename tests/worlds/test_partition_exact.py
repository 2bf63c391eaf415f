"""The partition search against a slow, obvious planner that shares no code with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import obvious_partition as obvious
from trimtab.core.errors import InfeasibleError
from trimtab.model.pipeline import PartitionAnswer, PipelineJob
from trimtab.plan.partition import paths as partition_paths
from trimtab.plan.partition import planner as partition
from trimtab.plan.partition.planner import plan_partition

CHUNKS = 32
PER_CHUNK = 100


def check_schedule(job: PipelineJob, answer: PartitionAnswer) -> None:
    """The schedule is one: all layers in order, on hosts of the job, each once, within memory."""
    stages = answer.schedule.stages
    assert [stage.first for stage in stages] == [1, *(stage.last + 1 for stage in stages[:-1])]
    assert stages[-1].last == job.model.layers
    assert len({stage.host for stage in stages}) == len(stages) <= (job.max_devices or len(stages))
    for stage in stages:
        assert stage.memory_bytes == pytest.approx(obvious.memory(job, stage.first, stage.last))
        assert stage.memory_bytes < stage.memory_available_bytes
        assert stage.compute_seconds == pytest.approx(sum(job.type_of(stage.host).time_s[stage.first - 1 : stage.last]))


def compare(job: PipelineJob) -> bool:
    """Check one job for both objectives; whether it had a schedule at all."""
    found = list(obvious.schedules(job))
    for objective in ("throughput", "latency"):
        want = obvious.best(found, objective)
        if want is None:
            with pytest.raises(InfeasibleError):
                plan_partition(job, objective)
            continue
        answer = plan_partition(job, objective)
        check_schedule(job, answer)
        schedule = answer.schedule
        assert answer.optimal
        assert answer.ties_proven
        if objective == "throughput":
            assert schedule.bottleneck_seconds == pytest.approx(want[0], rel=2e-9)
        assert schedule.latency_seconds == pytest.approx(want[1], rel=2e-9)
        assert len(schedule.stages) == want[2]
        least = want[0] if objective == "throughput" else want[1]
        assert answer.lower_bound_seconds == pytest.approx(least, rel=2e-9)
    return bool(found)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_search_equals_brute_force_on_random_pipelines(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunk % 2:
        # The way that large pipelines go: prices, a beam, thresholds, and labels compared with each other.
        monkeypatch.setattr(partition_paths, "FEW_LABELS", 0)
        monkeypatch.setattr(partition_paths, "FEW_TO_COMPARE", 2)
    feasible = sum(
        compare(obvious.random_pipeline(random.Random(seed)))
        for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)
    )
    assert feasible > PER_CHUNK // 2


@pytest.mark.parametrize("chunk", range(4))
def test_it_does_with_a_source_a_sink_and_a_limit_on_devices(chunk: int) -> None:
    feasible = sum(
        compare(obvious.random_pipeline(random.Random(50_000 + seed), ends=True))
        for seed in range(chunk * 100, (chunk + 1) * 100)
    )
    assert feasible > 40


@pytest.mark.parametrize("chunk", range(4))
def test_it_does_with_links_between_hosts(chunk: int) -> None:
    feasible = sum(
        compare(obvious.random_pipeline(random.Random(90_000 + seed), links=True, ends=seed % 2 == 0))
        for seed in range(chunk * 50, (chunk + 1) * 50)
    )
    assert feasible > 20


def test_the_frontier_equals_brute_force_for_every_number_of_devices() -> None:
    compared = 0
    for seed in range(150):
        job = obvious.random_pipeline(random.Random(70_000 + seed))
        found = list(obvious.schedules(job))
        if not found:
            continue
        points = {point.devices: point.bottleneck_seconds for point in plan_partition(job, frontier=True).frontier}
        for devices in range(1, min(len(job.hosts), job.model.layers) + 1):
            want = min((bottleneck for bottleneck, _, used in found if used <= devices), default=None)
            assert (want is None) == (devices not in points)
            if want is not None:
                assert points[devices] == pytest.approx(want, rel=2e-9)
                compared += 1
    assert compared > 200


def test_without_the_exact_search_schedules_hold_and_bounds_are_below_the_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition, "MAX_WORK", 0.0)
    compared = best = 0
    for seed in range(120):
        job = replace(obvious.random_pipeline(random.Random(30_000 + seed), links=True), max_devices=None)
        found = list(obvious.schedules(job))
        for objective in ("throughput", "latency"):
            want = obvious.best(found, objective)
            if want is None:
                continue
            try:
                answer = plan_partition(job, objective)
            except InfeasibleError:
                continue
            check_schedule(job, answer)
            least = want[0] if objective == "throughput" else want[1]
            schedule = answer.schedule
            got = schedule.bottleneck_seconds if objective == "throughput" else schedule.latency_seconds
            assert answer.lower_bound_seconds <= least * (1 + 1e-9) <= got * (1 + 2e-9)
            assert "not proven" in answer.method
            assert not answer.optimal or got == pytest.approx(least, rel=2e-9)
            compared += 1
            best += got == pytest.approx(least, rel=1e-6)
    assert compared > 100
    assert best > 0.8 * compared
