"""The task: write what is missing to nine under each digit of a row, then stop. Every answer can be checked.

Asked `3 9 4`, the right answer is `6 0 5 END`. The reward is the share of the right answer that was written before the
first mistake, less a little for everything written from there on: so it pays to stop rather than to guess on, and
answers grow as long as they are right, not before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]

BASE = 10
END = BASE  # ends an answer; in a question: no more digits
BLANK = BASE + 1  # before the first token of an answer, and after its end
VOCABULARY = BASE + 1  # what an answer is made of
MISTAKE = 0.03  # what a token from the first mistake on costs, where a right one gains 1


def questions(seed: int, iteration: int, index: int, count: int, digits: int) -> Tokens:
    """Rows of digits, from half as many to `digits`, filled up with END: the same for the same numbers."""
    luck = np.random.default_rng([seed, 1, iteration, index])
    rows = luck.integers(0, BASE, size=(count, digits + 1))
    lengths = luck.integers((digits + 1) // 2, digits + 1, size=count)
    rows[np.arange(digits + 1) >= lengths[:, None]] = END
    return rows.astype(np.int64)


def right_answers(asked: Tokens) -> Tokens:
    """What is missing to nine, END in the place after the last digit, BLANK behind it."""
    ends = np.cumsum(asked == END, axis=1)
    return np.where(ends == 0, BASE - 1 - asked, np.where(ends == 1, END, BLANK))


def rewards(asked: Tokens, answered: Tokens) -> Floats:
    """From 0 for nothing, to 1 for the whole right answer with its end; less than 0 for mistakes alone."""
    right = right_answers(asked)
    matters = right != BLANK
    unbroken = np.cumprod((answered == right) & matters, axis=1).sum(axis=1)
    wrong = ((answered != BLANK) & (answered != END)).sum(axis=1) - np.minimum(unbroken, matters.sum(axis=1) - 1)
    return np.asarray((unbroken - MISTAKE * wrong) / matters.sum(axis=1))


def lengths(answered: Tokens) -> NDArray[np.int64]:
    """Tokens of each answer, its end included."""
    return np.asarray((answered != BLANK).sum(axis=1))
