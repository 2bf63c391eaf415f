"""The partition planner's answers: reasons when there is none, ends, limits, ties, and large pipelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.model.pipeline import DeviceType, Host, HostLink, ModelChain, PipelineJob
from trimtab.plan.partition import order as partition_order
from trimtab.plan.partition import paths as partition_paths
from trimtab.plan.partition import planner as partition
from trimtab.plan.partition.planner import plan_partition

MIB = 2**20


def chain(layers: int = 4, size: int = 1000, mem: float = 10.0) -> ModelChain:
    return ModelChain("m", (mem,) * layers, size, (size,) * layers)


def job(*kinds: tuple[str, float, float, tuple[float, ...], int], **more: object) -> PipelineJob:
    """Types as (name, Mbps, MB, seconds of each layer, hosts)."""
    layers = max(len(kind[3]) for kind in kinds)
    types = tuple(DeviceType(name, speed, room, seconds) for name, speed, room, seconds, _ in kinds)
    hosts = tuple(Host(f"{name}{i}", name) for name, _, _, _, count in kinds for i in range(count))
    given = {"model": chain(layers), "types": types, "hosts": hosts, **more}
    return PipelineJob(**given)


def reason(of: PipelineJob) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan_partition(of)
    assert caught.value.exit_status == 3
    return str(caught.value)


def hosts(of: PipelineJob, objective: str = "throughput") -> list[str]:
    return [stage.host for stage in plan_partition(of, objective).schedule.stages]


def test_a_layer_that_fits_nowhere_is_named_with_what_it_needs_and_what_there_is() -> None:
    model = ModelChain("m", (10.0, 500.0, 10.0), 1, (1, 1, 1))
    said = reason(job(("small", 100, 64, (1.0,) * 3, 2), ("large", 100, 256, (1.0,) * 3, 1), model=model))
    assert "layer 2 fits on no device" in said
    assert "500.0 MB" in said
    assert "large, has 256 MB" in said


def test_devices_that_are_too_small_together_say_so() -> None:
    said = reason(job(("box", 100, 16, (1.0,) * 8, 3), model=chain(8)))
    assert "the devices together are too small" in said
    assert "80 MB" in said
    assert "3 devices have 48 MB" in said


def test_what_was_not_searched_through_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_WORK", 0.0)
    said = reason(job(("box", 100, 16, (1.0,) * 8, 3), model=chain(8)))
    assert "no schedule was found" in said


def test_headroom_is_named_where_it_is_what_makes_a_layer_too_large() -> None:
    said = reason(job(("box", 100, 12, (1.0,) * 4, 4), headroom=0.5))
    assert "of which 50% stays free" in said


def test_devices_without_bandwidth_hold_the_whole_model_or_nothing() -> None:
    assert "devices without bandwidth (mute)" in reason(job(("mute", 0, 25, (1.0,) * 4, 4)))
    assert hosts(job(("mute", 0, 1000, (1.0,) * 4, 4))) == ["mute0"]


def test_devices_without_bandwidth_can_pass_on_nothing_at_all() -> None:
    model = ModelChain("m", (10.0,) * 4, 0, (0,) * 4)
    assert len(hosts(job(("mute", 0, 25, (1.0,) * 4, 4), model=model))) == 4


def test_too_few_devices_say_how_many_are_needed() -> None:
    said = reason(job(("box", 100, 25, (1.0,) * 4, 4), max_devices=1))
    assert "1 device cannot hold the model: at least 2 are needed" in said


def test_a_cut_that_no_device_can_hold_is_explained() -> None:
    # Whole it does not fit; every cut crosses so much that its buffers do not fit.
    model = ModelChain("m", (10.0,) * 4, 0, (MIB, MIB, MIB, 0))
    said = reason(job(("box", 100, 39, (1.0,) * 4, 4), model=model, batch_size=1, element_bytes=10))
    assert "fits" in said


def test_memory_must_be_strictly_less_than_what_there_is() -> None:
    model = ModelChain("m", (10.0,), 0, (0,))
    assert "layer 1" in reason(job(("box", 1, 10.0, (1.0,), 1), model=model))
    assert hosts(job(("box", 1, 10.001, (1.0,), 1), model=model)) == ["box0"]


def test_the_source_and_the_sink_count_unless_a_stage_stands_on_them() -> None:
    model = ModelChain("m", (10.0,), 10 * MIB, (MIB,))
    base = job(("slow", 100, 100_000, (3.0,), 1), ("fast", 100, 100_000, (1.0,), 1), model=model, element_bytes=1)
    assert hosts(base) == ["fast0"]
    # Bringing 80 MB over 100 Mbps takes 6.4 s: better to stay at the source.
    held = plan_partition(replace(base, source="slow0"))
    assert [stage.host for stage in held.schedule.stages] == ["slow0"]
    assert held.schedule.input_seconds == 0
    away = plan_partition(replace(base, source="slow0", types=(replace(base.types[0], time_s=()), base.types[1])))
    assert away.schedule.input_seconds == pytest.approx(6.4)
    assert away.schedule.bottleneck_seconds == pytest.approx(6.4)
    assert away.limits[0].stage == -1
    sent = plan_partition(replace(base, sink="slow0"))
    assert sent.schedule.stages[-1].transfer_seconds in (0.0, pytest.approx(0.64))


def test_among_equals_the_lower_latency_wins_and_then_fewer_devices() -> None:
    # Layer 1 sets the pace; splitting the rest gains nothing and costs transfers.
    even = job(("box", 100, 1000, (4.0, 1.0, 1.0, 1.0), 4))
    assert len(hosts(even)) == 2
    free = replace(even, model=ModelChain("m", (10.0,) * 4, 0, (0,) * 4))
    assert len(hosts(free)) == 2


def test_latency_asks_for_the_fewest_hops() -> None:
    of = job(("box", 100, 1000, (1.0,) * 4, 4))
    assert hosts(of, "latency") == ["box0"]
    assert len(hosts(of)) == 4


def test_links_move_stages_to_hosts_that_are_well_joined() -> None:
    model = ModelChain("m", (10.0,) * 2, 0, (MIB, 0))
    pairs = (("box0", "box1"), ("box0", "box2"))
    slow = tuple(HostLink(pair, 1.0) for pair in pairs)
    of = job(("box", 1000, 25, (1.0,) * 2, 3), model=model, element_bytes=1, links=slow, buffers_in=0, buffers_out=0)
    assert set(hosts(of)) == {"box1", "box2"}


def test_a_pipeline_of_unlike_links_that_is_too_large_says_it_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_order, "EFFORT", 0)
    names = [f"box{i}" for i in range(26)]
    links = tuple(
        HostLink((a, b), 100.0 + 7 * i + j) for i, a in enumerate(names) for j, b in enumerate(names[i + 1 :])
    )
    of = job(("box", 1000, 60, tuple(1.0 + i % 3 for i in range(30)), 26), model=chain(30), links=links)
    answer = plan_partition(of, frontier=True)
    assert "not proven" in answer.method
    assert 0 < answer.lower_bound_seconds <= answer.schedule.bottleneck_seconds
    assert answer.schedule.bottleneck_seconds < 6
    assert any("frontier" in sentence for sentence in answer.assumptions)


def test_limits_come_longest_first() -> None:
    answer = plan_partition(job(("box", 100, 25, (1.0, 2.0, 3.0, 4.0), 4)))
    seconds = [limit.seconds for limit in answer.limits]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == answer.schedule.bottleneck_seconds


def test_types_that_are_equal_are_one_class_and_hosts_keep_their_types() -> None:
    of = job(("one", 100, 25, (1.0,) * 4, 2), ("two", 100, 25, (1.0,) * 4, 2))
    stages = plan_partition(of).schedule.stages
    assert {(stage.host, stage.type) for stage in stages} == {
        ("one0", "one"),
        ("one1", "one"),
        ("two0", "two"),
        ("two1", "two"),
    }


def test_times_of_nothing_are_answered_and_said() -> None:
    answer = plan_partition(job(("box", 100, 1000, (0.0,) * 4, 2)))
    assert answer.throughput is None
    assert any("no stage takes any time" in sentence for sentence in answer.assumptions)


def test_too_many_layers_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_STAGES", 10)
    with pytest.raises(InputError, match="too many to plan"):
        plan_partition(job(("box", 100, 1000, (1.0,) * 4, 2)))


def unlike(layers: int = 24, devices: int = 4) -> PipelineJob:
    seconds = [1.0 + (i * 7 % 5) / 4 for i in range(layers)]
    return job(
        *((f"kind{t}_", 100, 60.0 + 11 * t, tuple(s * (1 + t / 3) for s in seconds), devices) for t in range(3)),
        model=ModelChain("m", (10.0,) * layers, 1000, tuple(1000 * (1 + i * 3 % 4) for i in range(layers))),
    )


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_three_ways_of_breaking_ties_agree(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan_partition(unlike(), objective).schedule
    # Without the shortcut for few labels, prices and thresholds have to find the same.
    monkeypatch.setattr(partition_paths, "FEW_LABELS", 0)
    priced = plan_partition(unlike(), objective)
    assert priced.ties_proven
    assert priced.schedule.latency_seconds == pytest.approx(plain.latency_seconds)
    assert len(priced.schedule.stages) == len(plain.stages)
    # Out of memory, it gives a good schedule and says that ties were not all compared.
    monkeypatch.setattr(partition_paths, "MAX_LABELS", 0)
    monkeypatch.setattr(partition_paths._LabelSearches, "beam", _beam_without_limit)
    given_up = plan_partition(unlike(), objective)
    assert not given_up.ties_proven
    assert given_up.schedule.latency_seconds >= plain.latency_seconds * (1 - 1e-9)


def _beam_without_limit(searches, priced, bound, width):
    found = partition_paths.LabelSearch(searches, priced, bound, float("inf"), 10**9, width).run()
    assert found is not None
    return found


def test_large_pipelines_are_proven_for_both_objectives() -> None:
    for objective in ("throughput", "latency"):
        answer = plan_partition(unlike(96, 8), objective)
        assert answer.optimal
        assert answer.ties_proven
