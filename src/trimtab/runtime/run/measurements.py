"""Measurements of a run: busy and wait time of each component per iteration, and the bars of its timeline.

Times are on the plan's timeline. `busy_s` is the time of a component's steps only; `wait_s` is waiting for inputs with
its GPUs at hand; offload, onload and the rest of a turn are counted apart. All timers book to the iteration's ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.core.ranks import ranks_text
from trimtab.core.reasons import Reason
from trimtab.model.ledger import TimedSpan, booked_seconds, ledger_summary
from trimtab.model.plan import BarKind, Plan, TimelineBar
from trimtab.model.run import ComponentTiming, Iteration
from trimtab.model.workflow import Workflow
from trimtab.plan.placement.order import BatchStep, GpuTurn, PlanAction, WeightSyncStep
from trimtab.runtime.run.component import finite_or_none

Metrics = dict[str, dict[str, float | None]]
"""Metrics of an iteration: component, name, mean; None if that is not finite."""

GAP_S = 1e-6  # steps of a component that are no further apart make one bar


@dataclass
class _ComponentTally:
    """One component in one iteration."""

    busy_s: float = 0.0
    wait_s: float = 0.0
    batches: int = 0
    offload_s: float = 0.0
    onload_s: float = 0.0
    turn_s: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)


class RunMeasurements:
    """Accumulates measurements under one plan."""

    def __init__(self, workflow: Workflow, plan: Plan, first: int, now_s: float) -> None:
        self._workflow = workflow
        self._gpus = {placed.name: len(placed.gpus) for placed in plan.components}
        self._tallies: dict[tuple[int, str], _ComponentTally] = {}
        self._bars: dict[int, list[TimelineBar]] = {}
        self._sync_s: dict[int, float] = {}
        self._free_s = dict.fromkeys(workflow.names, now_s)  # since when each could have begun its next batch
        self._ended_s = now_s  # end of the last iteration
        self._spans: list[TimedSpan] = []  # that end after it
        self._running: dict[PlanAction, float] = {}  # since when

    def book(self, bucket: str, start_s: float, end_s: float) -> None:
        """Book time of the timeline to a bucket of the ledger. From any thread."""
        self._spans.append(TimedSpan(bucket, start_s, end_s))

    def begin(self, action: PlanAction, now_s: float) -> None:
        self._running[action] = now_s

    def step(self, action: BatchStep, now_s: float, took_s: float, metrics: Mapping[str, float]) -> None:
        tally = self._tally(action.iteration, action.component)
        since_s = self._free_s[action.component]
        if action.batch == 0 and not self._workflow.staleness:
            since_s = max(since_s, self._ended_s)  # before that there was nothing to wait for
        tally.wait_s += max(0.0, now_s - since_s)
        tally.busy_s += took_s
        tally.batches += 1
        for name, value in metrics.items():
            tally.metrics.setdefault(name, []).append(value)
        self._free_s[action.component] = now_s + took_s

    def turned(self, action: GpuTurn, start_s: float, took_s: float) -> None:
        self._tally(action.iteration, action.component).turn_s += took_s
        self.book("wait_turn", start_s, start_s + took_s)

    def switched(self, action: GpuTurn, component: str, bucket: str, start_s: float, end_s: float) -> None:
        """Count an offload or onload in a turn. The last component of an iteration is offloaded in the next one."""
        tally, turning = self._tally(action.iteration, component), self._tally(action.iteration, action.component)
        if bucket == "offload":
            tally.offload_s += end_s - start_s
        else:
            tally.onload_s += end_s - start_s
        turning.turn_s = max(0.0, turning.turn_s - (end_s - start_s))
        self.book(bucket, start_s, end_s)

    def add(self, action: PlanAction, now_s: float, took_s: float) -> None:
        """Add an action of any kind to the timeline."""
        end_s = now_s + took_s
        self._running.pop(action, None)
        if isinstance(action, GpuTurn):
            self._free_s[action.component] = end_s
        if not took_s:
            return
        bars = self._bars.setdefault(action.iteration, [])
        if isinstance(action, WeightSyncStep):
            self._sync_s[action.iteration] = took_s
            bars += [TimelineBar(name, "sync", now_s, end_s) for name in (action.source, action.target)]
            return
        doing: BarKind = "switch" if isinstance(action, GpuTurn) else "run"
        for at in range(len(bars) - 1, -1, -1):
            bar = bars[at]
            if bar.component == action.component:
                if bar.doing == doing and now_s - bar.end <= GAP_S:
                    bars[at] = TimelineBar(bar.component, doing, bar.start, end_s)
                    return
                break
        bars.append(TimelineBar(action.component, doing, now_s, end_s))

    def ended(
        self, number: int, now_s: float, extra: tuple[str, ...] = ()
    ) -> tuple[Iteration, Metrics, float, list[TimelineBar]]:
        """An iteration that ends now: its times, mean metrics, seconds of the weight sync, and bars."""
        self._tallies = {key: tally for key, tally in self._tallies.items() if key[0] >= number}
        measured: list[ComponentTiming] = []
        metrics: Metrics = {}
        for name in self._workflow.names:
            tally = self._tally(number, name)
            if tally.batches:
                times = {key: value for key, value in vars(tally).items() if key != "metrics"}
                measured.append(ComponentTiming(component=name, gpus=self._gpus[name], **times))
            if tally.metrics:
                means = {key: float(np.mean(values)) for key, values in tally.metrics.items()}
                metrics[name] = {key: finite_or_none(mean) for key, mean in means.items()}
        wall_s = max(0.0, now_s - self._ended_s)
        # Spans of what goes on are known when it ends: a step counts as computing until then.
        running = [
            TimedSpan("compute" if isinstance(action, BatchStep) else "calls", since_s, now_s)
            for action, since_s in self._running.items()
        ]
        booked = {
            bucket: round(booked_s, 6)
            for bucket, booked_s in booked_seconds([*self._spans, *running], self._ended_s, now_s).items()
        }
        self._ended_s = max(self._ended_s, now_s)
        self._spans = [span for span in self._spans if span.end_s > self._ended_s]
        sync_s = self._sync_s.pop(number, None)
        iteration = Iteration(number, wall_s, tuple(measured), extra, booked, sync_s)
        return iteration, metrics, sync_s or 0.0, self._bars.pop(number, [])

    def _tally(self, iteration: int, component: str) -> _ComponentTally:
        return self._tallies.setdefault((iteration, component), _ComponentTally())


def bars_facts(bars: Sequence[TimelineBar]) -> list[list[Any]]:
    """Bars for an event: component, kind, start and end in seconds since the run began."""
    return [[bar.component, bar.doing, round(bar.start, 6), round(bar.end, 6)] for bar in bars]


def plan_facts(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan.describe(),
        "predicted_s": plan.iteration_seconds,
        "groups": [
            {"components": list(group.components), "gpus": ranks_text(group.gpus), "kind": group.kind}
            for group in plan.groups
        ],
        "costs_s": {placed.name: placed.seconds for placed in plan.components},
        "switch_s": {placed.name: placed.switch_seconds for placed in plan.components if placed.switch_seconds},
        "sync_s": plan.sync_seconds,
        "variants": {placed.name: placed.variant for placed in plan.components if placed.variant},
    }


def summary_facts(
    state: str,
    reason: Reason,
    plan: Plan,
    iterations: Sequence[Iteration],
    metrics: Mapping[int, Metrics],
    since: int,
    expected_errors: Sequence[float] = (),
) -> dict[str, Any]:
    """Figures of the run: medians over the iterations under the last plan, without periodic work."""
    under = [iteration for iteration in iterations if iteration.number >= since and not iteration.extra] or list(
        iterations[-1:]
    )
    measured_s = float(np.median([iteration.wall_s for iteration in under])) if under else None
    components = {}
    for placed in plan.components:
        mine = [m for iteration in under for m in iteration.components if m.component == placed.name]
        components[placed.name] = {
            "gpus": ranks_text(placed.gpus),
            "predicted_s": placed.seconds,
            **{
                key: float(np.median([getattr(m, key) for m in mine])) if mine else None
                for key in ("busy_s", "wait_s", "offload_s", "onload_s", "turn_s")
            },
        }
    names = sorted({(name, key) for by in metrics.values() for name, figures in by.items() for key in figures})
    ledger = ledger_summary([(iteration.wall_s, iteration.booked) for iteration in under])
    error = measured_s / plan.iteration_seconds - 1 if measured_s is not None and plan.iteration_seconds else None
    return {
        "state": state,
        "code": reason.code.value,
        "reason": reason.sentence,
        "iterations": len(iterations),
        "plan": plan.describe(),
        "predicted_s": plan.iteration_seconds,
        "measured_s": measured_s,
        "prediction_error": error,
        "current_prediction_error": float(np.median(np.abs(expected_errors))) if expected_errors else None,
        "ledger": None if ledger is None else {**ledger.shares, "unbooked": ledger.unbooked},
        "components": components,
        "metrics": {f"{name}.{key}": _course(metrics, name, key) for name, key in names},
    }


def _course(metrics: Mapping[int, Metrics], name: str, key: str) -> dict[str, float | None]:
    """A metric at the beginning and at the end of a run: means of a tenth of it each."""
    values = [value for number in sorted(metrics) if (value := metrics[number].get(name, {}).get(key)) is not None]
    if not values:
        return {"first": None, "last": None}
    some = max(1, len(values) // 10)
    first, last = (finite_or_none(float(np.mean(part))) for part in (values[:some], values[-some:]))
    return {"first": first, "last": last}
