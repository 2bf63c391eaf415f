"""Reads a controller's journal: feeds its events to the pool machine again and records every task's story.

A journal holds events, and beside each the instructions that the machine gave. The same events must give the same
instructions; every difference is kept, with both. Requests, starts, stops and ends of tasks come from the events and
the instructions that led to them. Nothing is guessed: what is unknown stays None. Times are seconds since the start of
the journal; of the time before a snapshot only the tasks that existed are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.machines.pool import events as e
from trimtab.machines.pool.explain import instruction_text
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.records import PoolTask, StopOutcome
from trimtab.model.pool import ENDED, HOLDS_SLOTS, TaskSpec, TaskState

InstructionLines = tuple[str, ...]
SettingEvent = (
    e.PoolEnsured
    | e.QuotaSet
    | e.PoolDrained
    | e.PoolDropped
    | e.PolicySet
    | e.NodeJoined
    | e.NodeCordoned
    | e.NodeDrained
    | e.NodeLost
)
OTHER_EVENTS = (
    e.CompleteRequested,
    e.CancelRequested,
    e.EvictRequested,
    e.TurnRequested,
    e.TaskDied,
    e.TaskStartFailed,
    e.PlacementGroupFailed,
    e.PlacementGroupLost,
    e.StateRecovered,
)


EndingEvent = e.TaskEnded | e.CompleteRequested | e.CancelRequested


@dataclass
class RecordedAttempt:
    """A start of a task."""

    assigned_s: float  # the StartTask instruction
    started_s: float | None = None  # start of its work
    restored: bool = False  # from a saved state
    work_ended_s: float | None = None  # end of its work: done, told to stop, or lost
    evicted: bool = False  # evicted
    lost: bool = False
    stopped_s: float | None = None  # all its processes had exited
    saved: bool = False

    @property
    def worked_s(self) -> float:
        """Length of its work, as far as known."""
        return (
            0.0 if self.started_s is None or self.work_ended_s is None else max(0.0, self.work_ended_s - self.started_s)
        )


@dataclass
class TaskStory:
    """A task from its submission to its end or to the end of the journal."""

    name: str  # its id; resubmissions under the same id get a number
    spec: TaskSpec
    pool: str  # its name; a pool that was dropped and created again gets a number
    submitted_s: float
    queued_s: float  # start of the current wait
    before: bool = False  # it existed at the start of the journal
    waited_s: float = 0.0
    attempts: list[RecordedAttempt] = field(default_factory=list)
    ended_s: float | None = None  # all its processes had exited, or it was given up while it waited
    end: str = ""  # done, failed or cancelled; empty: unknown
    ending: EndingEvent | None = None  # the event that ended its work
    evictions: int = 0
    losses: int = 0

    @property
    def open(self) -> RecordedAttempt | None:
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.stopped_s is None else None


class ReplayDifference(Frozen):
    """An event for which the machine now gives other instructions."""

    number: int  # of the event, from 1
    at_s: float
    event: str
    then: InstructionLines
    now: InstructionLines


class GivenInstruction(Frozen):
    """An instruction and its time."""

    at_s: float
    instruction: e.PoolInstruction
    task: str = ""  # name of its task, if it has one


@dataclass
class JournalRecord:
    """The contents of a journal."""

    began: float  # by the controller's clock
    end_s: float = 0.0
    from_snapshot: bool = False
    events: int = 0
    marked: int = 0  # events with recorded instructions
    differences: list[ReplayDifference] = field(default_factory=list)
    unrequested: list[str] = field(default_factory=list)  # outcomes of instructions that the machine did not give
    given: list[GivenInstruction] = field(default_factory=list)
    tasks: list[TaskStory] = field(default_factory=list)
    settings: list[tuple[float, SettingEvent]] = field(default_factory=list)
    other_events: Counter[str] = field(default_factory=Counter)  # user requests and faults, by kind
    # by group: how long creation and removal took
    groups_s: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether the replayed machine gave the recorded instructions, as far as they are recorded."""
        return not self.differences and not self.unrequested


def read_record(
    snapshot: dict[str, Any] | None,
    events: Sequence[tuple[float, Any]],
    recorded: Sequence[InstructionLines | None],
    began: float,
) -> JournalRecord:
    """Feeds a journal to the machine. `began`: time of the snapshot; without one the first event counts."""
    reader = _JournalReader(snapshot, began if snapshot is not None or not events else events[0][0])
    for number, (now, event) in enumerate(events, 1):
        reader.process(number, now, event, recorded[number - 1] if number <= len(recorded) else None)
    return reader.finish()


