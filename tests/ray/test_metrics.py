"""Metrics: what the meter tells, what Ray's exporter serves, and that dashboards and alerts speak of just that."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import Resources
from trimtab.formats import yaml_text
from trimtab.machines.pool.events import (
    CompleteRequested,
    CreatePlacementGroup,
    EvictRequested,
    NodeJoined,
    PlacementGroupReady,
    PlacementGroupRemoved,
    PolicySet,
    PoolDropped,
    PoolEnsured,
    PoolEvent,
    RemovePlacementGroup,
    StartTask,
    StopTask,
    TaskStarted,
    TaskStopped,
    TaskSubmitted,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.nodes import NodeFacts, NodeState, NodeView
from trimtab.model.pool import PoolSpec, PreemptionPolicy, TaskSpec
from trimtab.runtime.controller.metrics import BUCKETS_MS, METRICS, MetricSpec, PoolMetrics, aliased, desired_workers
from trimtab.runtime.controller.metrics import NODE_METRICS as FLEET_METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "ops" / "grafana" / "trimtab-pools.json"
ALERTS = ROOT / "ops" / "prometheus" / "trimtab-alerts.yaml"
CPU = Resources.of(cpu=1)


class World:
    """A machine whose instructions are carried out at once, with a meter that writes down what it is told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.machine = PoolMachine()
        self.told: list[tuple[str, float, dict[str, str]]] = []
        self.meter = self.new_meter()

    def new_meter(self) -> PoolMetrics:
        def make(metric: MetricSpec) -> Callable[[float, dict[str, str]], None]:
            return lambda figure, labels: self.told.append((metric.name, figure, labels))

        return PoolMetrics("c", self.machine, make)

    def hear(self, event: PoolEvent) -> None:
        todo = self.machine.handle(event, self.now)
        self.meter.observe(event)
        for one in todo:
            if isinstance(one, CreatePlacementGroup):
                self.hear(PlacementGroupReady(one.group))
            elif isinstance(one, RemovePlacementGroup):
                self.hear(PlacementGroupRemoved(one.group))
            elif isinstance(one, StartTask):
                self.now += 0.5
                self.hear(TaskStarted(one.task, one.attempt))
            elif isinstance(one, StopTask):
                self.now += 2.0
                self.hear(TaskStopped(one.task, one.attempt, "returned", saved=True))

    def submit(self, id: str, priority: float, pool: str = "rl") -> None:
        self.hear(TaskSubmitted(TaskSpec(id, pool, (CPU,), priority=priority)))

    def figures(self, name: str) -> list[tuple[float, dict[str, str]]]:
        return [(figure, labels) for told, figure, labels in self.told if told == name]

    def sampled(self, name: str) -> dict[str, float]:
        """The gauge as it was told last, by its own labels."""
        own = next(metric.labels for metric in METRICS if metric.name == name)
        return {" ".join(labels[one] for one in own): figure for figure, labels in self.figures(name)}

    def sample(self, **warm: dict[str, int]) -> None:
        self.meter._next_sample = 0.0
        asyncio.run(self.meter.sample(warm))


@pytest.fixture
def world() -> World:
    """One node and a pool of two CPUs, with a policy."""
    world = World()
    world.hear(NodeJoined("node-a", Resources.of(cpu=4)))
    world.hear(PoolEnsured(PoolSpec("rl", Resources.of(cpu=2), target_hosts=3)))
    world.hear(PolicySet(PreemptionPolicy()))
    return world


def test_a_start_is_timed_from_submission(world: World) -> None:
    world.submit("a", 1.0)
    assert world.figures("trimtab_task_schedule_latency_ms") == [
        (pytest.approx(500.0), {"controller": "c", "pool": "rl"})
    ]


def test_an_eviction_is_counted_once_and_timed_until_its_successor_has_started(world: World) -> None:
    world.submit("a", 1.0)
    world.submit("b", 1.0)
    world.submit("urgent", 9.0)
    labels = {"controller": "c", "pool": "rl", "reason": "PRIORITY"}
    assert world.figures("trimtab_preemption_count") == [(1, labels)]
    [(latency_ms, labels)] = world.figures("trimtab_preemption_execution_latency_ms")
    assert latency_ms == pytest.approx(2500.0)
    assert labels == {"controller": "c", "pool": "rl"}


def test_the_return_of_an_evicted_task_is_timed_from_its_return_to_the_queue(world: World) -> None:
    world.submit("a", 1.0)
    world.submit("b", 1.0)
    world.submit("urgent", 9.0)
    evicted = next(one for one in world.machine.tasks.values() if one.evictions)
    since = evicted.since
    world.now += 100.0
    world.hear(CompleteRequested("urgent"))
    assert evicted.started_at is not None
    timed_ms, _ = world.figures("trimtab_task_schedule_latency_ms")[-1]
    assert timed_ms == pytest.approx((evicted.started_at - since) * 1e3)


