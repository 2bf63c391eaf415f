"""GPU ranks as text: `0`, `0-3`, `0-1,4-5`."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int], comma: str = ",") -> str:
    """Ranks in short form, consecutive ranks as ranges."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return comma.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
