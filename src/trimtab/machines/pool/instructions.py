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
        places = zip(instruction.bundles, instruction.nodes, strict=True)
        bundles = " + ".join(f"{bundle} on {node}" for bundle, node in places)
        return f"make {instruction.group} of {instruction.pool}: {bundles}"
    if isinstance(instruction, e.RemovePlacementGroup):
        return f"remove {instruction.group}"
    task = f"{instruction.task} #{instruction.attempt}"
    if isinstance(instruction, e.StartTask):
        slots = " ".join(f"{place.group}/{place.bundle}" for place in instruction.places)
        return f"start {task} in {slots}{' from its saved state' if instruction.restore else ''}"
    if isinstance(instruction, e.StopTask):
        cancel_s, save_s = instruction.cancel_grace_s, instruction.checkpoint_timeout_s
        details = [f"tell {cancel_s:g} s"] * (cancel_s != 0) + [f"save {save_s:g} s"] * (save_s != 0)
        details += ["with notice"] * instruction.notice
        return f"stop {task} for {instruction.reason.code.value}{': ' if details else ''}{', '.join(details)}"
    return f"{'park' if isinstance(instruction, e.ParkTask) else 'unpark'} {task}"