def test_an_eviction_by_hand_is_timed_until_its_task_is_gone(world: World) -> None:
    world.submit("a", 1.0)
    world.hear(EvictRequested("a"))
    assert [labels["reason"] for _, labels in world.figures("trimtab_preemption_count")] == ["BY_HAND"]
    assert [figure for figure, _ in world.figures("trimtab_preemption_execution_latency_ms")] == [pytest.approx(2000.0)]


def test_late_news_of_a_start_is_not_timed(world: World) -> None:
    world.submit("a", 1.0)
    told = len(world.told)
    world.now += 5.0
    world.hear(TaskStarted("a", 1))
    world.hear(TaskStarted("a", 7))
    world.hear(TaskStarted("unknown", 1))
    assert len(world.told) == told


def test_what_was_evicted_before_a_restart_is_not_counted_again(world: World) -> None:
    world.submit("a", 1.0)
    world.hear(EvictRequested("a"))
    world.told.clear()
    world.meter = world.new_meter()
    world.submit("b", 1.0)
    assert world.figures("trimtab_preemption_count") == []


def test_gauges_tell_queue_slots_tasks_and_warm_hosts(world: World) -> None:
    for id in ("a", "b", "c", "d"):
        world.submit(id, 1.0)
    world.sample(**{"0123456789abcdef": {"ready": 2, "starting": 1}})
    assert world.sampled("trimtab_queue_length") == {"rl": 2}
    assert world.sampled("trimtab_queue_oldest_wait_s")["rl"] > 0
    tasks = world.sampled("trimtab_tasks")
    assert (tasks["rl running"], tasks["rl waiting"], tasks["rl failed"]) == (2, 2, 0)
    slots = world.sampled("trimtab_slots")
    assert slots == {"rl taken": 2, "rl idle": 0, "rl making": 0, "rl removing": 0, "rl wanted": 0}
    assert world.sampled("trimtab_warm_hosts") == {"0123456789ab ready": 2, "0123456789ab starting": 1}
    assert world.sampled("trimtab_warm_hosts_target") == {"rl": 3}


def test_with_an_alias_counters_and_histograms_are_recorded_under_both_names_and_gauges_once() -> None:
    told: list[str] = []

    def make(metric: MetricSpec) -> Callable[[float, dict[str, str]], None]:
        return lambda figure, labels: told.append(metric.name)

    record = aliased(make, "schedulemesh")
    for metric in METRICS:
        record(metric)(1.0, {})
    assert [name for name in told if name.startswith("schedulemesh_")] == [
        "schedulemesh_preemption_count",
        "schedulemesh_preemption_execution_latency_ms",
        "schedulemesh_task_schedule_latency_ms",
    ]
    assert sorted(name for name in told if name.startswith("trimtab_")) == sorted(metric.name for metric in METRICS)


def test_slots_are_told_as_the_pool_itself_tells_them(world: World) -> None:
    reserved = PoolSpec("kept", Resources.of(cpu=9), reserved=(CPU, Resources.of(cpu=8)))
    world.hear(PoolEnsured(reserved))
    world.submit("a", 9.0, "kept")
    world.sample()
    view = world.machine.pool_view("kept").slots
    slots = world.sampled("trimtab_slots")
    assert {word: slots[f"kept {word}"] for word in ("idle", "taken", "making", "removing", "wanted")} == {
        word: view[word] for word in ("idle", "taken", "making", "removing", "wanted")
    }


def test_what_is_gone_becomes_nothing(world: World) -> None:
    world.submit("a", 1.0)
    world.sample(n={"ready": 1, "starting": 0})
    world.hear(PoolDropped("rl"))
    world.sample()
    assert world.sampled("trimtab_tasks")["rl running"] == 0
    assert world.sampled("trimtab_warm_hosts")["n ready"] == 0
    world.told.clear()
    world.sample()
    assert world.told == []


