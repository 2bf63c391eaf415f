"""Capacity accounting: what every node has and holds, what every pool may use and uses. Exact integers, in arrays.

A row is a node, a column a resource. What is held must never exceed what there is; `PoolMachine.check` verifies that
against the records. Rows of lost nodes are reused, so that the order of nodes, which breaks ties, is the same in a
replay and after loading a snapshot.

Bin packing chooses the rows of the bundles of a placement group. A bundle goes to the node it leaves the least on (GPUs
first, then CPUs), so that empty nodes stay empty. Bundles of one size are placed whenever that is possible; bundles of
different sizes are placed largest first, which may miss a placement that exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab.core.resources import LABEL, Resources
from trimtab.model.pool import Labels, PlacementStrategy, label_matches

Vector = NDArray[np.int64]

FIRST_COLUMNS = ("cpu", "gpu", "memory")
CPU, GPU = 0, 1
LABELLED = 2**40  # units of a label on a node that has it: enough for all of its tasks


class ClusterCapacity:
    """Nodes and pools as integer matrices."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {name: at for at, name in enumerate(FIRST_COLUMNS)}
        self.row_of: dict[str, int] = {}
        self.nodes: list[str | None] = []  # by row; None where a node was lost
        self.labels: dict[str, dict[str, str]] = {}  # by node
        self._vectors: dict[Resources, Vector] = {}
        width = 8
        self.total: Vector = np.zeros((0, width), np.int64)
        self.outside: Vector = np.zeros((0, width), np.int64)
        self.held: Vector = np.zeros((0, width), np.int64)  # by groups, also those being created or removed
        self.kept: Vector = np.zeros((0, width), np.int64)  # for claims
        self.idle: Vector = np.zeros((0, width), np.int64)  # part of held: empty dynamic groups
        self.usable: NDArray[np.bool_] = np.zeros(0, np.bool_)  # up, and not cordoned
        self.cordoned: set[str] = set()
        self.shape = 0  # changes with total capacity, usable nodes and reserved slots
        self._free: Vector | None = None
        # Upper bounds on what any usable row has free, without and with its idle slots; exact after `tighten`.
        self._max_free: tuple[list[int], list[int]] | None = None
        self._max_is_exact = False
        self._holes: list[int] = []  # a heap of the rows of lost nodes
        self.quota: dict[str, Vector] = {}
        self.used: dict[str, Vector] = {}
        self.quota_kept: dict[str, Vector] = {}  # for claims

    # ---- vectors ----

    def vector(self, amounts: Resources) -> Vector:
        """Amounts as a vector; read-only."""
        known = self._vectors.get(amounts)
        if known is None:
            for name, _ in amounts:
                if name not in self.columns:
                    self._add_column(name)
            known = np.zeros(self.total.shape[1], np.int64)
            for name, units in amounts:
                known[self.columns[name]] = units
            if len(self._vectors) > 10_000:
                self._vectors.clear()
            self._vectors[amounts] = known
        return known

    def sum_vector(self, bundles: Sequence[Resources]) -> Vector:
        if len(bundles) == 1:
            return self.vector(bundles[0])
        # Add every column first: a new column makes older vectors too short.
        for bundle in bundles:
            self.vector(bundle)
        together: Vector = np.sum([self.vector(bundle) for bundle in bundles], axis=0, dtype=np.int64)
        return together

    def resources(self, vector: Vector) -> Resources:
        """A vector as amounts; negative ones count as zero."""
        return Resources(tuple(sorted((name, int(vector[at])) for name, at in self.columns.items() if vector[at] > 0)))

    def _add_column(self, name: str) -> None:
        self.columns[name] = len(self.columns)
        width = self.total.shape[1]
        if len(self.columns) > width:
            self._widen(width)
        if name.startswith(LABEL):
            for node, row in self.row_of.items():
                self._set_label(node, row, name)
            self.shape += 1
            self._free = self._max_free = None

    def _set_label(self, node: str, row: int, name: str) -> None:
        key, _, wanted = name.removeprefix(LABEL).partition("=")
        self.total[row, self.columns[name]] = LABELLED * label_matches(self.labels[node], key, wanted)

    def _widen(self, more: int) -> None:
        def wider(matrix: Vector) -> Vector:
            return np.concatenate([matrix, np.zeros((*matrix.shape[:-1], more), np.int64)], axis=-1)

        self.total, self.outside, self.held = wider(self.total), wider(self.outside), wider(self.held)
        self.kept, self.idle = wider(self.kept), wider(self.idle)
        for by_pool in (self.quota, self.used, self.quota_kept):
            for pool in by_pool:
                by_pool[pool] = wider(by_pool[pool])
        self._vectors.clear()
        self._free = self._max_free = None

    # ---- nodes ----

    def node_rows(self) -> NDArray[np.bool_]:
        found = np.zeros(len(self.total), np.bool_)
        found[list(self.row_of.values())] = True
        return found

    def set_node(self, node: str, amounts: Resources, outside: Resources, labels: Labels) -> None:
        self.vector(amounts), self.vector(outside)
        self.labels[node] = dict(labels)
        row = self.row_of.get(node)
        if row is None:
            row = heapq.heappop(self._holes) if self._holes else self._new_row()
            self.nodes[row] = node
            self.row_of[node] = row
        self.total[row] = self.vector(amounts)
        self.outside[row] = self.vector(outside)
        for name in self.columns:
            if name.startswith(LABEL):
                self._set_label(node, row, name)
        self.usable[row] = node not in self.cordoned
        self.shape += 1
        self._free = self._max_free = None

    def set_row(self, row: int, node: str | None) -> None:
        """The node of a row of a snapshot; None where a node was lost."""
        while len(self.nodes) <= row:
            self._new_row()
        self.nodes[row] = node
        if node is not None:
            self.row_of[node] = row
        else:
            heapq.heappush(self._holes, row)

    def _new_row(self) -> int:
        row = len(self.nodes)
        self.nodes.append(None)
        if row >= len(self.usable):
            more = max(16, row)
            width = self.total.shape[1]
            pad = np.zeros((more, width), np.int64)
            self.total, self.outside = np.concatenate([self.total, pad]), np.concatenate([self.outside, pad])
            self.held, self.kept = np.concatenate([self.held, pad]), np.concatenate([self.kept, pad])
            self.idle = np.concatenate([self.idle, pad])
            self.usable = np.concatenate([self.usable, np.zeros(more, np.bool_)])
        return row

    def cordon(self, node: str, on: bool) -> None:
        """Exclude the node from placement, or include it again."""
        self._max_free = None
        self.shape += 1
        (self.cordoned.add if on else self.cordoned.discard)(node)
        row = self.row_of.get(node)
        if row is not None:
            self.usable[row] = not on

    def drop_node(self, node: str) -> None:
        row = self.row_of.pop(node)
        del self.labels[node]
        self.nodes[row] = None
        heapq.heappush(self._holes, row)
        self.cordoned.discard(node)
        for matrix in (self.total, self.outside, self.held, self.kept, self.idle):
            matrix[row] = 0
        self.usable[row] = False
        self.shape += 1
        self._free = self._max_free = None

    @property
    def free(self) -> Vector:
        """What is neither held nor kept, by row. Negative where other users of Ray took more than was left."""
        if self._free is None:
            self._free = self.total - self.outside - self.held - self.kept
        return self._free

    def too_large(self, demand: Vector, *, with_idle: bool = False) -> bool:
        """Whether no usable row has that much of each resource; False is not conclusive."""
        if self._max_free is None:
            self.tighten()
        most = (self._max_free or ([], []))[with_idle]
        return any(units > have for units, have in zip(demand.tolist(), most, strict=True))

    def tighten(self) -> None:
        """Compute the exact per-column maximum over usable rows; keeping it exact all the time is too slow."""
        if self._max_is_exact and self._max_free is not None:
            return
        self._max_is_exact = True
        usable = self.usable[: len(self.nodes)]
        if not usable.any():
            nothing = [0] * self.total.shape[1]
            self._max_free = (nothing, list(nothing))
            return
        free, idle = self.free[: len(usable)][usable], self.idle[: len(usable)][usable]
        self._max_free = (free.max(axis=0).tolist(), (free + idle).max(axis=0).tolist())

    def _raise_max(self, row: int, bundle: Resources) -> None:
        """Capacity of the row became free or idle: raise the maximum where needed."""
        if self._max_free is None:
            return
        free, with_idle = self._max_free
        for name, _ in bundle:
            column = self.columns[name]
            left = int(self.free[row, column])
            free[column] = max(free[column], left)
            with_idle[column] = max(with_idle[column], left + int(self.idle[row, column]))

    def _add(self, matrix: Vector, nodes: Sequence[str], bundles: Sequence[Resources], sign: int, free: int) -> None:
        self._max_is_exact = False
        for node, bundle in zip(nodes, bundles, strict=True):
            row = self.row_of.get(node)
            if row is None:
                continue  # lost; its row is cleared already
            vector = self.vector(bundle)
            if sign > 0:
                matrix[row] += vector
            else:
                matrix[row] -= vector
            if self._free is not None and free:
                if sign * free > 0:
                    self._free[row] += vector
                else:
                    self._free[row] -= vector
            if sign * (free or 1) > 0:
                self._raise_max(row, bundle)

    def hold(self, nodes: Sequence[str], bundles: Sequence[Resources]) -> None:
        for bundle in bundles:
            self.vector(bundle)
        self._add(self.held, nodes, bundles, 1, -1)

    def release(self, nodes: Sequence[str], bundles: Sequence[Resources]) -> None:
        self._add(self.held, nodes, bundles, -1, -1)

    def parts(self, nodes: Sequence[str], bundles: Sequence[Resources]) -> Iterator[tuple[int, Vector]]:
        """Row and vector of each bundle whose node is up."""
        for node, bundle in zip(nodes, bundles, strict=True):
            if node in self.row_of:
                yield self.row_of[node], self.vector(bundle)

    def set_idle(self, nodes: Sequence[str], bundles: Sequence[Resources], idle: bool) -> None:
        self._add(self.idle, nodes, bundles, 1 if idle else -1, 0)

    def widened(self, vector: Vector) -> Vector:
        """A vector created before the latest resources were added, at the current width."""
        missing = self.total.shape[1] - len(vector)
        return np.concatenate([vector, np.zeros(missing, np.int64)]) if missing else vector

    def keep(self, node: str, vector: Vector, sign: int) -> None:
        """Keep free capacity of a node for a claim, or stop keeping it."""
        row = self.row_of.get(node)
        if row is None:
            return
        self._max_is_exact = False
        if sign < 0:
            self._max_free = None
        vector = self.widened(vector)
        self.kept[row] += sign * vector
        if self._free is not None:
            self._free[row] -= sign * vector

    # ---- pools ----

    def set_pool(self, pool: str, quota: Resources) -> None:
        self.vector(quota)
        self.quota[pool] = self.vector(quota).copy()
        self.used[pool] = np.zeros_like(self.quota[pool])
        self.quota_kept[pool] = np.zeros_like(self.quota[pool])

    def set_quota(self, pool: str, quota: Resources) -> None:
        self.vector(quota)
        self.quota[pool] = self.vector(quota).copy()

    def use(self, pool: str, bundles: Sequence[Resources], sign: int) -> None:
        for bundle in bundles:
            vector = self.vector(bundle)
            self.used[pool] += sign * vector

    def quota_left(self, pool: str) -> Vector:
        return self.quota[pool] - self.used[pool] - self.quota_kept[pool]


