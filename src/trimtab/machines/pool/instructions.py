"""Instructions in a line each: for the journal, where they stand beside the event that led to them.

A line says what is done to whom and where, and not by when: deadlines follow from the time and the settings. The same
line means the same deed.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.machines.pool import events as e


def lines(instructions: Sequence[e.PoolInstruction]) -> list[str]:
    """All of them, in their order."""
    return [line(one) for one in instructions]


def line(one: e.PoolInstruction) -> str:
    """One of them."""
    if isinstance(one, e.CreatePlacementGroup):
        bundles = " + ".join(f"{bundle} on {node}" for bundle, node in zip(one.bundles, one.nodes, strict=True))
        return f"make {one.group} of {one.pool}: {bundles}"
    if isinstance(one, e.RemovePlacementGroup):
        return f"remove {one.group}"
    if isinstance(one, e.StartTask):
        places = " ".join(f"{place.group}/{place.bundle}" for place in one.places)
        return f"start {one.task} #{one.attempt} in {places}" + (" from its saved state" if one.restore else "")
    if isinstance(one, e.StopTask):
        ways = (
            f"tell {one.cancel_grace_s:g} s" if one.cancel_grace_s else "",
            f"save {one.checkpoint_timeout_s:g} s" if one.checkpoint_timeout_s else "",
        )
        said = ", ".join(word for word in (*ways, "with notice" if one.notice else "") if word)
        return f"stop {one.task} #{one.attempt} for {one.reason.code.value}" + (f": {said}" if said else "")
    return f"{'park' if isinstance(one, e.ParkTask) else 'unpark'} {one.task} #{one.attempt}"