def test_a_fault_stops_metrics_and_nothing_else(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def broken(metric: MetricSpec) -> Callable[[float, dict[str, str]], None]:
        def record(figure: float, labels: dict[str, str]) -> None:
            raise RuntimeError("the exporter is gone")

        return record

    world.meter = PoolMetrics("c", world.machine, broken)
    world.submit("a", 1.0)
    assert world.meter.fault == "metrics stopped: RuntimeError: the exporter is gone"
    world.submit("b", 1.0)
    world.sample()
    assert world.machine.tasks["b"].state.value == "running"
    assert len([one for one in caplog.records if one.levelno >= logging.ERROR]) == 1


def test_metrics_that_cannot_be_made_are_a_fault_and_no_more(world: World) -> None:
    def refused(metric: MetricSpec) -> Callable[[float, dict[str, str]], None]:
        raise ImportError("no such module")

    world.meter = PoolMetrics("c", world.machine, refused)
    world.submit("a", 1.0)
    world.sample()
    assert world.meter.fault == "metrics stopped: ImportError: no such module"


def test_buckets_reach_from_a_millisecond_to_ten_minutes() -> None:
    assert list(BUCKETS_MS) == sorted(set(BUCKETS_MS))
    assert (BUCKETS_MS[0], BUCKETS_MS[-1]) == (1, 600_000)


# ---- through Ray's exporter -----------------------------------------------------------------------------------------


class Actor:
    def save(self) -> int:
        return 1


@pytest.fixture
def exporter() -> Iterator[str]:
    """A local Ray whose metrics can be scraped; the address of its exporter."""
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address="local", num_cpus=8, include_dashboard=False, _metrics_export_port=port, **settings)
        try:
            yield f"http://127.0.0.1:{port}/metrics"
        finally:
            ray.shutdown()