class _JournalReader:
    def __init__(self, snapshot: dict[str, Any] | None, began: float) -> None:
        self._machine = PoolMachine() if snapshot is None else _loaded(snapshot)
        self._record = JournalRecord(began, from_snapshot=snapshot is not None)
        self._now_s = 0.0
        self._stories: dict[str, TaskStory] = {}  # by id: the last of that id
        self._submissions: Counter[str] = Counter()
        self._pools: Counter[str] = Counter()  # by name: how often it was created
        self._event: Any = None  # the current event
        self._creating: dict[str, float] = {}
        self._removing: dict[str, float] = {}
        self._given: set[tuple[str, str, int]] = set()  # all instructions given
        if snapshot is not None:
            self._read_snapshot()

    def _read_snapshot(self) -> None:
        """Records what existed at the snapshot."""
        machine, settings = self._machine, self._record.settings
        settings += [(0.0, node) for node in machine.nodes.values()]
        settings += [(0.0, e.NodeCordoned(node)) for node in sorted(machine.cordoned)]
        self._pools.update(list(machine.pools))
        settings += [(0.0, e.PoolEnsured(pool.spec)) for pool in machine.pools.values()]
        settings += [(0.0, e.PoolDrained(name)) for name, pool in machine.pools.items() if pool.drained]
        if machine.policy is not None:
            settings.append((0.0, e.PolicySet(machine.policy)))
        live = [task for task in machine.tasks.values() if task.state not in ENDED]
        places = {name: at for at, name in enumerate(machine.queue())}
        # A task that was about to end has no work left.
        live = [task for task in live if task.outcome in (None, StopOutcome.evicted, StopOutcome.retry)]
        for task in sorted(live, key=lambda task: (places.get(task.id, -1), task.started_at or 0.0, task.seq)):
            self._record_existing(task)
        for instruction in machine.outstanding():
            self._given.add(_instruction_key(instruction))

    def _record_existing(self, task: PoolTask) -> None:
        story = self._submitted(task.spec)
        story.before = True
        if task.state in HOLDS_SLOTS and task.started:
            started_s = 0.0 if task.started_at is not None and task.state is not TaskState.starting else None
            attempt = RecordedAttempt(0.0, started_s)
            story.attempts.append(attempt)
            if task.state is TaskState.cancelling:
                attempt.work_ended_s = 0.0
                attempt.evicted, attempt.lost = task.outcome is StopOutcome.evicted, task.outcome is StopOutcome.retry

    def process(self, number: int, now: float, event: Any, recorded: InstructionLines | None) -> None:
        record = self._record
        self._now_s, self._event = now - record.began, event
        # The only check if a journal has no recorded instructions.
        if recorded is None and (key := _outcome_key(event)) is not None and key not in self._given:
            record.unrequested.append(f"{type(event).__name__} of {key[1]}")
        known = set(self._machine.pools)
        try:
            out = self._machine.handle(event, now)
        except (InputError, ArithmeticError, LookupError, ValueError, TypeError, AssertionError) as fault:
            why = fault.what if isinstance(fault, InputError) else f"{type(fault).__name__}: {fault}"
            raise InputError(
                f"the machine refuses event {number} ({type(event).__name__}): {why}",
                hint="the journal was changed, or another version of trimtab wrote it",
            ) from None
        record.events += 1
        record.end_s = max(record.end_s, self._now_s)
        if recorded is not None:
            record.marked += 1
            given = tuple(map(instruction_text, out))
            if given != recorded:
                record.differences.append(ReplayDifference(number, self._now_s, type(event).__name__, recorded, given))
        self._record_settings(event, known)
        self._record_event(event)
        for instruction in out:
            self._instructed(instruction)

    def finish(self) -> JournalRecord:
        for story in self._stories.values():
            self._close(story)
        self._record.tasks.sort(key=lambda story: story.submitted_s)  # stable
        return self._record

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _instructed(self, instruction: e.PoolInstruction) -> None:
        story = self._stories.get(getattr(instruction, "task", ""))
        self._record.given.append(GivenInstruction(self._now_s, instruction, story.name if story is not None else ""))
        self._given.add(_instruction_key(instruction))
        if isinstance(instruction, e.CreatePlacementGroup):
            self._creating[instruction.group] = self._now_s
        elif isinstance(instruction, e.RemovePlacementGroup):
            self._removing.setdefault(instruction.group, self._now_s)
        elif isinstance(instruction, e.StartTask) and story is not None:
            story.waited_s += self._now_s - story.queued_s
            story.attempts.append(RecordedAttempt(self._now_s, restored=instruction.restore))
        elif isinstance(instruction, e.StopTask) and story is not None:
            self._stopping(instruction, story)

    def _stopping(self, instruction: e.StopTask, story: TaskStory) -> None:
        attempt = story.open
        if attempt is None or attempt.work_ended_s is not None:
            return
        attempt.work_ended_s = self._now_s
        task = self._machine.tasks.get(instruction.task)
        after = None if task is None else task.outcome
        attempt.evicted, attempt.lost = after is StopOutcome.evicted, after is StopOutcome.retry
        story.evictions += attempt.evicted
        story.losses += attempt.lost
        if isinstance(self._event, EndingEvent):
            story.ending = self._event
        elif isinstance(self._event, e.PoolDropped):
            story.ending = e.CancelRequested(instruction.task, keep_slot=False)

    # ---- events ----------------------------------------------------------------------------------------------------

    def _record_settings(self, event: Any, known: set[str]) -> None:
        """Records changes of pools, rules and nodes."""
        if isinstance(event, e.PoolEnsured):
            if event.spec.name in known:
                return
            self._pools[event.spec.name] += 1
            event = e.PoolEnsured(replace(event.spec, name=self._pool(event.spec.name)))
        elif isinstance(event, (e.QuotaSet, e.PoolDrained, e.PoolDropped)):
            event = replace(event, pool=self._pool(event.pool))
        if isinstance(event, SettingEvent):
            self._record.settings.append((self._now_s, event))

    def _pool(self, name: str) -> str:
        return name if self._pools[name] <= 1 else f"{name} ({self._pools[name]})"

    def _record_event(self, event: Any) -> None:
        """Records what an event says about tasks and groups."""
        if isinstance(event, e.TaskSubmitted):
            self._submitted(event.spec)
        elif isinstance(event, e.TaskStarted):
            started = self._stories.get(event.task)
            if started is not None and started.open is not None and started.open.started_s is None:
                started.open.started_s = self._now_s
        elif isinstance(event, (e.TaskStopped, e.TaskStartFailed)):
            self._stopped(event)
        elif isinstance(event, e.PlacementGroupReady):
            self._group(event.group, 0, self._creating.pop(event.group, None))
        elif isinstance(event, e.PlacementGroupRemoved):
            self._group(event.group, 1, self._removing.pop(event.group, None))
        elif isinstance(event, e.StateRecovered):
            self._recovered(event)
        if isinstance(event, OTHER_EVENTS):
            self._record.other_events[type(event).__name__] += 1

    def _submitted(self, spec: TaskSpec) -> TaskStory:
        before = self._stories.get(spec.id)
        if before is not None:
            self._close(before)
        self._submissions[spec.id] += 1
        count = self._submissions[spec.id]
        name = spec.id if count == 1 else f"{spec.id} ({count})"
        story = TaskStory(name, spec, self._pool(spec.pool), self._now_s, self._now_s)
        self._stories[spec.id] = story
        self._record.tasks.append(story)
        return story

    def _stopped(self, event: e.TaskStopped | e.TaskStartFailed) -> None:
        story = self._stories.get(event.task)
        attempt = None if story is None else story.open
        if story is None or attempt is None:
            return
        attempt.stopped_s = self._now_s
        attempt.work_ended_s = self._now_s if attempt.work_ended_s is None else attempt.work_ended_s
        attempt.saved = isinstance(event, e.TaskStopped) and event.saved
        task = self._machine.tasks.get(event.task)
        if task is None or task.state in ENDED:
            story.ended_s, story.end = self._now_s, "done" if task is None else task.state.value
        else:
            story.queued_s = self._now_s

    def _close(self, story: TaskStory) -> None:
        """Records the end of a task that was given up while it waited."""
        task = self._machine.tasks.get(story.spec.id)
        if story.end or task is None or story is not self._stories[story.spec.id]:
            return
        if task.state in ENDED:
            story.ended_s, story.end = max(0.0, task.since - self._record.began), task.state.value

    def _group(self, group: str, which: int, since_s: float | None) -> None:
        if since_s is not None:
            self._record.groups_s.setdefault(group, [None, None])[which] = self._now_s - since_s

    def _recovered(self, event: e.StateRecovered) -> None:
        self._pools.update(spec.name for spec in event.pools)
        self._record.settings += [(self._now_s, e.PoolEnsured(spec)) for spec in event.pools]
        for found in event.tasks:
            task = self._machine.tasks.get(found.spec.id)
            if task is not None and task.attempt == found.attempt:
                self._submitted(found.spec).attempts.append(RecordedAttempt(self._now_s, self._now_s))