# ---- bin packing ----


def fitting(free: Vector, demand: Vector) -> NDArray[np.bool_]:
    """Which rows have capacity for the demand."""
    # Only the requested columns, one by one: several times faster than comparing whole rows.
    found = np.ones(len(free), np.bool_)
    for column in np.flatnonzero(demand):
        found &= free[:, column] >= demand[column]
    return found


def tightest(free: Vector, usable: NDArray[np.bool_], demand: Vector) -> int | None:
    """The row that fits the demand and is left with the least."""
    rows = np.flatnonzero(fitting(free, demand) & usable[: len(free)])
    if not len(rows):
        return None
    if len(rows) == 1:
        return int(rows[0])
    return int(rows[np.argmin((free[rows, GPU] << 34) + free[rows, CPU])])


def place(
    free: Vector, usable: NDArray[np.bool_], bundles: Sequence[Vector], strategy: PlacementStrategy
) -> tuple[int, ...] | None:
    """A row for each bundle, or None where they do not all fit."""
    if len(bundles) == 1:
        row = tightest(free, usable, bundles[0])
        return None if row is None else (row,)
    if strategy in (PlacementStrategy.strict_pack, PlacementStrategy.pack):
        row = tightest(free, usable, np.sum(bundles, axis=0, dtype=np.int64))
        if row is not None:
            return (row,) * len(bundles)
        if strategy is PlacementStrategy.strict_pack:
            return None
    free = free.copy()
    usable = usable[: len(free)].copy()
    order = sorted(range(len(bundles)), key=lambda at: (-int(bundles[at][GPU]), -int(bundles[at][CPU]), at))
    rows: dict[int, int] = {}
    taken = np.zeros(len(usable), np.bool_)
    for at in order:
        row = None
        if strategy is PlacementStrategy.pack:
            row = tightest(free, usable & taken, bundles[at])
        elif strategy in (PlacementStrategy.spread, PlacementStrategy.strict_spread):
            row = tightest(free, usable & ~taken, bundles[at])
        if row is None and strategy is not PlacementStrategy.strict_spread:
            row = tightest(free, usable, bundles[at])
        if row is None:
            return None
        rows[at] = row
        taken[row] = True
        free[row] -= bundles[at]
    return tuple(rows[at] for at in range(len(bundles)))


def never_placeable(
    total: Vector, there: NDArray[np.bool_], bundles: Sequence[Vector], strategy: PlacementStrategy
) -> str | None:
    """Why the bundles could not be placed even on an empty cluster, or None. Only certainties."""
    nodes = total[there[: len(total)]]
    if not len(nodes):
        return "there is no node"
    if strategy is PlacementStrategy.strict_pack and len(bundles) > 1:
        if not (nodes >= np.sum(bundles, axis=0)).all(axis=1).any():
            return "no node is large enough for all of it together (STRICT_PACK)"
        return None
    for at, bundle in enumerate(bundles):
        if not (nodes >= bundle).all(axis=1).any():
            return "no node is large enough" if len(bundles) == 1 else f"no node is large enough for bundle {at + 1}"
    if strategy is PlacementStrategy.strict_spread and len(bundles) > len(nodes):
        return f"it needs {len(bundles)} nodes (STRICT_SPREAD), and there are {len(nodes)}"
    if (np.sum(bundles, axis=0) > nodes.sum(axis=0)).any():
        return "all nodes together are too small for it"
    return None
