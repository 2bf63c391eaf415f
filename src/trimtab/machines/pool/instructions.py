"""Instructions as text, for the journal, where they follow the event that caused them.

A line says what is done to which task and where, without deadlines: those follow from the time and the settings. Equal
lines mean equal instructions.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.machines.pool import events as e


def lines(instructions: Sequence[e.PoolInstruction]) -> list[str]:
    return [line(instruction) for instruction in instructions]


def line(instruction: e.PoolInstruction) -> str:
    if isinstance(instruction, e.CreatePlacementGroup):
        bundles = " + ".join(
            f"{bundle} on {node}" for bundle, node in zip(instruction.bundles, instruction.nodes, strict=True)
        )
        return f"make {instruction.group} of {instruction.pool}: {bundles}"
    if isinstance(instruction, e.RemovePlacementGroup):
        return f"remove {instruction.group}"
    if isinstance(instruction, e.StartTask):
        places = " ".join(f"{place.group}/{place.bundle}" for place in instruction.places)
        return f"start {instruction.task} #{instruction.attempt} in {places}" + (
            " from its saved state" if instruction.restore else ""
        )
    if isinstance(instruction, e.StopTask):
        ways = (
            f"tell {instruction.cancel_grace_s:g} s" if instruction.cancel_grace_s else "",
            f"save {instruction.checkpoint_timeout_s:g} s" if instruction.checkpoint_timeout_s else "",
        )
        details = ", ".join(word for word in (*ways, "with notice" if instruction.notice else "") if word)
        return f"stop {instruction.task} #{instruction.attempt} for {instruction.reason.code.value}" + (
            f": {details}" if details else ""
        )
    return f"{'park' if isinstance(instruction, e.ParkTask) else 'unpark'} {instruction.task} #{instruction.attempt}"
