"""Lays groups evenly on nodes: the same number of GPUs on each node of a group.

Frameworks state a pool as `nodes x GPUs per node`, so 12 GPUs of two nodes of 8 are 2 x 6; 8 + 4 cannot be expressed. A
model-parallel block that fits on a node is never split: its costs were not measured across nodes. `spread` is exact:
where it finds no layout there is none. It prefers few nodes per group, and the fullest nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

EvenSplit = tuple[int, int]
"""A number of nodes, and the GPUs on each of them."""

NodeSpread = tuple[tuple[int, int], ...]
"""Where a group lies: (node, GPUs there), ascending in nodes."""


def even_splits(size: int, nodes: Sequence[int], blocks: Collection[int] = ()) -> tuple[EvenSplit, ...]:
    """The ways to place so many GPUs with the same number on each node, fewest nodes first.

    `blocks` are GPUs that belong together: whole blocks on each node, or parts of a block that is larger than any node.
    """
    most = max(nodes, default=0)

    def whole(gpus: int) -> bool:
        return all(gpus % block == 0 if block <= most else block % gpus == 0 for block in blocks)

    return tuple(
        (count, size // count)
        for count in range(1, min(size, len(nodes)) + 1)
        if size % count == 0 and whole(size // count) and sum(gpus >= size // count for gpus in nodes) >= count
    )


def spread(splits: Sequence[Sequence[EvenSplit]], nodes: Sequence[int]) -> tuple[NodeSpread, ...] | None:
    """Nodes for each group in one of its splits, the first preferred; None where they do not all fit."""
    hopeless: set[tuple[int, tuple[int, ...]]] = set()

    def place(group: int, free: tuple[int, ...]) -> tuple[NodeSpread, ...] | None:
        if group == len(splits):
            return ()
        state = (group, tuple(sorted(free)))
        if state in hopeless:
            return None
        for count, gpus in splits[group]:
            for chosen in _choices(count, gpus, free):
                left = tuple(have - gpus if node in chosen else have for node, have in enumerate(free))
                others = place(group + 1, left)
                if others is not None:
                    return (tuple((node, gpus) for node in sorted(chosen)), *others)
        hopeless.add(state)
        return None

    return place(0, tuple(nodes))


def positions_of(groups: Sequence[NodeSpread], nodes: Sequence[int]) -> list[Sequence[int]]:
    """The GPU positions of groups, numbered across the nodes."""
    following = [sum(nodes[:node]) for node in range(len(nodes))]
    positions: list[Sequence[int]] = []
    for node_layout in groups:
        mine: list[int] = []
        for node, gpus in node_layout:
            mine += range(following[node], following[node] + gpus)
            following[node] += gpus
        positions.append(mine)
    return positions


def _choices(count: int, gpus: int, free: tuple[int, ...]) -> Iterator[frozenset[int]]:
    """Ways to choose nodes with enough free GPUs, fullest first; nodes with equal free GPUs are interchangeable."""
    levels = sorted((left, many) for left, many in Counter(free).items() if left >= gpus)

    def take(level: int, still: int) -> Iterator[tuple[int, ...]]:
        if level == len(levels):
            if not still:
                yield ()
            return
        for some in range(min(still, levels[level][1]), -1, -1):
            for others in take(level + 1, still - some):
                yield (some, *others)

    for counts in take(0, count):
        chosen: list[int] = []
        for (left, _), some in zip(levels, counts, strict=True):
            chosen += [node for node, have in enumerate(free) if have == left][:some]
        yield frozenset(chosen)
