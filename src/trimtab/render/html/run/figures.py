"""Figures of a run's story: shares of time, medians, courses of metrics. Reads a story, decides nothing, draws nothing.

`idle` is as plans have it: the share of an iteration in which the GPUs of a component do nothing at all; of a component
on CPUs, in which it does nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import fmean, median

from trimtab.render.html.run.facts import ReportDecision, ReportIteration, finite
from trimtab.render.html.run.story import RunStory

_TENTH = 10


@dataclass(frozen=True)
class ReportCost:
    """A component over the run: medians per iteration, without periodic work, and where it stood idle."""

    component: str
    gpus: tuple[int, ...]  # counts that it ran on, one after another
    predicted_s: float | None  # of the plan that ran last
    busy_s: float | None
    wait_s: float | None
    switch_s: float | None
    idle: float | None
    drift: float | None  # cost at the end against the beginning of the longest time on as many GPUs


def idle_shares(story: RunStory) -> dict[str, list[tuple[int, float]]]:
    """For each component and iteration that counts, the share in which its GPUs did nothing."""
    spells: dict[frozenset[str], _BusyTimes] = {}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in story.components}
    by_name: dict[str, list[tuple[float, float]]] = {}
    for bar in story.bars:
        by_name.setdefault(bar.component, []).append((bar.start, bar.end))
    for one in story.iterations:
        wall_s = one.iteration.wall_s
        if wall_s <= 0 or one.plan < 0:
            continue
        groups = {
            name: frozenset(names) for names, gpu_slots in story.plans[one.plan].groups if gpu_slots for name in names
        }
        for name in story.components:
            together = groups.get(name, frozenset((name,)))
            if together not in spells:
                spells[together] = _BusyTimes([some for other in together for some in by_name.get(other, ())])
            busy_s = spells[together].between(one.end_s - wall_s, one.end_s)
            found[name].append((one.iteration.number, min(max(1 - busy_s / wall_s, 0.0), 1.0)))
    return found


class _BusyTimes:
    """Times of work, merged; answers how much of it lies between two moments."""

    def __init__(self, spells: list[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(spells):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._before = [0.0, *accumulate(end - start for start, end in zip(self._starts, self._ends, strict=True))]

    def between(self, since: float, until: float) -> float:
        return self._until(until) - self._until(since)

    def _until(self, moment: float) -> float:
        at = bisect_right(self._starts, moment)
        if not at:
            return 0.0
        return self._before[at - 1] + min(moment, self._ends[at - 1]) - self._starts[at - 1]


def costs(story: RunStory, idle: dict[str, list[tuple[int, float]]]) -> list[ReportCost]:
    """What each component cost."""
    counted = [one for one in story.iterations if not one.iteration.extra] or story.iterations
    found = []
    for name in story.components:
        mine = [(one, m) for one in counted for m in one.iteration.components if m.component == name]
        last = [m for one, m in mine if one.plan == len(story.plans) - 1] or [m for _, m in mine]
        shares = [value for _, value in idle.get(name, ())]
        plan = story.plans[-1] if story.plans else None
        known = plan is not None and story.prediction(plan.number) is not None
        found.append(
            ReportCost(
                name,
                tuple(gpus for gpus, _ in groupby(m.gpus for _, m in mine)),
                plan.costs_s.get(name) if plan is not None and known else None,
                _median([m.busy_s for m in last]),
                _median([m.wait_s for m in last]),
                _median([m.offload_s + m.onload_s for m in last]),
                fmean(shares) if shares else None,
                _drift([(m.gpus, m.busy_s) for _, m in mine]),
            )
        )
    return found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _drift(course: list[tuple[int, float]]) -> float | None:
    """The end against the beginning, within the longest stay on as many GPUs: with other GPUs it is no drift."""
    stays: list[list[float]] = []
    before: int | None = None
    for gpus, busy_s in course:
        if gpus != before:
            stays.append([])
            before = gpus
        stays[-1].append(busy_s)
    longest = max(stays, key=len, default=[])
    if len(longest) < _TENTH:
        return None
    some = max(3, len(longest) // _TENTH)
    start = median(longest[1 : 1 + some])  # everything is cold in the first
    return median(longest[-some:]) / start if start > 0 else None


def errors(story: RunStory) -> list[tuple[int, float]]:
    """How far measured iterations were from what their plan promised: number, relative difference."""
    return [
        (one.iteration.number, one.iteration.wall_s / predicted - 1)
        for one in story.iterations
        if one.plan >= 0 and not one.iteration.extra and (predicted := story.prediction(one.plan))
    ]


def expected(story: RunStory) -> list[tuple[int, float]]:
    """What the plan that ran was expected to take, by costs as measured until then: iteration after which, seconds."""
    found = [(one.iteration, finite(one.numbers.get("iteration_s"))) for one in story.decisions]
    return [(number, value) for number, value in found if value is not None]


def expected_errors(story: RunStory) -> list[float]:
    """How far iterations were from what was expected of them after the one before."""
    by_number = dict(expected(story))
    return [
        one.iteration.wall_s / by_number[before] - 1
        for one in story.iterations
        if not one.iteration.extra and by_number.get(before := one.iteration.number - 1)
    ]


def metric_names(story: RunStory, wanted: Sequence[str] = ()) -> list[str]:
    """Metrics to show, as `component.name`: those asked for, or all whose own name begins with reward."""
    there = sorted({f"{name}.{key}" for one in story.done for name, some in one.metrics.items() for key in some})
    if not wanted:
        return [name for name in there if name.partition(".")[2].lower().startswith("reward")]
    return [name for want in wanted for name in there if name == want or name.partition(".")[2] == want]


def all_metrics(story: RunStory) -> list[str]:
    """Every metric that components had to show."""
    return sorted({f"{name}.{key}" for one in story.done for name, some in one.metrics.items() for key in some})


def course(iterations: Sequence[ReportIteration], metric: str) -> list[tuple[int, float]]:
    """A metric over the iterations."""
    component, _, key = metric.partition(".")
    return [
        (one.iteration.number, value)
        for one in iterations
        if (value := one.metrics.get(component, {}).get(key)) is not None
    ]


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """The beginning and the end of a course: means of a tenth of it each."""
    some = max(1, len(values) // _TENTH)
    return fmean(values[:some]), fmean(values[-some:])


def group_equal(decisions: Sequence[ReportDecision]) -> list[tuple[ReportDecision, ReportDecision, int]]:
    """Decisions one after another that say the same, as the first, the last and how many."""
    out: list[tuple[ReportDecision, ReportDecision, int]] = []
    for one in decisions:
        if out and (out[-1][1].what, out[-1][1].code, out[-1][1].plan) == (one.what, one.code, one.plan):
            first, _, count = out[-1]
            out[-1] = (first, one, count + 1)
        else:
            out.append((one, one, 1))
    return out
