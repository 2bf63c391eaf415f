"""Ranks of each group: contiguous, with model-parallel blocks inside nodes where possible.

Sizes are given; this only orders the groups along the ranks and leaves idle GPUs between them where that keeps a block
from straddling two nodes. Ties go to no gaps, then to file order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class RankStrip:
    """A group to lay out: its size, and the (block, gpus) of its members; a block should be on one node."""

    size: int
    blocks: tuple[tuple[int, int], ...]


def lay_out(strips: tuple[RankStrip, ...], nodes: tuple[int, ...]) -> tuple[int, ...]:
    """First position of each strip on a line of nodes, with the fewest straddling blocks.

    The sizes together fit on the line.
    """
    edges = [0]
    for gpus in nodes:
        edges.append(edges[-1] + gpus)
    # state: (strips placed as bits, position reached) -> (straddles, gap, order, starts)
    states: dict[tuple[int, int], tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {(0, 0): (0, 0, (), ())}
    torn: dict[tuple[int, int], int] = {}
    everything = (1 << len(strips)) - 1
    sizes = sum(strip.size for strip in strips)
    for _ in strips:
        following: dict[tuple[int, int], tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {}
        for (mask, position), (cost, gap, order, starts) in sorted(states.items()):
            left = sizes - sum(strip.size for i, strip in enumerate(strips) if mask >> i & 1)
            for i, strip in enumerate(strips):
                if mask >> i & 1:
                    continue
                for start in _starts(position, strip, edges, edges[-1] - left):
                    state = (mask | 1 << i, start + strip.size)
                    if (i, start) not in torn:
                        torn[i, start] = straddles(strip, start, edges)
                    value = (
                        cost + torn[i, start],
                        gap + start - position,
                        (*order, i),
                        (*starts, start),
                    )
                    if state not in following or value < following[state]:
                        following[state] = value
        states = following
    _, _, order, starts = min(value for (mask, _), value in states.items() if mask == everything)
    first = dict(zip(order, starts, strict=True))
    return tuple(first[i] for i in range(len(strips)))


def _starts(position: int, strip: RankStrip, edges: list[int], latest: int) -> list[int]:
    """Positions worth trying: here, the next node, and the next multiple of its largest block in this node."""
    node = next((edge for edge in edges if edge >= position), position)
    here = max(edge for edge in edges if edge <= position)
    block = max((block for block, _ in strip.blocks), default=1)
    aligned = here + -(-(position - here) // block) * block
    return sorted({start for start in (position, node, aligned) if position <= start <= latest})


def straddles(strip: RankStrip, start: int, edges: list[int]) -> int:
    """Blocks of a strip at that position that lie across more nodes than necessary."""
    widest = max(b - a for a, b in pairwise(edges))
    count = 0
    for block, gpus in strip.blocks:
        if block <= widest:
            end = start + gpus // block * block
            count += sum(1 for edge in edges if start < edge < end and (edge - start) % block)
            continue
        for first in range(start, start + gpus - block + 1, block):
            crossed = sum(1 for edge in edges if first < edge < first + block)
            count += crossed > (block - 1) // widest
    return count
