"""GPU ranks as text: `0`, `0-3`, `0-1,4-5`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*")


def ranks_text(ranks: Iterable[int], comma: str = ",") -> str:
    """Ranks in short form, consecutive ranks as ranges."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return comma.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def rank_range(text: str) -> range | None:
    """The ranks of `3` or `0-3`; None for anything else."""
    found = _RANGE.fullmatch(text)
    return (range(int(found[1]), int(found[2] or found[1]) + 1) or None) if found else None
