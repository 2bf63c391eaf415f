"""Statistics of a run's story: idle shares, medians, metric series.

`idle` is defined as in plans: the share of an iteration in which the GPUs of a component do nothing; for a CPU
component, in which it does nothing.
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
    """A component over the run: medians per iteration, without periodic work, and idle share."""

    component: str
    gpus: tuple[int, ...]  # GPU counts that it ran on, in sequence
    predicted_s: float | None  # of the last plan
    busy_s: float | None
    wait_s: float | None
    switch_s: float | None
    idle: float | None
    drift: float | None  # cost at the end relative to the start of the longest time on the same GPUs


def idle_shares(story: RunStory) -> dict[str, list[tuple[int, float]]]:
    """Per component and iteration that counts, the share in which its GPUs did nothing."""
    spells: dict[frozenset[str], _BusyTimes] = {}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in story.components}
    by_name: dict[str, list[tuple[float, float]]] = {}
    for bar in story.bars:
        by_name.setdefault(bar.component, []).append((bar.start, bar.end))
    for record in story.iterations:
        wall_s = record.iteration.wall_s
        if wall_s <= 0 or record.plan < 0:
            continue
        groups = {
            name: frozenset(names)
            for names, gpu_slots in story.plans[record.plan].groups
            if gpu_slots
            for name in names
        }
        for name in story.components:
            together = groups.get(name, frozenset((name,)))
            if together not in spells:
                spells[together] = _BusyTimes([interval for other in together for interval in by_name.get(other, ())])
            busy_s = spells[together].between(record.end_s - wall_s, record.end_s)
            found[name].append((record.iteration.number, min(max(1 - busy_s / wall_s, 0.0), 1.0)))
    return found


class _BusyTimes:
    """Busy intervals, merged; returns the busy time between two moments."""

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
    counted = [record for record in story.iterations if not record.iteration.extra] or story.iterations
    found = []
    for name in story.components:
        mine = [(record, m) for record in counted for m in record.iteration.components if m.component == name]
        last = [m for record, m in mine if record.plan == len(story.plans) - 1] or [m for _, m in mine]
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
    """The end relative to the start, within the longest time on the same number of GPUs."""
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
    count = max(3, len(longest) // _TENTH)
    start = median(longest[1 : 1 + count])  # the first iteration warms up
    return median(longest[-count:]) / start if start > 0 else None


def errors(story: RunStory) -> list[tuple[int, float]]:
    """Relative error of each iteration's predicted time, with its number."""
    return [
        (record.iteration.number, record.iteration.wall_s / predicted - 1)
        for record in story.iterations
        if record.plan >= 0 and not record.iteration.extra and (predicted := story.prediction(record.plan))
    ]


def expected(story: RunStory) -> list[tuple[int, float]]:
    """Expected iteration time by the costs measured so far: iteration after which, seconds."""
    found = [(decision.iteration, finite(decision.numbers.get("iteration_s"))) for decision in story.decisions]
    return [(number, value) for number, value in found if value is not None]


def expected_errors(story: RunStory) -> list[float]:
    """Relative errors of the expectation after the previous iteration."""
    by_number = dict(expected(story))
    return [
        record.iteration.wall_s / by_number[before] - 1
        for record in story.iterations
        if not record.iteration.extra and by_number.get(before := record.iteration.number - 1)
    ]


def metric_names(story: RunStory, wanted: Sequence[str] = ()) -> list[str]:
    """Metrics to show, as `component.name`: those requested, or all whose own name begins with reward."""
    names = all_metrics(story)
    if not wanted:
        return [name for name in names if name.partition(".")[2].lower().startswith("reward")]
    return [name for want in wanted for name in names if name == want or name.partition(".")[2] == want]


def all_metrics(story: RunStory) -> list[str]:
    return sorted(
        {f"{name}.{key}" for record in story.done for name, values in record.metrics.items() for key in values}
    )


def course(iterations: Sequence[ReportIteration], metric: str) -> list[tuple[int, float]]:
    component, _, key = metric.partition(".")
    return [
        (record.iteration.number, value)
        for record in iterations
        if (value := record.metrics.get(component, {}).get(key)) is not None
    ]


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last tenth."""
    count = max(1, len(values) // _TENTH)
    return fmean(values[:count]), fmean(values[-count:])


def group_equal(decisions: Sequence[ReportDecision]) -> list[tuple[ReportDecision, ReportDecision, int]]:
    """Consecutive equal decisions as the first, the last and their count."""
    out: list[tuple[ReportDecision, ReportDecision, int]] = []
    for decision in decisions:
        if out and (out[-1][1].what, out[-1][1].code, out[-1][1].plan) == (decision.what, decision.code, decision.plan):
            first, _, count = out[-1]
            out[-1] = (first, decision, count + 1)
        else:
            out.append((decision, decision, 1))
    return out
