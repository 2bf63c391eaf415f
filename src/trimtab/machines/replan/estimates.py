"""Estimates the current cost of every component, and separates drift from noise.

The level of a component is its time relative to its profile on the same number of GPUs: the shape of the curve stays,
the level moves, so the level predicts any other number of GPUs. Real steps spread by 5 to 9 %, have heavy tails, and
are autocorrelated (a slow minute is followed by a slow minute), so a mean of many tells little more than one of them:
the width of a level is never below a few times the spread of single iterations.

What must never happen: periodic work (validation, checkpoints) or a single outlier counts as drift. An outlier is set
aside, and only when the next two are outliers on the same side is it a jump.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trimtab.model.run import ComponentTiming, CostEstimate, Iteration, ReplanRules
from trimtab.model.workflow import Component, Workflow
from trimtab.plan.placement.simulate import Floats
from trimtab.plan.placement.space import seconds_at

OUTLIER = math.log(1.25)
OUTLIER_WIDTHS = 5.0  # spreads; the larger of the two
JUMP = 3  # consecutive outliers on one side that make a jump
SOME = 3  # iterations before one can be an outlier
TREND_SOME = 6  # iterations before a trend is used
MIN_TREND = 0.04  # relative change over the window, or ...
TREND_WIDTHS = 3.0  # ... spreads, the larger of the two
LESS_SURE = 1.25  # how much wider a level with a trend is: the newer half of the window stands for it
MAD_TO_SIGMA = 1.4826
USUAL_SPREAD, USUAL_WEIGHT = 0.03, 4  # prior: spread of real steps, with the weight of 4 iterations


@dataclass
class CostTrack:
    """A component's latest levels as logarithms, by iteration, oldest first."""

    recent: list[tuple[int, float]] = field(default_factory=list)
    aside: list[tuple[int, float]] = field(default_factory=list)  # consecutive outliers on one side; fewer than JUMP
    measured: int = 0  # iterations ever counted, outliers included
    wait_share: float = 0.0  # of the newest iteration: waited for others
    busy_share: float = 0.0  # of the newest iteration: computed
    gpus: int = 0  # of the newest iteration


class CostEstimates:
    """The tracks of all components of a workflow."""

    def __init__(self, workflow: Workflow, rules: ReplanRules, tracks: dict[str, CostTrack]) -> None:
        self._workflow = workflow
        self._rules = rules
        self.tracks = tracks

    def take(self, iteration: Iteration, variants: Mapping[str, tuple[str, str]]) -> None:
        """Count an iteration. `variants`: variant and GPU kind of every component."""
        for component in iteration.components:
            track = self.tracks[component.component]
            wall = iteration.wall_s or 1.0
            track.wait_share, track.busy_share = min(1.0, component.wait_s / wall), min(1.0, component.busy_s / wall)
            track.gpus = component.gpus
            level = self._level(component, *variants.get(component.component, ("", "")))
            if level is not None and not iteration.extra:
                track.measured += 1
                _add(track, iteration.number, math.log(level), self._rules.window)

    def forget_after(self, number: int) -> None:
        """Iterations after this one will be repeated."""
        for track in self.tracks.values():
            track.recent = [point for point in track.recent if point[0] <= number]
            track.aside = [point for point in track.aside if point[0] <= number]

    def estimate(self, name: str) -> CostEstimate:
        track = self.tracks[name]
        if not track.recent:
            return CostEstimate(width=self._rules.noise)
        level, spread, trend = _fit(track.recent)
        newest, wider = (track.recent[-(self._rules.window // 2) :], LESS_SURE) if trend else (track.recent, 1.0)
        middle = float(np.median([value for _, value in newest]))
        width = max(self._rules.noise, self._rules.noise_widths * spread) * wider
        return CostEstimate(math.exp(level), math.exp(middle), spread, math.expm1(trend), width, track.measured)

    def all(self) -> dict[str, CostEstimate]:
        return {name: self.estimate(name) for name in self.tracks}

    @property
    def measured(self) -> int:
        """Iterations of the component that was measured least often, among those ever measured."""
        return min((track.measured for track in self.tracks.values() if track.measured), default=0)

    def _level(self, timing: ComponentTiming, variant: str, kind: str) -> float | None:
        batches = self._workflow.batches
        seconds = timing.busy_s * batches / (timing.batches or batches)
        return self.level(timing.component, seconds, variant, kind, timing.gpus)

    def level(self, name: str, seconds: float, variant: str, kind: str, gpus: int) -> float | None:
        """Seconds of a component relative to its profile."""
        profiled = profiled_seconds(self._workflow.component(name), variant, kind, gpus)
        return seconds / profiled if profiled and seconds > 0 else None


def profiled_seconds(component: Component, variant: str, kind: str, gpus: int) -> float | None:
    """Profiled seconds of all batches on so many GPUs; None if unknown."""
    if component.cpu_seconds is not None:
        return component.cpu_seconds
    chosen = next((known for known in component.variants if known.name == variant), None)
    points = chosen.points(kind) if chosen is not None else ()
    if chosen is None or not points or gpus < 1:
        return None
    return seconds_at(points, chosen.floor_seconds, gpus, chosen.doubling)


def sure_level(estimate: CostEstimate, reference: float) -> float:
    """The level nearest to the reference that is consistent with the estimate: the drift that is not noise.

    Noise also has trends over a dozen iterations: a trend alone does not make a level sure.
    """
    low, high = sorted((estimate.level, estimate.middle))
    return min(max(reference, low / (1 + estimate.width)), high * (1 + estimate.width))


def _add(track: CostTrack, number: int, value: float, window: int) -> None:
    if len(track.recent) >= SOME:
        level, spread, trend = _fit(track.recent)
        last = track.recent[-1][0]
        away = value - (level + trend * (number - last))
        if abs(away) > max(OUTLIER, OUTLIER_WIDTHS * spread):
            # Both relative to the continued trend: where the trend ended, all later points are on its other side.
            if track.aside and (track.aside[-1][1] - (level + trend * (track.aside[-1][0] - last)) > 0) != (away > 0):
                track.aside.clear()
            track.aside.append((number, value))
            if len(track.aside) == JUMP:
                track.recent, track.aside = track.aside, []
            return
    track.aside.clear()
    track.recent.append((number, value))
    del track.recent[:-window]


def _fit(points: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Level at the latest point, spread around it, and the trend per iteration where it exceeds the spread."""
    values = np.array([value for _, value in points])
    at = np.array([number for number, _ in points], dtype=float)
    middle = float(np.median(values))
    spread = _spread(values - middle)
    if len(points) < TREND_SOME:
        return middle, spread, 0.0
    first, second = np.triu_indices(len(points), 1)
    slope = float(np.median((values[second] - values[first]) / (at[second] - at[first])))
    level = values - slope * (at - at[-1])
    end = float(np.median(level))
    around = _spread(level - end)
    # Noise is autocorrelated and has trends too: a trend must carry the level well beyond its spread.
    if abs(slope) * (at[-1] - at[0]) <= max(MIN_TREND, TREND_WIDTHS * around):
        return middle, spread, 0.0
    return end, around, slope


def _spread(away: Floats) -> float:
    """Spread of single iterations, from their distance to the level."""
    seen = MAD_TO_SIGMA * float(np.median(np.abs(away)))
    return (seen * len(away) + USUAL_SPREAD * USUAL_WEIGHT) / (len(away) + USUAL_WEIGHT)
