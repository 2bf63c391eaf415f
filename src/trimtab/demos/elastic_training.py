"""A small training that really trains, for `trimtab demo elastic` and the example of a loop that scales.

Data-parallel: the global batch of a step is fixed by its number alone, members take shares of it, gradients are summed
in the order of ranks and divided by the rows of the whole batch. So the loss is the same, but for rounding, however
many members there are and however often that changes; `fixed_run` says what it should be. With PyTorch where it is
there, with numpy otherwise: the same model, the same data, the same first weights, the same optimiser (Adam). Nothing
here knows of Ray. Workers import this module, so nothing heavy is imported before a model is made.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trimtab.core.errors import InputError

ROWS = 384  # of a global batch; divides by every group of up to four, and by six and eight
FEATURES = 16
HIDDEN = 48
SEED = 2
RATE, DECAY_1, DECAY_2, TINY = 0.01, 0.9, 0.999, 1e-8  # Adam
TOLERANCE = 1e-9  # relative; sums in another order differ by rounding only

Array = Any  # a float64 numpy array


@dataclass(frozen=True)
class GradientShare:
    """What one member found on its rows: sums, so that shares of any size can be put together."""

    rows: int
    loss_sum: float
    gradients: tuple[Array, ...]


@dataclass(frozen=True)
class TrainingReport:
    """What a member says of a step: the loss of the whole batch and of its own rows, and where it worked."""

    loss: float
    own_loss: float
    device: str
    seconds: float
    rows: int


class TrainingModel(Protocol):
    """A network with its optimiser."""

    device: str

    def gradients(self, inputs: Array, targets: Array) -> GradientShare:
        """Loss and gradients, summed over these rows; changes nothing."""

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of the optimiser."""

    def state(self) -> dict[str, Any]:
        """Weights and the optimiser's moments, as plain arrays: both kinds of model understand them."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class ElasticTrainer:
    """A member of an elastic group: computes on its share, commits what all found."""

    def __init__(self, backend: str = "auto", rows: int = ROWS, slow_s: float = 0.0) -> None:
        self.model = model_of(backend)
        self.rows = rows
        self.slow_s = slow_s  # for people to watch
        self.rank, self.size = 0, 1
        self._own = (float("nan"), 0, 0.0)

    def enter(self, world: Any) -> None:
        """The world has changed: take another share from now on."""
        self.rank, self.size = world.rank, world.size

    def compute(self, step: int, batch: Any = None) -> GradientShare:
        """The gradients of this member's rows; keeps nothing that counts."""
        began = time.perf_counter()
        inputs, targets = batch_of(step, self.rows)
        mine = share_of(self.rank, self.size, self.rows)
        share = self.model.gradients(inputs[mine], targets[mine])
        if self.slow_s:
            time.sleep(self.slow_s)
        mean = share.loss_sum / share.rows if share.rows else float("nan")
        self._own = (mean, share.rows, time.perf_counter() - began)
        return share

    def commit(self, step: int, parts: Sequence[GradientShare]) -> TrainingReport:
        """Apply what all found together."""
        loss, gradients = together(parts)
        self.model.apply(gradients)
        own, rows, seconds = self._own
        return TrainingReport(loss, own, self.model.device, seconds, rows)

    def save(self) -> dict[str, Any]:
        """What a newcomer needs: weights and the optimiser's moments."""
        return self.model.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on where others are."""
        self.model.load(state)


def together(parts: Sequence[GradientShare]) -> tuple[float, list[Array]]:
    """The loss and the gradients of the whole batch: sums in the order of ranks, divided by all rows."""
    rows = sum(part.rows for part in parts)
    sums = [np.array(one, copy=True) for one in parts[0].gradients]
    for part in parts[1:]:
        for total, one in zip(sums, part.gradients, strict=True):
            total += one
    return sum(part.loss_sum for part in parts) / rows, [one / rows for one in sums]


def fixed_run(steps: int, members: int = 1, rows: int = ROWS) -> list[float]:
    """The losses of a run whose membership never changes, in this process, with numpy."""
    model = NumpyModel()
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = batch_of(step, rows)
        shares = [share_of(rank, members, rows) for rank in range(members)]
        loss, gradients = together([model.gradients(inputs[one], targets[one]) for one in shares])
        model.apply(gradients)
        losses.append(loss)
    return losses


def share_of(rank: int, size: int, rows: int) -> slice:
    """The rows of one member: contiguous, as even as can be, all of them together exactly the batch."""
    return slice(rank * rows // size, (rank + 1) * rows // size)


def batch_of(step: int, rows: int = ROWS) -> tuple[Array, Array]:
    """The global batch of a step, the same wherever it is asked: points, and what a hidden function says of them."""
    points = np.random.default_rng((SEED, step)).normal(size=(rows, FEATURES))
    hidden = np.random.default_rng(SEED).normal(size=(FEATURES, 3))
    seen = points @ hidden / np.sqrt(FEATURES)
    return points, (np.sin(2 * seen[:, :1]) + seen[:, 1:2] * seen[:, 2:3]) / 2


def first_weights() -> list[Array]:
    """Where every model begins."""
    source = np.random.default_rng(SEED + 1)
    return [
        source.normal(size=(FEATURES, HIDDEN)) / np.sqrt(FEATURES),
        np.zeros(HIDDEN),
        source.normal(size=(HIDDEN, 1)) / np.sqrt(HIDDEN),
        np.zeros(1),
    ]


def model_of(backend: str = "auto") -> TrainingModel:
    """The model by the name of what reckons it: `torch`, `numpy`, or `auto` for torch where it is installed."""
    if backend not in ("auto", "torch", "numpy"):
        raise InputError(f"{backend!r} is no backend", hint="auto, torch or numpy")
    has_torch = importlib.util.find_spec("torch") is not None
    if backend == "torch" and not has_torch:
        raise InputError("PyTorch is not installed here", hint="pip install 'trimtab[torch]', or --backend numpy")
    return TorchModel() if has_torch and backend != "numpy" else NumpyModel()


class NumpyModel:
    """One hidden layer, squared error, Adam; derivatives by hand."""

    device = "CPU"

    def __init__(self) -> None:
        self._weights = first_weights()
        self._first = [np.zeros_like(one) for one in self._weights]
        self._second = [np.zeros_like(one) for one in self._weights]
        self._applied = 0

    def gradients(self, inputs: Array, targets: Array) -> GradientShare:
        """Loss and gradients, summed over these rows; changes nothing."""
        into, bias, out, last = self._weights
        hidden = np.tanh(inputs @ into + bias)
        error = hidden @ out + last - targets
        back = (2 * error) @ out.T * (1 - hidden**2)
        found = (inputs.T @ back, back.sum(axis=0), hidden.T @ (2 * error), (2 * error).sum(axis=0))
        return GradientShare(len(inputs), float((error**2).sum()), found)

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of Adam."""
        self._applied += 1
        by_1, by_2 = 1 - DECAY_1**self._applied, 1 - DECAY_2**self._applied
        for at, gradient in enumerate(gradients):
            self._first[at] = DECAY_1 * self._first[at] + (1 - DECAY_1) * gradient
            self._second[at] = DECAY_2 * self._second[at] + (1 - DECAY_2) * gradient**2
            step = (self._first[at] / by_1) / (np.sqrt(self._second[at] / by_2) + TINY)
            self._weights[at] = self._weights[at] - RATE * step

    def state(self) -> dict[str, Any]:
        """Weights and moments."""
        return {
            "weights": [one.copy() for one in self._weights],
            "first": [one.copy() for one in self._first],
            "second": [one.copy() for one in self._second],
            "applied": self._applied,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._weights, self._first, self._second = (
            [np.array(one, copy=True) for one in state[key]] for key in ("weights", "first", "second")
        )
        self._applied = state["applied"]


class TorchModel:
    """The same in PyTorch: derivatives by autograd, on the GPU of this process where it has one."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)  # several members share a machine's cores
        has_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) and torch.cuda.is_available()
        self._torch = torch
        self._place = torch.device("cuda" if has_gpu else "cpu")
        self.device = "GPU" if has_gpu else "CPU"
        self._weights = [self._leaf(one) for one in first_weights()]
        self._adam = self._optimiser()

    def gradients(self, inputs: Array, targets: Array) -> GradientShare:
        """Loss and gradients, summed over these rows; changes nothing."""
        torch = self._torch
        if not len(inputs):
            return GradientShare(0, 0.0, tuple(np.zeros(one.shape) for one in self._weights))
        into, bias, out, last = self._weights
        hidden = torch.tanh(self._tensor(inputs) @ into + bias)
        loss = ((hidden @ out + last - self._tensor(targets)) ** 2).sum()
        found = torch.autograd.grad(loss, self._weights)
        return GradientShare(len(inputs), float(loss.detach()), tuple(one.cpu().numpy() for one in found))

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of Adam."""
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = self._tensor(gradient)
        self._adam.step()

    def state(self) -> dict[str, Any]:
        """Weights and moments."""
        known = [self._adam.state.get(one, {}) for one in self._weights]
        return {
            "weights": [one.detach().cpu().numpy().copy() for one in self._weights],
            "first": [self._moment(one, state, "exp_avg") for one, state in zip(self._weights, known, strict=True)],
            "second": [self._moment(one, state, "exp_avg_sq") for one, state in zip(self._weights, known, strict=True)],
            "applied": int(known[0].get("step", 0)),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._weights = [self._leaf(one) for one in state["weights"]]
        self._adam = self._optimiser()
        for weight, first, second in zip(self._weights, state["first"], state["second"], strict=True):
            self._adam.state[weight] = {
                "step": self._torch.tensor(float(state["applied"])),
                "exp_avg": self._tensor(first),
                "exp_avg_sq": self._tensor(second),
            }

    def _optimiser(self) -> Any:
        return self._torch.optim.Adam(self._weights, lr=RATE, betas=(DECAY_1, DECAY_2), eps=TINY)

    def _leaf(self, values: Array) -> Any:
        return self._tensor(values).requires_grad_(True)

    def _tensor(self, values: Array) -> Any:
        return self._torch.tensor(np.asarray(values), dtype=self._torch.float64, device=self._place)

    def _moment(self, weight: Any, state: dict[str, Any], key: str) -> Array:
        return state[key].detach().cpu().numpy().copy() if key in state else np.zeros(tuple(weight.shape))
