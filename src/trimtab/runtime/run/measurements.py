"""What is measured of a run: each component's own time and waiting in each iteration, and the bars of its timeline.

Times are those of the plan's timeline, whoever drives it. `busy_s` holds nothing but a component's steps; what it
waited for inputs, with its GPUs at hand, is `wait_s`; leaving and coming back to GPUs stand for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.core.ranks import ranks_text
from trimtab.core.reasons import Reason
from trimtab.model.plan import BarKind, Plan, TimelineBar
from trimtab.model.run import ComponentTiming, Iteration
from trimtab.model.workflow import Workflow
from trimtab.plan.placement.order import BatchStep, GpuTurn, PlanAction, WeightSyncStep
from trimtab.runtime.run.component import finite_or_none

Metrics = dict[str, dict[str, float | None]]
"""What components have to show of an iteration: component, name, mean; None where that is no number."""

GAP_S = 1e-6
"""Steps of a component that are no further apart make one bar."""


@dataclass
class _ComponentTally:
    """One component in one iteration, as far as it is."""

    busy_s: float = 0.0
    wait_s: float = 0.0
    batches: int = 0
    offload_s: float = 0.0
    onload_s: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)


class RunMeasurements:
    """Adds up what happens under one plan, from its first iteration on."""

    def __init__(self, workflow: Workflow, plan: Plan, first: int, now_s: float) -> None:
        self._workflow = workflow
        self._gpus = {placed.name: len(placed.gpus) for placed in plan.components}
        self._tallies: dict[tuple[int, str], _ComponentTally] = {}
        self._bars: dict[int, list[TimelineBar]] = {}
        self._sync_s: dict[int, float] = {}
        self._free_s = dict.fromkeys(workflow.names, now_s)  # since when each could have begun its next batch
        self._ended_s = now_s  # of the last iteration that is over

    def step(self, act: BatchStep, now_s: float, took_s: float, metrics: Mapping[str, float]) -> None:
        """A batch that began at a time and took so long."""
        tally = self._tally(act.iteration, act.component)
        since_s = self._free_s[act.component]
        if act.batch == 0 and not self._workflow.staleness:
            since_s = max(since_s, self._ended_s)  # before that there was nothing to wait for
        tally.wait_s += max(0.0, now_s - since_s)
        tally.busy_s += took_s
        tally.batches += 1
        for name, value in metrics.items():
            tally.metrics.setdefault(name, []).append(value)
        self._free_s[act.component] = now_s + took_s

    def offloaded(self, component: str, act: GpuTurn, took_s: float) -> None:
        """A component left its GPUs for another. The last of an iteration leaves them in the next one."""
        self._tally(act.iteration, component).offload_s += took_s

    def onloaded(self, act: GpuTurn, took_s: float) -> None:
        """A component came back to its GPUs."""
        self._tally(act.iteration, act.component).onload_s += took_s

    def add(self, act: PlanAction, now_s: float, took_s: float) -> None:
        """An act of any kind, for the timeline."""
        end_s = now_s + took_s
        if isinstance(act, GpuTurn):
            self._free_s[act.component] = end_s
        if not took_s:
            return
        bars = self._bars.setdefault(act.iteration, [])
        if isinstance(act, WeightSyncStep):
            self._sync_s[act.iteration] = took_s
            bars += [TimelineBar(name, "sync", now_s, end_s) for name in (act.source, act.target)]
            return
        doing: BarKind = "switch" if isinstance(act, GpuTurn) else "run"
        for at in range(len(bars) - 1, -1, -1):
            bar = bars[at]
            if bar.component == act.component:
                if bar.doing == doing and now_s - bar.end <= GAP_S:
                    bars[at] = TimelineBar(bar.component, doing, bar.start, end_s)
                    return
                break
        bars.append(TimelineBar(act.component, doing, now_s, end_s))

    def iteration(self, number: int, now_s: float, extra: tuple[str, ...] = ()) -> Iteration:
        """An iteration that is over now."""
        measured = tuple(
            ComponentTiming(
                component=name,
                busy_s=tally.busy_s,
                gpus=self._gpus[name],
                batches=tally.batches,
                wait_s=tally.wait_s,
                offload_s=tally.offload_s,
                onload_s=tally.onload_s,
            )
            for name in self._workflow.names
            if (tally := self._tally(number, name)).batches
        )
        wall_s = max(0.0, now_s - self._ended_s)
        self._ended_s = max(self._ended_s, now_s)
        return Iteration(number, wall_s, measured, extra)

    def sync_s(self, number: int) -> float:
        """What the weight sync of an iteration took."""
        return self._sync_s.pop(number, 0.0)

    def metrics(self, number: int) -> Metrics:
        """The means of what the components had to show in an iteration."""
        return {
            name: {key: finite_or_none(float(np.mean(values))) for key, values in tally.metrics.items()}
            for (at, name), tally in self._tallies.items()
            if at == number and tally.metrics
        }

    def bars(self, number: int) -> list[TimelineBar]:
        """The stretches of an iteration; they are let go."""
        for old in [key for key in self._tallies if key[0] < number]:
            del self._tallies[old]
        return self._bars.pop(number, [])

    def _tally(self, iteration: int, component: str) -> _ComponentTally:
        return self._tallies.setdefault((iteration, component), _ComponentTally())


def bars_facts(bars: Sequence[TimelineBar]) -> list[list[Any]]:
    """Bars as an event holds them: component, what it does, start and end in seconds since the run began."""
    return [[bar.component, bar.doing, round(bar.start, 6), round(bar.end, 6)] for bar in bars]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan as an event holds it."""
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
) -> dict[str, Any]:
    """The run in figures: medians over the iterations under the plan that ran last, without periodic work."""
    under = [one for one in iterations if one.number >= since and not one.extra] or list(iterations[-1:])
    measured_s = float(np.median([one.wall_s for one in under])) if under else None
    components = {}
    for placed in plan.components:
        mine = [m for one in under for m in one.components if m.component == placed.name]
        components[placed.name] = {
            "gpus": ranks_text(placed.gpus),
            "predicted_s": placed.seconds,
            **{
                key: float(np.median([getattr(m, key) for m in mine])) if mine else None
                for key in ("busy_s", "wait_s", "offload_s", "onload_s")
            },
        }
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
        "components": components,
        "metrics": {name: _course(metrics, name) for name in _metric_names(metrics)},
    }


def _metric_names(metrics: Mapping[int, Metrics]) -> list[str]:
    return sorted({f"{name}.{key}" for by in metrics.values() for name, one in by.items() for key in one})


def _course(metrics: Mapping[int, Metrics], name: str) -> dict[str, float | None]:
    """A metric at the beginning and at the end of a run: means of a tenth of it each."""
    component, _, key = name.partition(".")
    values = [value for number in sorted(metrics) if (value := metrics[number].get(component, {}).get(key)) is not None]
    if not values:
        return {"first": None, "last": None}
    some = max(1, len(values) // 10)
    return {
        "first": finite_or_none(float(np.mean(values[:some]))),
        "last": finite_or_none(float(np.mean(values[-some:]))),
    }
