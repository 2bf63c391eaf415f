"""Lengths of sequences: how many answers are still being decoded after so many tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen

POINTS = 48
"""Of the grid on which answers are followed."""


class Lengths(Frozen):
    """Tokens of answers with their shares, ascending; each has a prompt of `prompt` tokens before it."""

    prompt: float
    answers: tuple[tuple[float, float], ...]

    @classmethod
    def capped(cls, mean: float, most: float, prompt: float) -> Lengths:
        """Exponential answers cut at a limit, by the mean and the limit of prompt and answer together."""
        answer, cap = mean - prompt, most - prompt
        if not 0 < answer <= cap:
            raise InputError(
                f"a mean of {mean:g} tokens does not lie between the prompt of {prompt:g} and the limit of {most:g}",
                hint="--mean-tokens and --max-tokens count prompt and answer together",
            )
        scale = _scale(answer / cap) * cap
        edges = np.linspace(0.0, 1.0, POINTS + 1) ** 2 * cap  # finer where most answers end
        alive = np.exp(-edges / scale)
        middles, ended = (edges[1:] + edges[:-1]) / 2, -np.diff(alive)
        shares = zip(middles.tolist(), ended.tolist(), strict=True)
        return cls(prompt, (*shares, (cap, float(alive[-1]))))

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], prompt: float) -> Lengths:
        """From measured lengths of prompt and answer together, with their shares."""
        return cls(prompt, tuple((max(1.0, tokens - prompt), share) for tokens, share in pairs))

    @property
    def mean_answer(self) -> float:
        return sum(tokens * share for tokens, share in self.answers)

    @property
    def mean(self) -> float:
        return self.prompt + self.mean_answer

    @property
    def longest(self) -> float:
        return self.prompt + self.answers[-1][0]

    @property
    def squares(self) -> float:
        """Mean length of the sequence that a token belongs to."""
        return sum((self.prompt + tokens) ** 2 * share for tokens, share in self.answers) / self.mean

    def longest_of(self, samples: float) -> float:
        """The longest sequence that is expected among so many."""
        beyond, found = 1.0, self.answers[0][0]
        for tokens, share in self.answers:
            if beyond * samples <= 0.5:
                break
            beyond, found = beyond - share, tokens
        return self.prompt + found

    def grid(self, samples: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """(tokens of each interval, its middle, share of answers alive in it), up to the longest of so many samples."""
        tokens = np.array([length for length, _ in self.answers])
        after = 1 - np.cumsum([share for _, share in self.answers])
        alive = np.concatenate([[1.0], after[:-1]])
        kept = alive * samples > 0.5
        edges = np.concatenate([[0.0], tokens[kept]])
        return np.diff(edges), (edges[1:] + edges[:-1]) / 2, alive[kept]


def _scale(share: float) -> float:
    """The scale s of an exponential for which the mean of min(x, 1) is `share`: s (1 - exp(-1/s)) = share."""
    low, high = 1e-3, 1e4
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-1 / middle) < share else (low, middle)
    return low
