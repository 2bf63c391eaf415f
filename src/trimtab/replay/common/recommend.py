"""Recommends a setting from a sweep if the seeds show that it is better.

Every setting ran on the same reality under a seed, so settings are compared seed by seed: the mean difference to the
current setting, and its standard error. The best of many tried is partly luck: where held-out runs exist (other seeds,
later parts of a trace), those decide. Must never happen: recommending a difference that chance alone explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

MIN_STANDARD_ERRORS = 2.0  # standard errors that a gain must exceed
MIN_GAIN = 0.002  # share of the figure: smaller differences count as equal
MIN_SEEDS = 3  # seeds


@dataclass(frozen=True)
class Recommendation:
    """The recommended setting: the current one unless another is significantly better."""

    choose: str
    sentence: str
    gain: float  # of the best setting tried, as a share of the current figure; below 0: all are worse
    error: float  # its standard error
    seeds: int


def best(now: str, tried: Mapping[str, Mapping[int, float]]) -> str:
    """The setting other than `now` with the lowest mean; `now` if nothing else was tried."""
    others = {name: fmean(by_seed.values()) for name, by_seed in tried.items() if name != now}
    return min(others, key=others.__getitem__) if others else now


def recommend(
    now: str,
    tried: Mapping[str, Mapping[int, float]],
    what: str,
    held_out: Mapping[str, Mapping[int, float]] | None = None,
    runs: str = "seeds",
) -> Recommendation:
    """Compares settings. `tried`: figure by setting and seed, lower is better; `now`: the current setting, one of them.

    `what` names the figure. `held_out`: the same for seeds not used for the choice, at least of `now` and the best;
    `runs` names them.
    """
    choice = best(now, tried)
    if choice == now:
        return Recommendation(now, f"keep {now}: no other setting was tried", 0.0, 0.0, len(tried[now]))
    judged = tried if held_out is None else held_out
    base, its = judged[now], judged[choice]
    gains = [1 - its[seed] / base[seed] for seed in base if base[seed]]
    gain, seeds = fmean(gains) if gains else 0.0, len(gains)
    error = stdev(gains) / sqrt(seeds) if seeds > 1 else 0.0
    over = f"{seeds} {runs}" if held_out is None else f"{seeds} {runs} that did not choose it"
    found = (
        f"{what} is {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'} with {choice} than with {now} "
        f"(± {error:.1%}, standard error over {over}; lower with {sum(gain > 0 for gain in gains)} of them)"
    )
    if gain <= MIN_GAIN:
        return Recommendation(now, f"keep {now}: {found}", gain, error, seeds)
    if seeds < MIN_SEEDS:
        return Recommendation(now, f"keep {now} for now: {found}, and that is too few {runs}", gain, error, seeds)
    if gain <= MIN_STANDARD_ERRORS * error:
        return Recommendation(
            now, f"keep {now}: {found}, which chance may explain: no difference above the spread", gain, error, seeds
        )
    return Recommendation(choice, f"choose {choice}: {found}", gain, error, seeds)
