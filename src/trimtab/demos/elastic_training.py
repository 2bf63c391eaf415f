"""A small training that really trains, for `trimtab demo elastic` and the elastic loop example.

Data-parallel: the global batch of a step depends on its number alone, members take shares of it, gradients are summed
in the order of ranks and divided by the rows of the whole batch. So the loss does not depend on the number of members
or its changes, except for rounding; `fixed_run` returns the reference. PyTorch if installed, else numpy: same model,
data, initial weights and optimiser (Adam). Independent of Ray. Workers import this module, so heavy imports wait until
a model is built.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen

ROWS = 384  # of a global batch; divisible by 1 to 4, 6 and 8
FEATURES = 16
HIDDEN = 48
SEED = 2
RATE, DECAY_1, DECAY_2, TINY = 0.01, 0.9, 0.999, 1e-8  # Adam
TOLERANCE = 1e-9  # relative; sums in another order differ by rounding

Array = Any  # a float64 numpy array


class GradientShare(Frozen):
    """Sums over a member's rows, so that shares of any size can be combined."""

    rows: int
    loss_sum: float
    gradients: tuple[Array, ...]


class TrainingReport(Frozen):
    """A member's report of a step: loss of the batch and of its rows, and its device."""

    loss: float
    own_loss: float
    device: str
    seconds: float
    rows: int


