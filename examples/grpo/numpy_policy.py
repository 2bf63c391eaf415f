"""The policy in numpy alone: a small network that reads the next digit and the token written last.

One hidden layer. What it has not to learn is where to look; what it has to learn is how to add, and when to stop. It
begins terse: END is likely from the start, so answers are short, and grow as it learns to be right for longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from examples.grpo.loss import Rules, token_slopes
from examples.grpo.task import BLANK, END, VOCABULARY, Floats, Tokens
from numpy.typing import NDArray

SEEN = BLANK + 1  # tokens that an input can be
TERSE = 1.5  # how much more likely END is at the start, as a logit


class NumpyPolicy:
    """Weights, and what is done with them."""

    def __init__(self, seed: int, hidden: int = 64) -> None:
        luck = np.random.default_rng([seed, 2])
        self.weights: dict[str, Floats] = {
            "digit": luck.normal(0, 0.5, (SEEN, hidden)),
            "last": luck.normal(0, 0.5, (SEEN, hidden)),
            "hidden": np.zeros(hidden),
            "out": luck.normal(0, 0.5 / np.sqrt(hidden), (hidden, VOCABULARY)),
            "bias": np.where(np.arange(VOCABULARY) == END, TERSE, 0.0),
        }
        self._moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in self.weights.items()}
        self._updates = 0
        self._table: Floats | None = None  # what `next_logs` has found, until there are other weights

    def sample(self, asked: Tokens, seed: list[int]) -> tuple[Tokens, Floats]:
        """One answer to each question, with the log-probability of every token; only unended ones cost anything."""
        luck = np.random.default_rng(seed)
        count, places = asked.shape
        answered = np.full((count, places), BLANK)
        chances = np.zeros((count, places))
        going = np.arange(count)
        last = np.full(count, BLANK)
        for place in range(places):
            logs = self._logs(asked[going, place], last)[0]
            # The largest of logits with Gumbel noise is a draw from their softmax.
            token = (logs + luck.gumbel(size=logs.shape)).argmax(axis=1)
            answered[going, place] = token
            chances[going, place] = logs[np.arange(len(going)), token]
            alive = token != END
            going, last = going[alive], token[alive]
            if not len(going):
                break
        return answered, chances

    def log_probabilities(self, asked: Tokens, answered: Tokens) -> Floats:
        """Of every token of given answers; 0 where there is none."""
        counts = answered != BLANK
        logs = self._logs(asked[counts], _before(answered)[counts])[0]
        found = np.zeros(answered.shape)
        found[counts] = logs[np.arange(len(logs)), answered[counts]]
        return found

    def next_logs(self, asked: Tokens, answered: Tokens, at: Tokens) -> Floats:
        """Log-probabilities of what comes at the places `at` of answers, the same whatever else is asked with them."""
        if self._table is None:  # by digit and last token: that is all there is to see
            pairs = np.indices((SEEN, SEEN)).reshape(2, -1)
            self._table = self._logs(pairs[0], pairs[1])[0].reshape(SEEN, SEEN, VOCABULARY)
        rows = np.arange(len(asked))
        last = np.where(at > 0, answered[rows, np.maximum(at - 1, 0)], BLANK)
        return np.asarray(self._table[asked[rows, at], last])

    def update(
        self, asked: Tokens, answered: Tokens, old: Floats, reference: Floats, advantage: Floats, rules: Rules
    ) -> dict[str, float]:
        """One step of Adam down the loss of these answers."""
        counts = answered != BLANK
        digit, last, token = asked[counts], _before(answered)[counts], answered[counts]
        logs, hidden = self._logs(digit, last)
        rows = np.arange(len(token))
        new = np.zeros(answered.shape)
        new[counts] = logs[rows, token]
        slopes, facts = token_slopes(new, old, reference, advantage, counts, rules)
        slope = slopes[counts][:, None]
        logits = -np.exp(logs) * slope
        logits[rows, token] += slope[:, 0]
        back = (logits @ self.weights["out"].T) * (1 - hidden**2)
        gradient = {
            "digit": _summed(digit, back),
            "last": _summed(last, back),
            "hidden": back.sum(axis=0),
            "out": hidden.T @ logits,
            "bias": logits.sum(axis=0),
        }
        self._adam(gradient, rules.rate)
        return facts

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that training needs to go on."""
        moments = {
            f"{kind}.{name}": m for name, pair in self._moments.items() for kind, m in zip("mv", pair, strict=True)
        }
        return {**self.weights, **moments, "updates": np.array(self._updates)}

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        """Go on from a state."""
        self.weights = {name: state[name].copy() for name in self.weights}
        self._table = None
        self._moments = {name: (state[f"m.{name}"].copy(), state[f"v.{name}"].copy()) for name in self.weights}
        self._updates = int(state["updates"])

    def copied(self) -> dict[str, Floats]:
        """The weights, for others."""
        return {name: w.copy() for name, w in self.weights.items()}

    def take(self, weights: dict[str, Floats]) -> None:
        """Work with others' weights from now on."""
        self.weights = {name: weights[name].copy() for name in self.weights}
        self._table = None

    def offload(self) -> None:
        """Nothing of it is on a GPU."""

    def onload(self) -> None:
        """Nothing of it is on a GPU."""

    def _logs(self, digit: Tokens, last: Tokens) -> tuple[Floats, Floats]:
        """Log-probabilities of the next token, and the hidden layer they come from."""
        w = self.weights
        hidden = np.tanh(w["digit"][digit] + w["last"][last] + w["hidden"])
        logits = hidden @ w["out"] + w["bias"]
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), hidden

    def _adam(self, gradient: dict[str, Floats], rate: float) -> None:
        self._updates += 1
        self._table = None
        for name, slope in gradient.items():
            m, v = self._moments[name]
            m += 0.1 * (slope - m)
            v += 0.01 * (slope**2 - v)
            scale = np.sqrt(v / (1 - 0.99**self._updates)) + 1e-8
            self.weights[name] = self.weights[name] - rate * (m / (1 - 0.9**self._updates)) / scale


def _before(answered: Tokens) -> Tokens:
    """The token before each: BLANK before the first."""
    return np.concatenate([np.full((len(answered), 1), BLANK), answered[:, :-1]], axis=1)


def _summed(token: Tokens, slopes: Floats) -> Floats:
    """Slopes added up by token."""
    picked = np.zeros((SEEN, len(token)))
    picked[token, np.arange(len(token))] = 1.0
    return np.asarray(picked @ slopes)
