"""Bin packing: which nodes the bundles of a placement group go to, given what is free. Changes nothing.

A bundle goes to the node it leaves the least on (GPUs first, then CPUs), so that empty nodes stay empty. Bundles of one
size are placed whenever that is possible; bundles of different sizes are placed largest first, which may miss a
placement that exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab.machines.pool.capacity import Vector
from trimtab.model.pool import PlacementStrategy

CPU, GPU = 0, 1  # columns of ClusterCapacity


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
