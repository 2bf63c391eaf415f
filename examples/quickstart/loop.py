"""A loop of one's own, timed: `python examples/quickstart/loop.py` writes out/costs.yaml, which trimtab plans with."""

from __future__ import annotations

import numpy as np

import trimtab

rng = np.random.default_rng(0)
weights = rng.normal(size=(64, 64)) / 8


def generate(tokens: int) -> np.ndarray:
    """Answers, token by token."""
    state = rng.normal(size=(64, 64))
    for _ in range(tokens):
        state = np.tanh(state @ weights)
    return state


def train(answers: np.ndarray) -> None:
    """One update of the weights."""
    for _ in range(10):
        gradient = answers.T @ np.tanh(answers @ weights)
        weights[:] -= 1e-5 * gradient


for _step in range(12):
    with trimtab.profile.iteration():
        with trimtab.profile.component("rollout", gpus=8):
            batch = generate(tokens=40)
        with trimtab.profile.component("trainer", gpus=8):  # on CUDA: sync=torch.cuda.synchronize
            train(batch)

trimtab.profile.save("out/costs.yaml")
