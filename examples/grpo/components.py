"""The four components of GRPO, as a run takes them: rollout, reward, reference log-probabilities, trainer.

Each is made with its settings and its place, and does one batch at a time. All that is drawn is drawn from (seed,
iteration, batch), so a run that is stopped and resumed, or moved, is the run that was not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from examples.grpo.loss import Rules, advantages
from examples.grpo.numpy_policy import NumpyPolicy
from examples.grpo.task import Floats, Tokens, lengths, questions, rewards
from numpy.typing import NDArray

from trimtab import Batch, InputError, Place, Result


class Policy(Protocol):
    """What both backends have."""

    def sample(self, asked: Tokens, seed: list[int]) -> tuple[Tokens, Floats]:
        """Answers, and the log-probabilities of their tokens."""

    def log_probabilities(self, asked: Tokens, answered: Tokens) -> Floats:
        """Of the tokens of given answers."""

    def next_logs(self, asked: Tokens, answered: Tokens, at: Tokens) -> Floats:
        """Of every token that may come next, at one place of each answer."""

    def update(
        self, asked: Tokens, answered: Tokens, old: Floats, reference: Floats, advantage: Floats, rules: Rules
    ) -> dict[str, float]:
        """One step down the loss."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that training needs to go on."""

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        """Go on from a state."""

    def copied(self) -> Any:
        """The weights, for others."""

    def take(self, weights: Any) -> None:
        """Work with others' weights from now on."""

    def offload(self) -> None:
        """Leave the GPU."""

    def onload(self) -> None:
        """Come back to the GPU."""


def make_policy(backend: str, place: Place, digits: int, size: dict[str, Any], trains: bool = False) -> Policy:
    """A policy with the weights that everybody begins with."""
    if backend == "numpy":
        return NumpyPolicy(place.seed, **size)
    if backend == "torch":
        from examples.grpo.torch_policy import TorchPolicy

        return TorchPolicy(place.seed, places=digits + 1, trains=trains, **size)
    raise InputError(f"there is no backend {backend}", where="settings.backend", hint="it is numpy or torch")


class _WithPolicy:
    """What the components that have a policy have in common."""

    def __init__(
        self,
        *,
        place: Place,
        backend: str = "numpy",
        digits: int = 16,
        size: dict[str, Any] | None = None,
        trains: bool = False,
    ) -> None:
        self.place = place
        self.digits = digits
        self.policy = make_policy(backend, place, digits, size or {}, trains)

    def offload(self) -> None:
        """Leave the GPU to others."""
        self.policy.offload()

    def onload(self) -> None:
        """Come back to it."""
        self.policy.onload()


class Rollout(_WithPolicy):
    """Answers questions, several times each, with the weights that it was given last."""

    def __init__(self, *, questions: int = 16, group: int = 16, **common: Any) -> None:
        super().__init__(**common)
        self.questions, self.group = questions, group

    def step(self, batch: Batch) -> Result:
        """Questions of its own making, and answers to them."""
        seed = self.place.seed
        asked = questions(seed, batch.iteration, batch.index, self.questions, self.digits)
        asked = np.repeat(asked, self.group, axis=0)
        answered, logs = self.policy.sample(asked, [seed, 3, batch.iteration, batch.index])
        long = lengths(answered)
        return Result(
            {"asked": asked, "answered": answered, "logs": logs},
            {"length": float(long.mean()), "longest": float(long.max())},
        )

    def sync(self, weights: Any, version: int) -> None:
        """Work with the trainer's weights."""
        self.policy.take(weights)


class Reward:
    """Checks answers."""

    def __init__(self, *, place: Place) -> None:
        self.place = place

    def step(self, batch: Batch) -> Result:
        """What each answer is worth."""
        worth = rewards(batch.data["asked"], batch.data["answered"])
        return Result(worth, {"reward": float(worth.mean()), "perfect": float((worth > 1 - 1e-9).mean())})


class Reference(_WithPolicy):
    """Says how likely the answers were before any training."""

    def step(self, batch: Batch) -> Floats:
        """The log-probability of every token."""
        return self.policy.log_probabilities(batch.data["asked"], batch.data["answered"])


class Trainer(_WithPolicy):
    """Makes good answers more likely: one update for each batch."""

    def __init__(
        self, *, group: int = 16, clip: float = 0.2, kl: float = 0.001, rate: float = 4e-3, **common: Any
    ) -> None:
        super().__init__(trains=True, **common)
        self.group = group
        self.rules = Rules(clip, kl, rate)

    def step(self, batch: Batch) -> Result:
        """Learn from what rollout, reward and reference have made of a batch."""
        made = batch.data["rollout"]
        advantage = advantages(batch.data["reward"], self.group)
        facts = self.policy.update(
            made["asked"], made["answered"], made["logs"], batch.data["reference"], advantage, self.rules
        )
        return Result(None, facts)

    def weights(self) -> Any:
        """What the rollout needs."""
        return self.policy.copied()

    def save(self, path: Path) -> None:
        """Weights and moments."""
        np.savez(path / "policy.npz", **self.policy.state())  # type: ignore[arg-type]

    def load(self, path: Path) -> None:
        """Go on from there."""
        with np.load(path / "policy.npz") as state:
            self.policy.restore(dict(state))
