"""What a controller's journal tells: its events are fed to the machine again, and the story of every task is put down.

A journal holds what happened, and beside each event what the machine had done about it. The same events must give the
same instructions; every one that does not is kept, with both. What a task was asked, when it began, stopped and ended
comes from the events and from the instructions that led to them. Nothing is guessed here: what is not known stays None.
Times are seconds since the journal begins; one that begins with a snapshot knows of earlier times only who was there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.machines.pool import events as e
from trimtab.machines.pool import instructions as orders
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
SETTINGS = (
    e.PoolEnsured,
    e.QuotaSet,
    e.PoolDrained,
    e.PoolDropped,
    e.PolicySet,
    e.NodeJoined,
    e.NodeCordoned,
    e.NodeDrained,
    e.NodeLost,
)
BESIDES = (
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
    """One start of a task."""

    asked_s: float  # it had its place
    started_s: float | None = None  # its work began
    restored: bool = False  # from a saved state
    over_s: float | None = None  # its work was over: it ended, was told to leave, or was lost
    leaves: bool = False  # evicted
    lost: bool = False
    stopped_s: float | None = None  # nothing was left of it
    saved: bool = False

    @property
    def worked_s(self) -> float:
        """How long it was at work, as far as is known."""
        return 0.0 if self.started_s is None or self.over_s is None else max(0.0, self.over_s - self.started_s)


@dataclass
class TaskStory:
    """A task, from its submission to its end or to the end of the journal."""

    name: str  # as it was submitted; one that comes again under the same id has a number behind it
    spec: TaskSpec
    pool: str  # one that is dropped and asked for again has a number behind its name
    submitted_s: float
    queued_s: float  # since when it waits, while it does
    before: bool = False  # it was there when the journal begins
    waited_s: float = 0.0
    attempts: list[RecordedAttempt] = field(default_factory=list)
    ended_s: float | None = None  # nothing was left of it, or it was given up while it waited
    end: str = ""  # done, failed or cancelled; empty: the journal does not say
    ending: EndingEvent | None = None  # what ended its work
    evictions: int = 0
    losses: int = 0

    @property
    def open(self) -> RecordedAttempt | None:
        """The start that is on now."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.stopped_s is None else None


@dataclass(frozen=True)
class ReplayDifference:
    """An event to which the machine says something else now than it did then."""

    number: int  # of the event, from 1
    at_s: float
    event: str
    then: InstructionLines
    now: InstructionLines


@dataclass(frozen=True)
class GivenInstruction:
    """An instruction, and when it was given."""

    at_s: float
    one: e.PoolInstruction
    task: str = ""  # its name, where it is about one


@dataclass
class JournalRecord:
    """A journal, read."""

    began: float  # by the controller's clock
    end_s: float = 0.0
    from_snapshot: bool = False
    events: int = 0
    marked: int = 0  # events beside which their instructions were written
    differences: list[ReplayDifference] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)  # answers to what the machine did not ask for
    given: list[GivenInstruction] = field(default_factory=list)
    tasks: list[TaskStory] = field(default_factory=list)
    settings: list[tuple[float, SettingEvent]] = field(default_factory=list)
    besides: Counter[str] = field(default_factory=Counter)  # what people asked for besides, and faults, by kind
    groups_s: dict[str, list[float | None]] = field(default_factory=dict)  # by group: how long making and removing took

    @property
    def same(self) -> bool:
        """Whether the machine says again what it said then, as far as the journal tells."""
        return not self.differences and not self.unasked


def read_record(
    snapshot: dict[str, Any] | None,
    events: Sequence[tuple[float, Any]],
    told: Sequence[InstructionLines | None],
    began: float,
) -> JournalRecord:
    """Feed a journal to the machine. `began`: when the snapshot was taken; else the first event counts."""
    reader = _JournalReader(snapshot, began if snapshot is not None or not events else events[0][0])
    for number, (now, event) in enumerate(events, 1):
        reader.hear(number, now, event, told[number - 1] if number <= len(told) else None)
    return reader.finish()


