"""Which nodes have room, for baselines: nodes by free GPUs, the tightest first, so that nothing is scanned.

A job that fits a node goes to the one that it leaves the least on; a larger one takes whole nodes and the tightest for
the rest. Rooms may be kept for somebody who waits for others to leave. Decides nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class FreeGpuIndex:
    """Free GPUs of nodes that are there and take something new."""

    def __init__(self, node_gpus: int) -> None:
        self.node_gpus = node_gpus
        self.free: dict[str, int] = {}  # by node that takes something new
        self.total: dict[str, int] = {}  # by node: what it had when it came
        self._order: dict[str, int] = {}
        self._by_free: list[list[tuple[int, str]]] = [[] for _ in range(node_gpus + 1)]  # heaps; some entries are old

    def add(self, node: str, free: int) -> None:
        """A node takes something new."""
        self._order.setdefault(node, len(self._order))
        self.free[node] = self.total[node] = free
        self._note(node)

    def drop(self, node: str) -> None:
        """A node takes nothing new, or is gone."""
        self.free.pop(node, None)

    def take(self, node: str, gpus: int) -> None:
        """GPUs are taken."""
        self.free[node] -= gpus
        self._note(node)

    def give(self, node: str, gpus: int) -> None:
        """GPUs are free again, if the node is still there."""
        if node in self.free:
            self.free[node] += gpus
            self._note(node)

    def spot(self, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
        """Nodes for all members of a job, or None."""
        if len(sizes) == 1:
            node = self._tightest(sizes[0])
            return None if node is None else (node,)
        taken: list[str] = []
        for size in sizes:
            node = self._tightest(size)
            if node is None:
                break
            taken.append(node)
            self.take(node, size)
        for node, size in zip(taken, sizes, strict=False):
            self.give(node, size)
        return tuple(taken) if len(taken) == len(sizes) else None

    def _tightest(self, gpus: int) -> str | None:
        for free in range(gpus, self.node_gpus + 1):
            heap = self._by_free[free]
            while heap:
                node = heap[0][1]
                if self.free.get(node) == free:
                    return node
                heapq.heappop(heap)
        return None

    def _note(self, node: str) -> None:
        heapq.heappush(self._by_free[self.free[node]], (self._order[node], node))

    def rooms(self) -> Iterable[tuple[str, int]]:
        """Every node and what is free of it."""
        return self.free.items()