def scraped(url: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """What an exporter says of trimtab: figures by name and labels."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for line in lines:
        if match := re.fullmatch(r"(ray_trimtab_\w+)\{(.*)\} (\S+)", line):
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2]))
            found.setdefault(match[1], {})[labels] = float(match[3])
    return found


def one(found: dict[str, dict[frozenset[tuple[str, str]], float]], name: str, **labels: str) -> float | None:
    """The figure with these labels among its labels."""
    figures = [figure for known, figure in found.get(name, {}).items() if known >= set(labels.items())]
    return figures[0] if len(figures) == 1 else None


def test_ray_serves_the_metrics_of_pools_over_http(exporter: str) -> None:
    from trimtab.runtime.client.session import connect

    session = connect(name="measured")
    try:
        session.preemption(cancel_timeout_s=2.0)
        pool = session.pool("rl", {"cpu": 2}, warm_hosts=1)
        for id in ("low-0", "low-1"):
            pool.submit(Actor, resources={"cpu": 1}, id=id, priority=1.0).wait("running", timeout=60)
        pool.submit(Actor, resources={"cpu": 1}, id="high", priority=9.0).wait("running", timeout=60)
        pool.submit(Actor, resources={"cpu": 1}, id="later", priority=1.0)
        group = {"size": 1, "wanted": 3, "redone": 2, "restarts": 1, "join_to_step_s": [0.5, 2.0], "drain_lead_s": [4]}
        session.ask("publish", "group", "trainers", group, session.client)
        session._keep_lease()
        wanted: dict[str, tuple[float, dict[str, str]]] = {
            "ray_trimtab_preemption_count_total": (1, {"pool": "rl", "reason": "PRIORITY"}),
            "ray_trimtab_preemption_execution_latency_ms_count": (1, {"pool": "rl"}),
            "ray_trimtab_task_schedule_latency_ms_count": (3, {"pool": "rl"}),
            "ray_trimtab_queue_length": (2, {"pool": "rl"}),
            "ray_trimtab_slots": (2, {"pool": "rl", "state": "taken"}),
            "ray_trimtab_tasks": (1, {"pool": "rl", "state": "evicted"}),
            "ray_trimtab_warm_hosts": (1, {"state": "ready"}),
            "ray_trimtab_warm_hosts_target": (1, {"pool": "rl"}),
            "ray_trimtab_nodes": (1, {"state": "ready"}),
            "ray_trimtab_group_members": (1, {"group": "trainers"}),
            "ray_trimtab_group_members_wanted": (3, {"group": "trainers"}),
            "ray_trimtab_group_steps_redone_total": (2, {"group": "trainers"}),
            "ray_trimtab_group_restarts_total": (1, {"group": "trainers"}),
            "ray_trimtab_node_join_to_step_ms_count": (2, {"group": "trainers"}),
            "ray_trimtab_drain_lead_ms_count": (1, {"group": "trainers"}),
        }
        deadline = time.monotonic() + 60
        while True:
            found = scraped(exporter)
            seen = {name: one(found, name, controller="measured", **labels) for name, (_, labels) in wanted.items()}
            if seen == {name: figure for name, (figure, _) in wanted.items()}:
                break
            assert time.monotonic() < deadline, seen
            time.sleep(0.2)
        assert (one(found, "ray_trimtab_queue_oldest_wait_s", pool="rl") or 0) > 0
        assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in found} == {
            metric.exported for metric in (*METRICS, *FLEET_METRICS)
        }
        assert session.status()["metrics"] is None
    finally:
        session.shutdown()


# ---- nodes for autoscalers ------------------------------------------------------------------------------------------


def node(id: str, state: NodeState = NodeState.ready, head: bool = False, **amounts: float) -> NodeView:
    reason = Reason(ReasonCode.joined, "it joined")
    return NodeView(id, state, NodeFacts(Resources.of(amounts, where="a test"), head=head), reason, 0.0)


def test_without_a_wish_as_many_workers_are_desired_as_stay() -> None:
    nodes = [node("h", head=True, cpu=2), node("a", gpu=1), node("b", NodeState.draining, gpu=1), node("c", gpu=1)]
    assert desired_workers(nodes, (), []) == 2
    assert desired_workers([node("h", head=True, cpu=2), node("a", cpu=4)], (), []) == 1


def test_what_is_wanted_is_counted_in_nodes_of_the_largest_kind() -> None:
    nodes = [node("h", head=True, cpu=2), node("a", gpu=4, cpu=8), node("b", gpu=2, cpu=8)]
    assert desired_workers(nodes, (), [{"gpu": 1}] * 9) == 3
    assert desired_workers(nodes, (), [{"gpu": 1, "cpu": 8}] * 5) == 5
    assert desired_workers(nodes, {"a", "b"}, [{"gpu": 1}]) == 2  # nobody is sent away from where they work


# ---- dashboards and alerts ------------------------------------------------------------------------------------------

FUNCTIONS = {"sum", "max", "by", "on", "and", "rate", "increase", "histogram_quantile", "absent"}
SERIES = {
    name: metric
    for metric in (*METRICS, *FLEET_METRICS)
    for name in (
        [f"{metric.exported}_bucket", f"{metric.exported}_count", f"{metric.exported}_sum"]
        if metric.kind == "histogram"
        else [metric.exported]
    )
}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml_text.parse(ALERTS.read_text(), ALERTS.name)["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [
    *((f"panel {panel['title']}", target["expr"]) for panel in panels() for target in panel["targets"]),
    *((f"alert {rule['alert']}", rule["expr"]) for rule in rules()),
]


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_expressions_speak_of_what_is_exported(where: str, expression: str) -> None:
    names = re.findall(r"\bray_\w+", expression)
    assert names
    assert set(names) <= set(SERIES)
    words = set(re.findall(r"(?<![\w$\"])[a-z_]\w*(?=\s*\()", expression))
    assert words <= FUNCTIONS
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)
    for name, inside in re.findall(r"(ray_\w+)\{(.*?)\}", expression):
        matchers = re.findall(r'(\w+)=~?"[^"]*"', inside)
        assert set(matchers) <= {"controller", *SERIES[name].labels}
        assert len(matchers) == inside.count("=")
    for labels in re.findall(r"by \((.*?)\)", expression):
        known = {"controller", "le"}.union(*(SERIES[name].labels for name in names))
        assert set(labels.split(", ")) <= known


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_counters_and_buckets_are_asked_for_rates_and_gauges_are_not(where: str, expression: str) -> None:
    for name, over in re.findall(r"(ray_\w+)(?:\{[^}]*\})?(\[[^\]]+\])?", expression):
        assert bool(over) is (SERIES[name].kind != "gauge"), name
        assert not name.endswith("_bucket") or re.search(r"histogram_quantile\(0\.\d+, sum by \(le\b", expression)


def test_the_dashboard_shows_every_metric_and_its_panels_do_not_overlap() -> None:
    shown = {SERIES[name] for where, text in EXPRESSIONS if "panel" in where for name in re.findall(r"ray_\w+", text)}
    assert shown == {*METRICS, *FLEET_METRICS}
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels())
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_latencies_are_shown_as_three_quantiles() -> None:
    for name in ("trimtab_preemption_execution_latency_ms", "trimtab_task_schedule_latency_ms"):
        [panel] = [one for one in panels() if name in one["targets"][0]["expr"]]
        found = [re.search(r"histogram_quantile\(([\d.]+),", target["expr"]) for target in panel["targets"]]
        assert [match and match[1] for match in found] == ["0.5", "0.95", "0.99"]


def test_variables_of_the_dashboard_are_filled_and_used() -> None:
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    everything = DASHBOARD.read_text()
    for variable in variables:
        assert f"${variable['name']}" in everything or f"${{{variable['name']}}}" in everything
        if variable["type"] == "query":
            name = re.search(r"label_values\((ray_\w+)", variable["definition"])
            assert name
            assert name[1] in SERIES


def test_alerts_have_what_prometheus_asks_for() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert set(rule["labels"]) == {"severity"}
        assert set(rule["annotations"]) == {"summary", "description"}
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", rule["expr"]))))
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert label in grouped
