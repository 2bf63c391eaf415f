"""The base of frameworks with two pools: the engines, and everything that trains; they share GPUs or are apart.

GPUs are counted in a row: the trainer's come first, and the engines' are the same or follow them. So a trainer has GPUs
of a single node or whole nodes, and pools need not be the same on each of their nodes. Models with GPUs of their own
beside both keep them: they are not part of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement
from trimtab.model.workflow import Cluster, Node, Variant

PER_NODE = 8
"""GPUs of a node where nothing says how many."""


class TrainerAndEngines(FrameworkConfig):
    """A config while it is read: how many GPUs each pool has, and whether they are the same."""

    EVEN_NODES = False

    trainer_gpus: int
    rollout_gpus: int
    shared: bool
    outside: int = 0  # GPUs of models that are not part of the plan
    per_node: int = PER_NODE

    @property
    def taken(self) -> int:
        both = self.trainer_gpus, self.rollout_gpus
        return max(both) if self.shared else sum(both)

    def nodes(self) -> Cluster:
        """The nodes under the run: those stated, or as many of `per_node` GPUs as it takes."""
        reader, taken = self.reader, self.taken + self.outside
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            self.per_node = reader.count("trimtab.gpus_per_node")
            nodes = reader.count("trimtab.nodes", 1)
            if taken > nodes * self.per_node:
                raise InputError(f"the run has {taken} GPUs, the cluster {nodes * self.per_node}", where=self.path)
            taken = nodes * self.per_node
        common.check_gpus(taken, "the pools of the run", self.path)
        if taken > self.per_node:
            self.assumptions.append(
                f"nodes have {self.per_node} GPUs; if not, add ++trimtab.nodes=N ++trimtab.gpus_per_node=G"
            )
        left = taken - self.outside
        sizes = [self.per_node] * (left // self.per_node) + ([left % self.per_node] if left % self.per_node else [])
        return Cluster(tuple(Node(name=f"node{index}", gpus=gpus) for index, gpus in enumerate(sizes)))

    def shape(self, gpus: int) -> tuple[int, int]:
        """(nodes, GPUs of each) of so many GPUs that come first."""
        return (1, gpus) if gpus <= self.per_node else (gpus // self.per_node, self.per_node)

    def trainer_sizes(self, parallel: int, runs: Callable[[int], bool]) -> Variant:
        """The trainer's GPU counts: `runs` says whether it can have so many data-parallel ranks."""
        sizes = range(parallel, self.cluster.gpus + 1, parallel)
        whole = (size for size in sizes if size <= self.per_node or size % self.per_node == 0)
        return Variant(multiple_of=parallel, gpus=tuple(size for size in whole if runs(size // parallel)))

    def halves(self, engine: int) -> tuple[int, int] | None:
        """GPUs of the trainer and of the engines if the trainer gets at most half of them; None if none fit."""
        trainer = self.sizes(self.REQUIRED[1])
        fitting = [size for size in trainer.gpus or () if size <= self.cluster.gpus // 2]
        if not fitting:
            return None
        rest = self.cluster.gpus - fitting[-1]
        return fitting[-1], rest - rest % engine

    def can_share(self) -> bool:
        return True

    def can_separate(self) -> bool:
        return True

    def options(self) -> list[list[list[str]]]:
        rollout, training = self.COMPONENTS[0], self.measured(*self.COMPONENTS[1:])
        shared, apart = [[rollout, *training]], [[rollout], training]
        return [*([shared] if self.can_share() else []), *([apart] if self.can_separate() else [])]

    def current(self) -> CurrentPlacement:
        first = 0 if self.shared else self.trainer_gpus
        engines, training = range(first, first + self.rollout_gpus), range(self.trainer_gpus)
        ranks = {name: tuple(engines if name == self.COMPONENTS[0] else training) for name in self.costs}
        return CurrentPlacement(ranks, self.path)


def flag_settings(values: dict[str, Any], *, equals: bool = True) -> PlanSettings:
    """Settings of a framework that takes flags, with dashes; a value of None is a flag that has to go.

    Without `equals` a flag and its value are words of their own.
    """
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(_flag(name))
        elif value is not None:
            words += [f"{_flag(name)}={value}"] if equals else [_flag(name), str(value)]
    gone = [_flag(name) for name, value in values.items() if value is None]
    stated = {name: value for name, value in values.items() if value is not None}
    advice = (f"leave out {', '.join(gone)}",) if gone else ()
    return PlanSettings(values, block_text(nested(stated)), advice, tuple(words))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
