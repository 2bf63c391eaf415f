"""What a sweep recommends, and on what evidence: the best setting tried, if seeds agree that it is better.

Every setting met the same reality under a seed, so settings are compared seed by seed: the mean of the differences to
the setting that counts now, and the standard error of that mean. The best of many is lucky as well as good: where there
are runs that it was not chosen by (other seeds, later times of a trace), those judge it. What must never happen: that a
difference which chance alone explains is recommended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

SURE = 2.0  # standard errors
LEAST = 0.002  # share of the figure: nearer settings are not told apart
FEWEST = 3  # seeds


@dataclass(frozen=True)
class Recommendation:
    """The setting to choose, or the one that counts now where nothing is better for certain."""

    choose: str
    sentence: str
    gain: float  # of the best tried, as a share of the figure now; below 0: all are worse
    error: float  # its standard error
    seeds: int


def best(now: str, tried: Mapping[str, Mapping[int, float]]) -> str:
    """The setting with the lowest figure besides `now`; `now` where nothing else was tried."""
    others = {name: fmean(one.values()) for name, one in tried.items() if name != now}
    return min(others, key=others.__getitem__) if others else now


def recommend(
    now: str,
    tried: Mapping[str, Mapping[int, float]],
    what: str,
    held_out: Mapping[str, Mapping[int, float]] | None = None,
    runs: str = "seeds",
) -> Recommendation:
    """`tried` has a figure by setting and seed, of which less is better; `now` is the one that counts, and among them.

    `what` names the figure. `held_out` has the same for seeds that did not choose, at least of `now` and of the best;
    `runs` says what they are.
    """
    choice = best(now, tried)
    if choice == now:
        return Recommendation(now, f"keep {now}: nothing else was tried that may be chosen", 0.0, 0.0, len(tried[now]))
    judged = tried if held_out is None else held_out
    base, its = judged[now], judged[choice]
    gains = [1 - its[seed] / base[seed] for seed in base if base[seed]]
    gain, seeds = fmean(gains) if gains else 0.0, len(gains)
    error = stdev(gains) / sqrt(seeds) if seeds > 1 else 0.0
    over = f"{seeds} {runs}" if held_out is None else f"{seeds} {runs} that did not choose it"
    found = (
        f"{what} is {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'} with {choice} than with {now} "
        f"(± {error:.1%}, standard error over {over}; lower with {sum(one > 0 for one in gains)} of them)"
    )
    if gain <= LEAST:
        return Recommendation(now, f"keep {now}: {found}", gain, error, seeds)
    if seeds < FEWEST:
        return Recommendation(now, f"keep {now} for now: {found}, and that is too few {runs}", gain, error, seeds)
    if gain <= SURE * error:
        return Recommendation(
            now, f"keep {now}: {found}, which chance may explain: no difference above the spread", gain, error, seeds
        )
    return Recommendation(choice, f"choose {choice}: {found}", gain, error, seeds)
