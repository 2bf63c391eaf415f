"""What every component costs now, told from noise.

A component's level is what it takes against its profile on as many GPUs as it had: the shape of the curve stays, the
level moves, so the level answers what any other number of GPUs would take now. Real steps spread by 5 to 9 %, have
heavy tails, and are like their neighbours (a slow minute is followed by a slow minute), so a mean of many tells little
more than one of them: a level is never taken to be surer than a few times the spread of single iterations.

What must never happen: that periodic work (validation, checkpoints) or a single odd iteration counts as drift. An
iteration that sticks out is set aside, and only when the next two stick out on the same side is it a jump.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trimtab.model.run import ComponentTiming, CostEstimate, Iteration, ReplanRules
from trimtab.model.workflow import Component, Workflow
from trimtab.plan.placement.cost import seconds_at
from trimtab.plan.placement.simulate import Floats

STICKS_OUT = math.log(1.25)
STICKS_OUT_WIDTHS = 5.0  # spreads; whatever is larger
JUMP = 3  # iterations in a row that stick out on one side are no exception any more
SOME = 3  # iterations before one can stick out
TREND_SOME = 6  # iterations before a trend is believed
MIN_TREND = 0.04  # relative change over the window; whatever is larger ...
TREND_WIDTHS = 3.0  # ... spreads
MAD_TO_SIGMA = 1.4826
USUAL_SPREAD, USUAL_WEIGHT = 0.03, 4  # of real steps; counts as so many iterations, as a few that agree say little


@dataclass
class CostTrack:
    """One component's newest levels as logarithms, by iteration, oldest first."""

    recent: list[tuple[int, float]] = field(default_factory=list)
    aside: list[tuple[int, float]] = field(default_factory=list)  # in a row, all on one side; fewer than JUMP
    measured: int = 0  # iterations that were ever taken, aside or not
    wait_share: float = 0.0  # of the newest iteration: waited for others
    busy_share: float = 0.0  # of the newest iteration: computed
    gpus: int = 0  # of the newest iteration


class CostEstimates:
    """The tracks of all components of a workflow."""

    def __init__(self, workflow: Workflow, rules: ReplanRules) -> None:
        self._workflow = workflow
        self._rules = rules
        self.tracks: dict[str, CostTrack] = {component.name: CostTrack() for component in workflow.components}

    def take(self, iteration: Iteration, variants: Mapping[str, tuple[str, str]]) -> None:
        """Count an iteration. `variants` says which variant every component ran in, on which kind of GPU."""
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
        """Iterations after that one are done again."""
        for track in self.tracks.values():
            track.recent = [point for point in track.recent if point[0] <= number]
            track.aside = [point for point in track.aside if point[0] <= number]

    def estimate(self, name: str) -> CostEstimate:
        """What a component costs now."""
        track = self.tracks[name]
        if not track.recent:
            return CostEstimate(width=self._rules.noise)
        level, spread, trend = _fit(track.recent)
        middle = float(np.median([value for _, value in track.recent]))
        width = max(self._rules.noise, self._rules.noise_widths * spread)
        return CostEstimate(math.exp(level), math.exp(middle), spread, math.expm1(trend), width, track.measured)

    def all(self) -> dict[str, CostEstimate]:
        """What every component costs now."""
        return {name: self.estimate(name) for name in self.tracks}

    @property
    def measured(self) -> int:
        """Iterations that tell something: of the component that was measured least often, if it ever was."""
        return min((track.measured for track in self.tracks.values() if track.measured), default=0)

    def _level(self, timing: ComponentTiming, variant: str, kind: str) -> float | None:
        profiled = profiled_seconds(self._workflow.component(timing.component), variant, kind, timing.gpus)
        batches = self._workflow.batches
        seconds = timing.busy_s * batches / (timing.batches or batches)
        return seconds / profiled if profiled and seconds > 0 else None


def profiled_seconds(component: Component, variant: str, kind: str, gpus: int) -> float | None:
    """Seconds of all batches on so many GPUs as profiled; None where nothing is known."""
    if component.cpu_seconds is not None:
        return component.cpu_seconds
    chosen = next((known for known in component.variants if known.name == variant), None)
    points = chosen.points(kind) if chosen is not None else ()
    if chosen is None or not points or gpus < 1:
        return None
    return seconds_at(points, chosen.floor_seconds, gpus)


def sure_level(estimate: CostEstimate, reference: float) -> float:
    """The level nearest to another that cannot be told from the estimate: how far it has drifted for certain.

    Noise has trends too, for a dozen iterations: a level is not sure because a trend leads there.
    """
    low, high = sorted((estimate.level, estimate.middle))
    return min(max(reference, low / (1 + estimate.width)), high * (1 + estimate.width))


def _add(track: CostTrack, number: int, value: float, window: int) -> None:
    if len(track.recent) >= SOME:
        level, spread, trend = _fit(track.recent)
        last = track.recent[-1][0]
        away = value - (level + trend * (number - last))
        if abs(away) > max(STICKS_OUT, STICKS_OUT_WIDTHS * spread):
            # Both against the trend as it would go on: where it ended, whatever follows is on its other side.
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
    """Level at the newest point, spread around it, and the trend per iteration where it is told from the spread."""
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
    # Neighbours are alike, so noise has trends too: only one that carries the level well beyond its spread is one.
    if abs(slope) * (at[-1] - at[0]) <= max(MIN_TREND, TREND_WIDTHS * around):
        return middle, spread, 0.0
    return end, around, slope


def _spread(away: Floats) -> float:
    """That of single iterations, from how far they are from their level."""
    seen = MAD_TO_SIGMA * float(np.median(np.abs(away)))
    return (seen * len(away) + USUAL_SPREAD * USUAL_WEIGHT) / (len(away) + USUAL_WEIGHT)
