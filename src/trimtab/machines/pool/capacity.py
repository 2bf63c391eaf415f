"""The books: what every node has and holds, what every pool may use and uses. Exact whole numbers, in arrays.

A row is a node, a column a resource. It decides nothing; it must never let what is held exceed what there is, which
`PoolMachine.check` verifies against the records. Rows of lost nodes are used again, so that the order of nodes, which
breaks ties, is the same in a replay and after reading a snapshot.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab.core.resources import Resources

Vector = NDArray[np.int64]

FIRST_COLUMNS = ("cpu", "gpu", "memory")


class ClusterCapacity:
    """Nodes and pools as matrices of whole numbers."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {name: at for at, name in enumerate(FIRST_COLUMNS)}
        self.row_of: dict[str, int] = {}
        self.nodes: list[str | None] = []  # by row; None where a node was lost
        self._vectors: dict[Resources, Vector] = {}
        width = 8
        self.total: Vector = np.zeros((0, width), np.int64)
        self.outside: Vector = np.zeros((0, width), np.int64)
        self.held: Vector = np.zeros((0, width), np.int64)  # by groups, also those being made or removed
        self.kept: Vector = np.zeros((0, width), np.int64)  # for claims
        self.idle: Vector = np.zeros((0, width), np.int64)  # of what is held: dynamic groups that nobody is in
        self.usable: NDArray[np.bool_] = np.zeros(0, np.bool_)  # there, and not cordoned
        self.cordoned: set[str] = set()
        self.shape = 0  # changes with what nodes have, which are usable, and what is reserved of them
        self._free: Vector | None = None
        # No usable row has more than this free, nor with its idle slots; less may be true until `tighten`.
        self._max_free: tuple[list[int], list[int]] | None = None
        self._max_is_exact = False
        self._holes: list[int] = []  # a heap of the rows of lost nodes
        self.quota: dict[str, Vector] = {}
        self.used: dict[str, Vector] = {}
        self.quota_kept: dict[str, Vector] = {}  # for claims

    # ---- vectors ----

    def vector(self, amounts: Resources) -> Vector:
        """Amounts as a vector; not to be changed."""
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
        """All bundles together."""
        if len(bundles) == 1:
            return self.vector(bundles[0])
        # First every column, then the sum: a new column makes older vectors too short.
        for one in bundles:
            self.vector(one)
        together: Vector = np.sum([self.vector(one) for one in bundles], axis=0, dtype=np.int64)
        return together

    def resources(self, vector: Vector) -> Resources:
        """A vector as amounts; what is negative counts as nothing."""
        return Resources(tuple(sorted((name, int(vector[at])) for name, at in self.columns.items() if vector[at] > 0)))

    def _add_column(self, name: str) -> None:
        self.columns[name] = len(self.columns)
        width = self.total.shape[1]
        if len(self.columns) <= width:
            return
        more = width

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
        """Which rows are nodes."""
        found = np.zeros(len(self.total), np.bool_)
        found[list(self.row_of.values())] = True
        return found

    def set_node(self, node: str, amounts: Resources, outside: Resources) -> None:
        """A node is there, with these figures."""
        self.vector(amounts), self.vector(outside)
        row = self.row_of.get(node)
        if row is None:
            row = heapq.heappop(self._holes) if self._holes else self._new_row()
            self.nodes[row] = node
            self.row_of[node] = row
        self.total[row] = self.vector(amounts)
        self.outside[row] = self.vector(outside)
        self.usable[row] = node not in self.cordoned
        self.shape += 1
        self._free = self._max_free = None

    def set_row(self, row: int, node: str | None) -> None:
        """The node of a row as a snapshot has it; None where one was lost."""
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
        """Nothing new goes to the node, or may again."""
        self._max_free = None
        self.shape += 1
        (self.cordoned.add if on else self.cordoned.discard)(node)
        row = self.row_of.get(node)
        if row is not None:
            self.usable[row] = not on

    def drop_node(self, node: str) -> None:
        """The node is gone, and all that was held of it."""
        row = self.row_of.pop(node)
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
        """What nobody holds or keeps, by row. Negative where others took more than was left."""
        if self._free is None:
            self._free = self.total - self.outside - self.held - self.kept
        return self._free

    def too_large(self, ask: Vector, *, with_idle: bool = False) -> bool:
        """Whether no usable row has so much of each resource; False says nothing."""
        if self._max_free is None:
            self.tighten()
        most = (self._max_free or ([], []))[with_idle]
        return any(units > have for units, have in zip(ask.tolist(), most, strict=True))

    def tighten(self) -> None:
        """What the most is that any usable row has, exactly. Keeping it so all the time would take too long."""
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
        """Something of the row is free or idle again: it may be the one that has most now."""
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
                continue  # lost; its row is empty already
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
        """A group takes this."""
        for bundle in bundles:
            self.vector(bundle)
        self._add(self.held, nodes, bundles, 1, -1)

    def release(self, nodes: Sequence[str], bundles: Sequence[Resources]) -> None:
        """A group is gone."""
        self._add(self.held, nodes, bundles, -1, -1)

    def set_idle(self, nodes: Sequence[str], bundles: Sequence[Resources], idle: bool) -> None:
        """A dynamic group fell idle, or is not idle any more."""
        self._add(self.idle, nodes, bundles, 1 if idle else -1, 0)

    def widened(self, vector: Vector) -> Vector:
        """A vector made before a resource was first heard of, as wide as vectors are now."""
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
        """A pool is there."""
        self.vector(quota)
        self.quota[pool] = self.vector(quota).copy()
        self.used[pool] = np.zeros_like(self.quota[pool])
        self.quota_kept[pool] = np.zeros_like(self.quota[pool])

    def set_quota(self, pool: str, quota: Resources) -> None:
        """A pool may use so much from now on."""
        self.vector(quota)
        self.quota[pool] = self.vector(quota).copy()

    def use(self, pool: str, bundles: Sequence[Resources], sign: int) -> None:
        """A task uses this of its pool's quota, or not any more."""
        for bundle in bundles:
            vector = self.vector(bundle)
            self.used[pool] += sign * vector

    def quota_left(self, pool: str) -> Vector:
        """What the pool may still use."""
        return self.quota[pool] - self.used[pool] - self.quota_kept[pool]