class _JournalReader:
    def __init__(self, snapshot: dict[str, Any] | None, began: float) -> None:
        self._machine = PoolMachine() if snapshot is None else _loaded(snapshot)
        self._record = JournalRecord(began, from_snapshot=snapshot is not None)
        self._now_s = 0.0
        self._stories: dict[str, TaskStory] = {}  # by id: the last of that id
        self._lives: Counter[str] = Counter()
        self._pools: Counter[str] = Counter()  # by name: how often it was made
        self._event: Any = None  # that is being heard
        self._making: dict[str, float] = {}
        self._removing: dict[str, float] = {}
        self._asked: set[tuple[str, str, int]] = set()  # all that was instructed
        if snapshot is not None:
            self._begin()

    def _begin(self) -> None:
        """Who and what was there."""
        machine, settings = self._machine, self._record.settings
        settings += [(0.0, one) for one in machine.nodes.values()]
        settings += [(0.0, e.NodeCordoned(node)) for node in sorted(machine.ledger.cordoned)]
        self._pools.update(list(machine.pools))
        settings += [(0.0, e.PoolEnsured(one.spec)) for one in machine.pools.values()]
        settings += [(0.0, e.PoolDrained(name)) for name, one in machine.pools.items() if one.drained]
        if machine.policy is not None:
            settings.append((0.0, e.PolicySet(machine.policy)))
        living = [one for one in machine.tasks.values() if one.state not in ENDED]
        places = {name: at for at, name in enumerate(machine.queue())}
        # Of one that was about to go for good there is nothing left to do.
        living = [one for one in living if one.after in (None, StopOutcome.evicted, StopOutcome.again)]
        for task in sorted(living, key=lambda one: (places.get(one.id, -1), one.started_at or 0.0, one.seq)):
            self._was_there(task)
        for instruction in machine.outstanding():
            self._asked.add(_key(instruction))

    def _was_there(self, task: PoolTask) -> None:
        story = self._submitted(task.spec)
        story.before = True
        if task.state in HOLDS_SLOTS and task.started:
            started_s = 0.0 if task.started_at is not None and task.state is not TaskState.starting else None
            attempt = RecordedAttempt(0.0, started_s)
            story.attempts.append(attempt)
            if task.state is TaskState.cancelling:
                attempt.over_s = 0.0
                attempt.leaves, attempt.lost = task.after is StopOutcome.evicted, task.after is StopOutcome.again

    def hear(self, number: int, now: float, event: Any, told: InstructionLines | None) -> None:
        """One event."""
        record = self._record
        self._now_s, self._event = now - record.began, event
        if told is None:
            self._answered(event)
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
        if told is not None:
            record.marked += 1
            said = tuple(orders.lines(out))
            if said != told:
                record.differences.append(ReplayDifference(number, self._now_s, type(event).__name__, told, said))
        self._set(event, known)
        self._happened(event)
        for one in out:
            self._instructed(one)

    def finish(self) -> JournalRecord:
        """All that is known at the end."""
        for story in self._stories.values():
            self._close(story)
        self._record.tasks.sort(key=lambda one: one.submitted_s)  # stable: in their order where there at once
        return self._record

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _instructed(self, one: e.PoolInstruction) -> None:
        story = self._stories.get(getattr(one, "task", ""))
        self._record.given.append(GivenInstruction(self._now_s, one, story.name if story is not None else ""))
        self._asked.add(_key(one))
        if isinstance(one, e.CreatePlacementGroup):
            self._making[one.group] = self._now_s
        elif isinstance(one, e.RemovePlacementGroup):
            self._removing.setdefault(one.group, self._now_s)
        elif isinstance(one, e.StartTask) and story is not None:
            story.waited_s += self._now_s - story.queued_s
            story.attempts.append(RecordedAttempt(self._now_s, restored=one.restore))
        elif isinstance(one, e.StopTask) and story is not None:
            self._told_to_stop(one, story)

    def _told_to_stop(self, one: e.StopTask, story: TaskStory) -> None:
        attempt = story.open
        if attempt is None or attempt.over_s is not None:
            return
        attempt.over_s = self._now_s
        task = self._machine.tasks.get(one.task)
        after = None if task is None else task.after
        attempt.leaves, attempt.lost = after is StopOutcome.evicted, after is StopOutcome.again
        story.evictions += attempt.leaves
        story.losses += attempt.lost
        if isinstance(self._event, (e.TaskEnded, e.CompleteRequested, e.CancelRequested)):
            story.ending = self._event
        elif isinstance(self._event, e.PoolDropped):
            story.ending = e.CancelRequested(one.task, keep_slot=False)

    # ---- events ----------------------------------------------------------------------------------------------------

    def _set(self, event: Any, known: set[str]) -> None:
        """What pools, rules and nodes are from now on."""
        if isinstance(event, e.PoolEnsured):
            if event.spec.name in known:
                return
            self._pools[event.spec.name] += 1
            event = e.PoolEnsured(replace(event.spec, name=self._pool(event.spec.name)))
        elif isinstance(event, (e.QuotaSet, e.PoolDrained, e.PoolDropped)):
            event = replace(event, pool=self._pool(event.pool))
        if isinstance(event, SETTINGS):
            self._record.settings.append((self._now_s, event))

    def _pool(self, name: str) -> str:
        return name if self._pools[name] <= 1 else f"{name} ({self._pools[name]})"

    def _happened(self, event: Any) -> None:
        """What an event says of tasks and groups, before anything is done about it."""
        if isinstance(event, e.TaskSubmitted):
            self._submitted(event.spec)
        elif isinstance(event, e.TaskStarted):
            if (attempt := self._attempt(event.task)) is not None and attempt.started_s is None:
                attempt.started_s = self._now_s
        elif isinstance(event, (e.TaskStopped, e.TaskStartFailed)):
            self._stopped(event)
        elif isinstance(event, e.PlacementGroupReady):
            self._group(event.group, 0, self._making.pop(event.group, None))
        elif isinstance(event, e.PlacementGroupRemoved):
            self._group(event.group, 1, self._removing.pop(event.group, None))
        elif isinstance(event, e.StateRecovered):
            self._found(event)
        if isinstance(event, BESIDES):
            self._record.besides[type(event).__name__] += 1

    def _submitted(self, spec: TaskSpec) -> TaskStory:
        before = self._stories.get(spec.id)
        if before is not None:
            self._close(before)
        self._lives[spec.id] += 1
        lives = self._lives[spec.id]
        name = spec.id if lives == 1 else f"{spec.id} ({lives})"
        story = TaskStory(name, spec, self._pool(spec.pool), self._now_s, self._now_s)
        self._stories[spec.id] = story
        self._record.tasks.append(story)
        return story

    def _attempt(self, task: str) -> RecordedAttempt | None:
        story = self._stories.get(task)
        return None if story is None else story.open

    def _stopped(self, event: e.TaskStopped | e.TaskStartFailed) -> None:
        story = self._stories.get(event.task)
        attempt = None if story is None else story.open
        if story is None or attempt is None:
            return
        attempt.stopped_s = self._now_s
        attempt.over_s = self._now_s if attempt.over_s is None else attempt.over_s
        attempt.saved = isinstance(event, e.TaskStopped) and event.saved
        task = self._machine.tasks.get(event.task)
        if task is None or task.state in ENDED:
            story.ended_s, story.end = self._now_s, "done" if task is None else task.state.value
        else:
            story.queued_s = self._now_s

    def _close(self, story: TaskStory) -> None:
        """The last that is known of a task: it may have been given up while it waited."""
        task = self._machine.tasks.get(story.spec.id)
        if story.end or task is None or story is not self._stories[story.spec.id]:
            return
        if task.state in ENDED:
            story.ended_s, story.end = max(0.0, task.since - self._record.began), task.state.value

    def _group(self, group: str, which: int, since_s: float | None) -> None:
        if since_s is not None:
            self._record.groups_s.setdefault(group, [None, None])[which] = self._now_s - since_s

    def _found(self, event: e.StateRecovered) -> None:
        self._pools.update(spec.name for spec in event.pools)
        self._record.settings += [(self._now_s, e.PoolEnsured(spec)) for spec in event.pools]
        for found in event.tasks:
            task = self._machine.tasks.get(found.spec.id)
            if task is not None and task.attempt == found.attempt:
                self._submitted(found.spec).attempts.append(RecordedAttempt(self._now_s, self._now_s))

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _answered(self, event: Any) -> None:
        """News of a deed that nobody asked for: the machine said something else then. All there is to go by where a
        journal does not say what was instructed."""
        key = _answer(event)
        if key is not None and key not in self._asked:
            self._record.unasked.append(f"{type(event).__name__} of {key[1]}")


