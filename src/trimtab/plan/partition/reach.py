"""The exact minimum bottleneck: bisection over its possible values, with a reachability test for each.

A bottleneck is the time of some stage or transfer, so there are finitely many candidates. A candidate allows a stage or
transfer or not; then the question is which vectors of used devices reach which cut. Such a set is one big integer with
a bit for every vector: adding a device of a class is a shift, a union is an `or`. Nothing is rounded: the answer is one
of the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.plan.partition.space import Bools, Floats, PartitionSpace


@dataclass(frozen=True)
class DeviceVectors:
    """Numbering of vectors of used devices: one digit for each class.

    `growing[t]` has the bits of the vectors to which a device of class t can be added.
    """

    strides: tuple[int, ...]
    size: int
    growing: tuple[int, ...]
    totals: npt.NDArray[np.int16]
    everything: int


def vectors_of(space: PartitionSpace) -> DeviceVectors:
    strides, size = [], 1
    for count in space.counts:
        strides.append(size)
        size *= count + 1
    grids = np.ix_(*[np.arange(count + 1, dtype=np.int16) for count in reversed(space.counts)])
    totals = sum(grids, np.zeros((), dtype=np.int16)).reshape(-1)
    below_max = totals < space.max_devices
    growing = []
    for t, count in enumerate(space.counts):
        digit = np.broadcast_to(grids[len(space.counts) - 1 - t], [c + 1 for c in reversed(space.counts)]).reshape(-1)
        growing.append(_to_bits(below_max & (digit < count)))
    return DeviceVectors(tuple(strides), size, tuple(growing), totals, (1 << size) - 1)


def _to_bits(flags: Bools) -> int:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def flags_of(bits: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a set; bit i of the set is bit i % 8 of byte i // 8."""
    return np.frombuffer(bits.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)


@dataclass(frozen=True)
class AllowedCuts:
    """What a bottleneck allows: for each class and cut the cuts at which a stage that ends there may begin."""

    starts: list[list[list[int]]]
    senders: list[list[list[int]]]
    enter: list[bool]
    leave: list[bool]


def allowed(space: PartitionSpace, bottleneck: float) -> AllowedCuts:
    """Stages and transfers within the bottleneck."""
    starts = []
    for t in range(space.classes):
        ends, begins = np.nonzero((space.fits[t] & (space.seconds[t] <= bottleneck)).T)
        at = np.searchsorted(ends, np.arange(space.layers + 2)).tolist()
        listed = begins.tolist()
        starts.append([listed[at[b] : at[b + 1]] for b in range(space.layers + 1)])
    passes = space.cut <= bottleneck
    senders = [[np.flatnonzero(passes[j, :, v]).tolist() for v in range(space.classes)] for j in range(space.layers)]
    return AllowedCuts(starts, senders, (space.enter <= bottleneck).tolist(), (space.leave <= bottleneck).tolist())


def reached(space: PartitionSpace, vectors: DeviceVectors, may: AllowedCuts) -> int:
    """The vectors of devices with which all layers can be placed."""
    classes = range(space.classes)
    ready = [[vectors.growing[t] & 1 if may.enter[t] else 0 for t in classes]]
    last: list[int] = []
    for b in range(1, space.layers + 1):
        last = []
        for t in classes:
            found = 0
            for a in may.starts[t][b]:
                found |= ready[a][t]
            last.append(found << vectors.strides[t])
        if b < space.layers:
            row = []
            for v in classes:
                found = 0
                for u in may.senders[b][v]:
                    found |= last[u]
                row.append(found & vectors.growing[v])
            ready.append(row)
    out = 0
    for t in classes:
        if may.leave[t]:
            out |= last[t]
    return out


def completable(space: PartitionSpace, vectors: DeviceVectors, may: AllowedCuts) -> list[list[int]]:
    """For each cut and class: the vectors, used up to a stage that ends there, with which the rest can be placed."""
    classes = range(space.classes)
    layers = space.layers
    out = [[0] * space.classes for _ in range(layers + 1)]
    out[layers] = [vectors.everything if may.leave[t] else 0 for t in classes]
    # finish[a][t]: vectors before a stage on class t that begins at cut a.
    finish = [[0] * space.classes for _ in range(layers + 1)]
    for b in range(layers, 0, -1):
        if b < layers:
            row = out[b]
            for v in classes:
                for u in may.senders[b][v]:
                    row[u] |= finish[b][v]
        for t in classes:
            before = (out[b][t] >> vectors.strides[t]) & vectors.growing[t]
            if before:
                for a in may.starts[t][b]:
                    finish[a][t] |= before
    out[0] = [finish[0][t] if may.enter[t] else 0 for t in classes]
    return out


def candidates(space: PartitionSpace) -> Floats:
    """All possible bottlenecks, ascending."""
    inner = space.cut[1 : space.layers].reshape(-1)
    values = np.concatenate([space.seconds[space.fits], inner, space.enter, space.leave])
    return np.unique(values[np.isfinite(values)])


def least_bottleneck(space: PartitionSpace, vectors: DeviceVectors) -> float | None:
    """The minimum bottleneck of any schedule; None if there is no schedule."""
    values = candidates(space)
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if reached(space, vectors, allowed(space, values[middle])):
            high = middle
        else:
            low = middle + 1
    return float(values[high]) if high < len(values) else None


def fewest_devices(space: PartitionSpace, vectors: DeviceVectors, may: AllowedCuts) -> int | None:
    """The fewest devices that can hold all layers under what is allowed."""
    found = reached(space, vectors, may)
    if not found:
        return None
    flags = np.unpackbits(flags_of(found, vectors.size), count=vectors.size, bitorder="little").view(np.bool_)
    return int(vectors.totals[flags].min())
