"""A replayed journal as text, data or a page: whether the machine gives the same instructions, and how policies
compare.

Shares its tables and page with simulations. Without other policies it shows only the recording, nothing simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from time import perf_counter
from typing import Any

from rich.markup import escape
from rich.progress import Progress

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.render.html.simulation import PoolComparison, pool_page, pool_table
from trimtab.render.live import PROGRESS
from trimtab.render.output import err, out, show
from trimtab.replay.common.comparison import NamedPolicy
from trimtab.replay.journal import replay
from trimtab.replay.journal.record import JournalRecord
from trimtab.replay.journal.replay import fitted
from trimtab.replay.journal.world import JournalWorld, world_of
from trimtab.replay.pool.scenario import PoolFigures, compare_pools

SHOWN = 5  # differences that are listed


class _RecordedPolicy(Frozen):
    """The row of the recording, among policies."""

    name: str = replay.RECORDED

    def text(self) -> str:
        return "as recorded in the journal; not replayed"


class ReplaySummary(Frozen):
    """The result of a replay."""

    name: str
    record: JournalRecord
    world: JournalWorld | None  # None: no task ever ran
    runs: tuple[PoolFigures, ...] = ()
    near: replay.ReplayAgreement | None = None
    others: tuple[replay.AlternativePolicy, ...] = ()
    why_none: str = ""
    not_again: str = ""  # why the recorded policy could not be replayed
    seeds: tuple[int, ...] = field(default=(replay.SEED,))

    @property
    def policies(self) -> Sequence[NamedPolicy]:
        return [_RecordedPolicy(), *self.others]

    def assumptions(self) -> list[str]:
        if self.world is None or not self.others:
            return list(self.world.facts) if self.world is not None else []
        first, *more = self.world.facts
        drawn = [f"where the recording has no value, {sentence}" for sentence in self.world.times.text()]
        return [first, *self.world.assumed[:1], *more, *self.world.assumed[1:], self.near_text(), *drawn]

    def near_text(self) -> str:
        """How closely a replay of the recorded policy matches the recording."""
        near = self.near
        if near is None:
            return f"how closely the replay matches the recording is unknown: {self.not_again}"
        agreement_text = (
            f"all {near.instructions:,} instructions are the same in the same order"
            if near.same == near.instructions and not near.first
            else f"the first {near.same:,} of {near.instructions:,} instructions are the same ({near.first})"
        )
        return (
            f"the recorded policy, replayed: {agreement_text}; completion times are off by {near.completion_mean:.1%} "
            f"on average and {near.completion_worst:.1%} at most, the last end by {near.makespan:.1%}"
        )

    # ---- how it is written ----

    def data(self) -> dict[str, Any]:
        record, near = self.record, self.near
        found: dict[str, Any] = {
            "journal": self.name,
            "events": record.events,
            "instructions": len(record.given),
            "seconds": record.end_s,
            "same": record.same,
            "marked": record.marked,
            "differences": [
                {
                    "event": difference.number,
                    "at_s": difference.at_s,
                    "kind": difference.event,
                    "then": list(difference.then),
                    "now": list(difference.now),
                }
                for difference in record.differences
            ],
            "unasked": record.unrequested,
            "from_snapshot": record.from_snapshot,
        }
        if self.world is not None:
            found |= self._compared().data()
            found["counted"] = {"resource": self.world.units.resource, "unit": self.world.units.each}
        if near is not None:
            found["agreement"] = {
                "instructions": near.instructions,
                "same": near.same,
                "first_difference": near.first or None,
                "makespan": near.makespan,
                "completion_mean": near.completion_mean,
                "completion_worst": near.completion_worst,
            }
        return found

    def csv(self) -> str:
        return self._compared().csv()

    def page(self, command: str) -> str:
        return pool_page(self._compared(), command, "the end of the last task in the journal")

    def show(self) -> None:
        record = self.record
        out.print(f"[bold]{escape(self.name)}[/]")
        for sentence in self.assumptions():
            out.print(f"  {escape(sentence)}", style="dim")
        out.print()
        out.print(escape(same_text(record)))
        if self.world is None:
            out.print(escape(self.why_none))
            return
        out.print("\nWaits and completions by class")
        show(pool_table(self._compared()))

    def _compared(self) -> PoolComparison:
        if not self.runs:
            raise InputError(self.why_none, where=self.name)
        return compare_pools(self, self.runs)


def replayed(name: str, record: JournalRecord, others: Sequence[replay.AlternativePolicy]) -> ReplaySummary:
    """Replay a journal with other policies; without any, summarise the recording."""
    try:
        world = world_of(record)
    except InputError as fault:
        if others:
            raise
        return ReplaySummary(name, record, None, why_none=fault.what)
    was = replay.recorded(world)
    if not others:
        return ReplaySummary(name, record, world, (was.figures,))
    ready = [fitted(policy, world) for policy in others]
    near, not_again, runs = None, "", [was.figures]
    try:
        again = _timed(world, replay.UNCHANGED)
    except InfeasibleError as fault:  # what the replay leaves out may have freed the resources
        not_again = fault.what
    else:
        near = replay.agreement(world, was, again)
        runs.append(again.figures)
        ready = [replay.UNCHANGED, *ready]
    runs += [_timed(world, policy).figures for policy in ready if policy is not replay.UNCHANGED]
    return ReplaySummary(name, record, world, tuple(runs), near, tuple(ready), not_again=not_again)


def _timed(world: JournalWorld, other: replay.AlternativePolicy) -> replay.JournalRun:
    began = perf_counter()
    with Progress(*PROGRESS, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(other.name, total=1.0)
        run = replay.run_alternative(world, other, lambda share: bar.update(task, completed=share))
    return replace(run, figures=replace(run.figures, seconds=perf_counter() - began))


def same_text(record: JournalRecord) -> str:
    """Whether the machine gives the recorded instructions again."""
    many = f"{record.events:,} events, {len(record.given):,} instructions"
    if record.differences:
        return f"{many}: the machine gives different instructions for {len(record.differences):,} of them now"
    if record.unrequested:
        return f"{many}: {len(record.unrequested):,} results belong to instructions that the machine does not give now"
    if not record.events:
        return "nothing happened after the snapshot" if record.from_snapshot else "the journal is empty"
    if record.marked == record.events:
        return f"{many}: replayed, the same events give the same instructions"
    return (
        f"{many}: replayed, every result belongs to an instruction that the machine gives again (the instructions "
        f"are recorded beside {record.marked:,} of the events)"
    )


def not_the_same(record: JournalRecord, where: str) -> InputError:
    """The error for a journal that gives other instructions now."""
    if record.differences:
        first = record.differences[0]
        then, now = ("; ".join(instructions) or "nothing" for instructions in (first.then, first.now))
        what = f"event {first.number} ({first.event}, after {first.at_s:.3f} s): then {then}; now {now}"
    else:
        what = "results of instructions that were not given: " + ", ".join(record.unrequested[:SHOWN])
    return InputError(what, where=where, hint="the journal was changed, or another version of trimtab wrote it")