def _loaded(snapshot: dict[str, Any]) -> PoolMachine:
    try:
        machine = PoolMachine.load(snapshot)
        machine.check()
        return machine
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, InputError) as fault:
        raise InputError(
            f"the snapshot cannot be read: {type(fault).__name__}: {str(fault).partition(chr(10))[0]}",
            hint="it was written by another machine, or another version of trimtab",
        ) from None


def verb(instruction: e.PoolInstruction) -> str:
    """`start`, `stop`, `park` or `unpark`."""
    return type(instruction).__name__.removesuffix("Task").lower()


def _instruction_key(instruction: e.PoolInstruction) -> tuple[str, str, int]:
    if isinstance(instruction, (e.CreatePlacementGroup, e.RemovePlacementGroup)):
        return ("make" if isinstance(instruction, e.CreatePlacementGroup) else "remove", instruction.group, 0)
    return (verb(instruction), instruction.task, instruction.attempt)


def _outcome_key(event: Any) -> tuple[str, str, int] | None:
    if isinstance(event, (e.PlacementGroupReady, e.PlacementGroupFailed)):
        return ("make", event.group, 0)
    if isinstance(event, e.PlacementGroupRemoved):
        return ("remove", event.group, 0)
    if isinstance(event, (e.TaskStarted, e.TaskStartFailed)):
        return ("start", event.task, event.attempt)
    if isinstance(event, e.TaskStopped):
        return ("stop", event.task, event.attempt)
    return None
