"""Every numeric setting has a range: what is outside is refused where it is made, in words that name it."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import pytest

from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler
from trimtab.core.errors import InputError
from trimtab.core.resources import Resources
from trimtab.machines.rollout.policies.load import Taker
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.nodes import ElasticSpec, NodePolicy
from trimtab.model.pool import PoolSpec, PreemptionPolicy, TaskSpec
from trimtab.model.rollout import RequestClass, RolloutRules, WorkerSpec
from trimtab.model.run import ReplanRules

GPU = Resources.of(gpu=1)
NEEDED: dict[type, dict[str, Any]] = {
    PoolSpec: {"name": "p", "quota": GPU},
    TaskSpec: {"id": "t", "pool": "p", "bundles": (GPU,)},
    PreemptionPolicy: {},
    ElasticConfig: {},
    RolloutRules: {},
    RequestClass: {},
    WorkerSpec: {"id": "w"},
    NodePolicy: {},
    ElasticSpec: {"name": "g", "unit": GPU},
    ReplanRules: {},
    Taker: {"name": "t", "workers": 1, "use_s": 1.0},
}
CALLED = {  # settings that users write under another name
    "dynamic_limit": "max_dynamic_pgs",
    "target_hosts": "target_agents",
    "hosts_each": "warm_each",
    "estimate_s": "estimated_duration",
    "budget": "eviction budget",
    ("ElasticSpec", "min_members"): "min",
    ("ElasticSpec", "max_members"): "max",
}
MAY_BE_ENDLESS = {(Taker, "use_s")}
MAY_BE_TEXT_OR_INF = {(RolloutRules, "resume_every")}  # "10 s", and whole answers
MAY_BE_NEGATIVE = {"priority", "reserved_priority", "restarts", "version"}
MAY_BE_ANY = {"version"}
INTERVALS = {(ElasticConfig, "monitoring_interval"), (RolloutRules, "monitor_s"), (ElasticSpec, "health_every_s")}


class AnyGroup:
    """A worker group that does nothing."""

    world_size = 3

    def flush_worker_cache(self, worker_id: int) -> None: ...

    def resume_worker_memory(self, worker_id: int) -> None: ...


def numeric() -> list[Any]:
    found = []
    for kind in NEEDED:
        hints = typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            kinds = set(typing.get_args(hints[one.name])) or {hints[one.name]}
            if kinds & {int, float} and kinds <= {int, float, type(None)}:
                found.append(pytest.param(kind, one.name, int in kinds, id=f"{kind.__name__}.{one.name}"))
    return found


def refused(kind: type, name: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        kind(**{**NEEDED[kind], name: value})
    called = CALLED.get((kind.__name__, name)) or CALLED.get(name) or name
    assert called in f"{caught.value.what} {caught.value.where}", f"{caught.value} does not name {called}"


def test_the_settings_are_found() -> None:
    assert len(numeric()) >= 80


@pytest.mark.parametrize(("kind", "name", "whole"), numeric())
def test_a_setting_outside_its_range_is_refused_by_its_name(kind: type, name: str, whole: bool) -> None:
    wrong: list[object] = [math.nan, -math.inf, True]
    wrong += ["three"] if (kind, name) in MAY_BE_TEXT_OR_INF else ["3"]
    wrong += [] if (kind, name) in MAY_BE_ENDLESS | MAY_BE_TEXT_OR_INF else [math.inf]
    wrong += [] if name in MAY_BE_ANY or (kind, name) in MAY_BE_ENDLESS else [1e300, 10**30]
    wrong += [] if name in MAY_BE_NEGATIVE else [-1]
    wrong += [2.5] if whole else []
    for value in wrong:
        refused(kind, name, value)


@pytest.mark.parametrize(("kind", "name"), sorted(INTERVALS, key=str))
@pytest.mark.parametrize("seconds", [1e-320, 1e-9, 0.001])
def test_an_interval_that_would_be_a_busy_loop_is_refused(kind: type, name: str, seconds: float) -> None:
    refused(kind, name, seconds)


def test_the_time_of_a_call_has_a_range_too() -> None:
    for wrong in (0.0, 1e-320, math.inf, math.nan, 1e300):
        with pytest.raises(InputError, match="call_timeout_s"):
            ElasticScheduler(ElasticConfig(), object(), call_timeout_s=wrong)


def test_the_longest_times_there_are_go_through_the_scheduler() -> None:
    longest = ElasticConfig(monitoring_interval=1e8, drain_timeout=1e8, max_workers=1_000_000)
    assert ElasticScheduler(longest, AnyGroup(), call_timeout_s=1e6).get_metrics()["total_workers"] == 3