VERBS: dict[type, str] = {e.StartTask: "start", e.StopTask: "stop", e.ParkTask: "park", e.UnparkTask: "unpark"}


def _loaded(snapshot: dict[str, Any]) -> PoolMachine:
    try:
        machine = PoolMachine.load(snapshot)
        machine.check()
        return machine
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, InputError) as fault:
        raise InputError(
            f"the snapshot cannot be read: {type(fault).__name__}: {str(fault).partition(chr(10))[0]}",
            hint="it is that of another machine, or of another version of trimtab",
        ) from None


def _key(one: e.PoolInstruction) -> tuple[str, str, int]:
    if isinstance(one, (e.CreatePlacementGroup, e.RemovePlacementGroup)):
        return ("make" if isinstance(one, e.CreatePlacementGroup) else "remove", one.group, 0)
    return (VERBS[type(one)], one.task, one.attempt)


def _answer(event: Any) -> tuple[str, str, int] | None:
    if isinstance(event, (e.PlacementGroupReady, e.PlacementGroupFailed)):
        return ("make", event.group, 0)
    if isinstance(event, e.PlacementGroupRemoved):
        return ("remove", event.group, 0)
    if isinstance(event, (e.TaskStarted, e.TaskStartFailed)):
        return ("start", event.task, event.attempt)
    if isinstance(event, e.TaskStopped):
        return ("stop", event.task, event.attempt)
    return None
