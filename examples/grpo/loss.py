"""The arithmetic of GRPO, the same for every backend: advantages within a group, a clipped ratio, a KL penalty."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rules:
    """How one update is made. `clip` bounds the ratio of new to old probability, `kl` weighs the reference."""

    clip: float = 0.2
    kl: float = 0.001
    rate: float = 3e-3


def advantages(rewards: Floats, group: int) -> Floats:
    """Each answer against the others to the same question: the group's mean off, over its spread."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    return np.asarray((centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1))


def token_slopes(
    new: Floats, old: Floats, reference: Floats, advantage: Floats, counts: NDArray[np.bool_], rules: Rules
) -> tuple[Floats, dict[str, float]]:
    """How the loss changes with each token's log-probability, and what there is to say of it.

    All are answers x places; `advantage` has one value an answer, `counts` marks the tokens that were written. The loss
    is the mean over all of these: minus the clipped surrogate, plus `kl` times the k3 estimate of the divergence.
    """
    ratio = np.exp(np.where(counts, new - old, 0.0))
    gain = advantage[:, None]
    clipped = np.clip(ratio, 1 - rules.clip, 1 + rules.clip)
    limits = ratio * gain > clipped * gain  # here the clip decides, and nothing pulls any further
    behind = np.where(counts, reference - new, 0.0)
    total = max(1, int(counts.sum()))
    slopes = np.where(limits, 0.0, -ratio * gain) + rules.kl * (1.0 - np.exp(behind))
    surrogate = np.minimum(ratio * gain, clipped * gain)
    divergence = np.exp(behind) - behind - 1.0
    facts = {
        "loss": float(((-surrogate + rules.kl * divergence) * counts).sum() / total),
        "kl": float((divergence * counts).sum() / total),
        "clipped": float((limits & counts).sum() / total),
    }
    return np.asarray(np.where(counts, slopes, 0.0) / total), facts