class TrainingModel(Protocol):
    """A network with its optimiser."""

    device: str

    def gradients(self, inputs: Array, targets: Array) -> GradientShare:
        """Loss and gradients, summed over these rows; does not change the model."""

    def apply(self, gradients: Sequence[Array]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        """Weights and optimiser moments as plain arrays, understood by both models."""

    def load(self, state: dict[str, Any]) -> None:
        pass


class ElasticTrainer:
    """A member of an elastic group: computes on its share, commits the combined gradients.

    The batch has `rows` rows for all members together, or `rows_each` for each: then more members do more work a step.
    """

    def __init__(
        self, backend: str = "auto", rows: int = ROWS, slow_s: float = 0.0, rows_each: int = 0, hidden: int = HIDDEN
    ) -> None:
        self.model = model_of(backend, hidden)
        self.rows, self.rows_each = rows, rows_each
        self.slow_s = slow_s  # a pause after the work, for watching
        self.rank, self.size = 0, 1
        self._own = (float("nan"), 0, 0.0)

    def enter(self, world: Any) -> None:
        self.rank, self.size = world.rank, world.size

    def compute(self, step: int, batch: Any = None) -> GradientShare:
        """Gradients of this member's rows; does not change the model."""
        began = time.perf_counter()
        if self.rows_each:
            inputs, targets = batch_of(step, self.rows_each, self.rank)
        else:
            inputs, targets = (array[share_of(self.rank, self.size, self.rows)] for array in batch_of(step, self.rows))
        share = self.model.gradients(inputs, targets)
        mean = share.loss_sum / share.rows if share.rows else float("nan")
        self._own = (mean, share.rows, time.perf_counter() - began)
        if self.slow_s:
            time.sleep(self.slow_s)
        return share

    def commit(self, step: int, parts: Sequence[GradientShare]) -> TrainingReport:
        """Applies the combined gradients."""
        loss, gradients = combined(parts)
        self.model.apply(gradients)
        own, rows, seconds = self._own
        return TrainingReport(loss, own, self.model.device, seconds, rows)

    def save(self) -> dict[str, Any]:
        return self.model.state()

    def load(self, state: dict[str, Any]) -> None:
        self.model.load(state)


def combined(parts: Sequence[GradientShare]) -> tuple[float, list[Array]]:
    """Loss and gradients of the whole batch: sums in the order of ranks, divided by all rows."""
    rows = sum(part.rows for part in parts)
    sums = [np.array(gradient, copy=True) for gradient in parts[0].gradients]
    for part in parts[1:]:
        for total, gradient in zip(sums, part.gradients, strict=True):
            total += gradient
    return sum(part.loss_sum for part in parts) / rows, [total / rows for total in sums]


def fixed_run(steps: int, members: int = 1, rows: int = ROWS) -> list[float]:
    """Losses of a run with fixed membership, in this process, with numpy."""
    model = NumpyModel()
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = batch_of(step, rows)
        shares = [share_of(rank, members, rows) for rank in range(members)]
        loss, gradients = combined([model.gradients(inputs[share], targets[share]) for share in shares])
        model.apply(gradients)
        losses.append(loss)
    return losses


def share_of(rank: int, size: int, rows: int) -> slice:
    """Rows of a member: contiguous and balanced; all members together cover the batch exactly."""
    return slice(rank * rows // size, (rank + 1) * rows // size)


def batch_of(step: int, rows: int = ROWS, rank: int = 0) -> tuple[Array, Array]:
    """The batch of a step (and rank), deterministic: points, and the values of a hidden function."""
    points = np.random.default_rng((SEED, step, rank) if rank else (SEED, step)).normal(size=(rows, FEATURES))
    hidden = np.random.default_rng(SEED).normal(size=(FEATURES, 3))
    seen = points @ hidden / np.sqrt(FEATURES)
    return points, (np.sin(2 * seen[:, :1]) + seen[:, 1:2] * seen[:, 2:3]) / 2


def first_weights(hidden: int = HIDDEN) -> list[Array]:
    source = np.random.default_rng(SEED + 1)
    return [
        source.normal(size=(FEATURES, hidden)) / np.sqrt(FEATURES),
        np.zeros(hidden),
        source.normal(size=(hidden, 1)) / np.sqrt(hidden),
        np.zeros(1),
    ]


def model_of(backend: str = "auto", hidden: int = HIDDEN) -> TrainingModel:
    """The model by backend: `torch`, `numpy`, or `auto` for torch if installed."""
    if backend not in ("auto", "torch", "numpy"):
        raise InputError(f"unknown backend {backend!r}", hint="auto, torch or numpy")
    has_torch = importlib.util.find_spec("torch") is not None
    if backend == "torch" and not has_torch:
        raise InputError("PyTorch is not installed here", hint="pip install 'trimtab[torch]', or --backend numpy")
    return TorchModel(hidden) if has_torch and backend != "numpy" else NumpyModel(hidden)


class NumpyModel:
    """One hidden layer, squared error, Adam; gradients by hand."""

    device = "CPU"

    def __init__(self, hidden: int = HIDDEN) -> None:
        self._weights = first_weights(hidden)
        self._first = [np.zeros_like(weight) for weight in self._weights]
        self._second = [np.zeros_like(weight) for weight in self._weights]
        self._applied = 0

    def gradients(self, inputs: Array, targets: Array) -> GradientShare:
        into, bias, out, last = self._weights
        hidden = np.tanh(inputs @ into + bias)
        error = hidden @ out + last - targets
        back = (2 * error) @ out.T * (1 - hidden**2)
        found = (inputs.T @ back, back.sum(axis=0), hidden.T @ (2 * error), (2 * error).sum(axis=0))
        return GradientShare(len(inputs), float((error**2).sum()), found)

    def apply(self, gradients: Sequence[Array]) -> None:
        self._applied += 1
        by_1, by_2 = 1 - DECAY_1**self._applied, 1 - DECAY_2**self._applied
        for at, gradient in enumerate(gradients):
            self._first[at] = DECAY_1 * self._first[at] + (1 - DECAY_1) * gradient
            self._second[at] = DECAY_2 * self._second[at] + (1 - DECAY_2) * gradient**2
            step = (self._first[at] / by_1) / (np.sqrt(self._second[at] / by_2) + TINY)
            self._weights[at] = self._weights[at] - RATE * step

    def state(self) -> dict[str, Any]:
        return {
            "weights": [array.copy() for array in self._weights],
            "first": [array.copy() for array in self._first],
            "second": [array.copy() for array in self._second],
            "applied": self._applied,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._weights, self._first, self._second = (
            [np.array(array, copy=True) for array in state[key]] for key in ("weights", "first", "second")
        )
        self._applied = state["applied"]


class TorchModel:
    """The same model in PyTorch, with autograd, on the GPU of this process if it has one.

    Adam is written out: the first optimiser of `torch.optim` in a process imports TorchDynamo, which takes longer than
    PyTorch itself, and a newcomer would train that much later.
    """

    def __init__(self, hidden: int = HIDDEN) -> None:
        import torch

        torch.set_num_threads(1)  # several members share the cores of a machine
        has_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) and torch.cuda.is_available()
        self._torch = torch
        self._place = torch.device("cuda" if has_gpu else "cpu")
        self.device = "GPU" if has_gpu else "CPU"
        self._weights = [self._leaf(weight) for weight in first_weights(hidden)]
        self._first = [torch.zeros_like(weight) for weight in self._weights]
        self._second = [torch.zeros_like(weight) for weight in self._weights]
        self._applied = 0

    def gradients(self, inputs: Array, targets: Array) -> GradientShare:
        torch = self._torch
        if not len(inputs):
            return GradientShare(0, 0.0, tuple(np.zeros(weight.shape) for weight in self._weights))
        into, bias, out, last = self._weights
        hidden = torch.tanh(self._tensor(inputs) @ into + bias)
        loss = ((hidden @ out + last - self._tensor(targets)) ** 2).sum()
        found = torch.autograd.grad(loss, self._weights)
        return GradientShare(len(inputs), float(loss.detach()), tuple(gradient.cpu().numpy() for gradient in found))

    def apply(self, gradients: Sequence[Array]) -> None:
        self._applied += 1
        by_1, by_2 = 1 - DECAY_1**self._applied, 1 - DECAY_2**self._applied
        moments = zip(self._weights, self._first, self._second, gradients, strict=True)
        with self._torch.no_grad():
            for weight, first, second, values in moments:
                gradient = self._tensor(values)
                first.lerp_(gradient, 1 - DECAY_1)
                second.mul_(DECAY_2).addcmul_(gradient, gradient, value=1 - DECAY_2)
                weight -= RATE * (first / by_1) / ((second / by_2).sqrt() + TINY)

    def state(self) -> dict[str, Any]:
        kept = {"weights": self._weights, "first": self._first, "second": self._second}
        arrays = {key: [value.detach().cpu().numpy().copy() for value in values] for key, values in kept.items()}
        return {**arrays, "applied": self._applied}

    def load(self, state: dict[str, Any]) -> None:
        self._weights = [self._leaf(weight) for weight in state["weights"]]
        self._first, self._second = ([self._tensor(array) for array in state[key]] for key in ("first", "second"))
        self._applied = state["applied"]

    def _leaf(self, values: Array) -> Any:
        return self._tensor(values).requires_grad_(True)

    def _tensor(self, values: Array) -> Any:
        return self._torch.tensor(np.asarray(values), dtype=self._torch.float64, device=self._place)
