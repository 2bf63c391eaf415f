"""The world of a journal, for replaying policies: its workload, durations and node events.

From the journal: every submission with its resources, the length of its work, the duration of each start, stop and
save, and node events. Derived: the work of an evicted or lost task is that of its saved attempts and its last one.
Unknown: the total work of a task that had not ended; it counts as done with what it had done (or its estimate, if
larger). A task that never started has no length: it is left out, and reported. Every task waits without limit, and
after the end of the journal all nodes are present, so that every policy can finish.

One resource is counted: GPUs if any task asks for them; in units of which every task asks for a whole number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.resources import GRAIN, Resources
from trimtab.machines.pool import events as e
from trimtab.model.pool import PreemptionPolicy, TaskSpec
from trimtab.replay.common.timing import MEASURED, Distribution, PoolTimes
from trimtab.replay.journal.record import JournalRecord, RecordedAttempt, SettingEvent, TaskStory
from trimtab.replay.pool.driver import WorkloadTask
from trimtab.replay.pool.policies import UNLIMITED_S

COUNTED = "gpu"  # name of the counted resource in a replay, whatever it was
MOST_CLASSES = 6  # with more, tasks are classed by pool alone
MeasuredDurations = dict[tuple[str, str, int], float]


class CountedUnit(Frozen):
    """The counted resource and the size of a unit."""

    resource: str
    each: float  # amount in a unit

    def counted(self, amounts: Resources) -> Resources:
        """Converts the counted resource to units."""
        units = {name: many for name, many in amounts if name != self.resource}
        if many := amounts.get(self.resource):
            units[COUNTED] = round(many / self.each)
        return Resources(tuple(sorted(units.items())))

    def whole(self, bundles: Iterable[Resources]) -> int:
        return sum(round(bundle.get(self.resource) / self.each) for bundle in bundles) // GRAIN


class JournalWorld(Frozen):
    """The replayed world: the same for every scheduler."""

    record: JournalRecord
    units: CountedUnit
    workload: tuple[WorkloadTask, ...]
    stories: tuple[TaskStory, ...]  # one for each task of the workload
    settings: tuple[tuple[float, SettingEvent], ...]
    took: MeasuredDurations
    times: PoolTimes
    until_s: float  # the last event of a task; utilisation counts until then
    facts: tuple[str, ...]  # statements about the recording
    assumed: tuple[str, ...]  # statements about the replay's assumptions
    classes: tuple[str, ...] = ()

    @property
    def node_units(self) -> dict[str, int]:
        """The largest size of each node, in units."""
        found: dict[str, int] = {}
        for _, event in self.settings:
            if isinstance(event, e.NodeJoined):
                found[event.node] = max(found.get(event.node, 0), event.total.get(COUNTED) // GRAIN)
        return found


def world_of(record: JournalRecord) -> JournalWorld:
    """Builds the world of a journal. Raises InputError if no task in it ever ran."""
    kept, left_out = _with_lengths(record)
    if not kept:
        more = "; ".join(left_out) or "no task was submitted"
        raise InputError(f"nothing in this journal can be replayed: {more}")
    units = _units([story.spec for story, _ in kept])
    stories = tuple(story for story, _ in kept)
    took, times = _times(stories, record)
    classes = _classes(stories)
    workload = tuple(
        WorkloadTask(
            _spec(story, units), story.submitted_s, length, units.whole(story.spec.bundles), classes[story.name]
        )
        for story, length in kept
    )
    ends = (record.end_s if story.ended_s is None else max(story.ended_s, story.submitted_s) for story in stories)
    in_order = sorted(stories, key=lambda story: (story.spec.pool, -story.spec.priority))
    return JournalWorld(
        record,
        units,
        workload,
        stories,
        tuple(_settings(record, units)),
        took,
        times,
        max(ends),
        tuple(_facts(record, stories, left_out, units)),
        tuple(_assumed(record, stories)),
        tuple(dict.fromkeys(classes[story.name] for story in in_order)),
    )


def length_s(story: TaskStory, end_s: float) -> float | None:
    """Length of a task's work; None if unknown."""
    began = [attempt for attempt in story.attempts if attempt.started_s is not None]
    if not began:
        return None
    kept = sum(attempt.worked_s for attempt in began if attempt.saved)
    last = began[-1]
    if story.end == "done":
        return kept + (0.0 if last.saved else last.worked_s)
    so_far = kept + max((_worked(attempt, end_s) for attempt in began if not attempt.saved), default=0.0)
    return so_far if story.end else max(so_far, story.spec.estimate_s)


def _worked(attempt: RecordedAttempt, end_s: float) -> float:
    """Length of its work so far, until the end of the journal if it still runs."""
    work_ended_s = end_s if attempt.work_ended_s is None else attempt.work_ended_s
    return 0.0 if attempt.started_s is None else max(0.0, work_ended_s - attempt.started_s)


def _with_lengths(record: JournalRecord) -> tuple[list[tuple[TaskStory, float]], list[str]]:
    kept, left_out = [], Counter[str]()
    for story in record.tasks:
        length = length_s(story, record.end_s)
        if story.spec.shares is not None:
            left_out["that shared the slots of others"] += 1
        elif length is None:
            left_out[f"that never started ({story.end or 'waiting'})"] += 1
        else:
            kept.append((story, length))
    return kept, [f"{_tasks(many)} {which}" for which, many in sorted(left_out.items())]


def _tasks(many: int) -> str:
    return f"{many:,} task" if many == 1 else f"{many:,} tasks"


def _units(specs: Sequence[TaskSpec]) -> CountedUnit:
    bundles = [bundle for spec in specs for bundle in spec.size]
    names = Counter(name for bundle in bundles for name, _ in bundle)
    resource = COUNTED if COUNTED in names else "cpu" if "cpu" in names else sorted(names)[0]
    common = math.gcd(GRAIN, *(bundle.get(resource) for bundle in bundles))
    return CountedUnit(resource, common / GRAIN)


def _spec(story: TaskStory, units: CountedUnit) -> TaskSpec:
    spec = story.spec
    return replace(
        spec,
        id=story.name,
        pool=story.pool,
        bundles=tuple(units.counted(bundle) for bundle in spec.bundles),
        room=tuple(units.counted(bundle) for bundle in spec.room),
        residual=(),
        wait_s=UNLIMITED_S,
        restarts=-1,
        awaits_node=True,
        over_quota_waits=True,
        start_timeout_s=UNLIMITED_S,
        client=None,
    )


def _settings(record: JournalRecord, units: CountedUnit) -> Iterable[tuple[float, SettingEvent]]:
    """Recorded settings, in units; at the end of the journal pools and nodes are opened again."""
    nodes: dict[str, e.NodeJoined] = {}
    gone: set[str] = set()
    shut: set[str] = set()
    drained: set[str] = set()
    names = [event.spec.name for _, event in record.settings if isinstance(event, e.PoolEnsured)]
    for at_s, event in record.settings:
        if isinstance(event, e.PoolEnsured):
            quota, reserved = units.counted(event.spec.quota), tuple(map(units.counted, event.spec.reserved))
            spec = replace(event.spec, quota=quota, reserved=reserved, wait_s=UNLIMITED_S, client=None)
            yield at_s, e.PoolEnsured(spec)
        elif isinstance(event, e.QuotaSet):
            yield at_s, e.QuotaSet(event.pool, units.counted(event.quota))
        elif isinstance(event, e.PolicySet):
            yield at_s, e.PolicySet(_protecting(event.policy, names))
        elif isinstance(event, e.NodeJoined):
            nodes[event.node] = replace(event, total=units.counted(event.total), outside=units.counted(event.outside))
            gone.discard(event.node)
            yield at_s, nodes[event.node]
        elif isinstance(event, e.NodeLost):
            gone.add(event.node)
            shut.discard(event.node)
            yield at_s, event
        else:
            if isinstance(event, e.PoolDropped):
                if event.pool in drained:  # another policy may still have tasks of it
                    drained.remove(event.pool)
                    yield at_s, e.PoolDrained(event.pool, on=False)
            elif isinstance(event, e.PoolDrained):
                (drained.add if event.on else drained.discard)(event.pool)
            elif isinstance(event, e.NodeDrained) or event.on:
                shut.add(event.node)
            else:
                shut.discard(event.node)
            yield at_s, event
    for name in sorted(drained):
        yield record.end_s, e.PoolDrained(name, on=False)
    for node in sorted(shut):
        yield record.end_s, e.NodeCordoned(node, on=False)
    for node in sorted(gone):
        if node in nodes:
            yield record.end_s, nodes[node]


def base_name(pool: str) -> str:
    """The name of a pool without its number."""
    return pool.partition(" (")[0]


def _protecting(policy: PreemptionPolicy, names: Sequence[str]) -> PreemptionPolicy:
    """Protects every generation of a protected pool."""
    spared = tuple(name for name in names if base_name(name) in policy.protected_pools)
    return replace(policy, protected_pools=spared) if policy.protected_pools else policy


def _times(stories: Sequence[TaskStory], record: JournalRecord) -> tuple[MeasuredDurations, PoolTimes]:
    """Measured durations, and the distributions for operations that were not measured."""
    took: MeasuredDurations = {}
    attempts = [(story, attempt) for story in stories for attempt in story.attempts]
    begun = [attempt for story, attempt in attempts if not story.before and not attempt.restored]
    fresh = [attempt.started_s - attempt.assigned_s for attempt in begun if attempt.started_s is not None]
    plain = [a.stopped_s - a.work_ended_s for _, a in attempts if not a.saved and a.stopped_s and a.work_ended_s]
    usual_start, usual_stop = (median(seconds) if seconds else 0.0 for seconds in (fresh, plain))
    loads, saves = [], []
    for story in stories:
        for number, attempt in enumerate(story.attempts, 1):
            if attempt.started_s is not None:
                whole = attempt.started_s - attempt.assigned_s
                start = min(whole, usual_start) if attempt.restored else whole
                took["start", story.name, number] = start
                took["load", story.name, number] = whole - start
                loads += [whole - start] if attempt.restored else []
            elif attempt.work_ended_s is not None:
                # Stopped before it had started: it would have started some time later.
                took["start", story.name, number] = attempt.work_ended_s - attempt.assigned_s + usual_start
                took["load", story.name, number] = 0.0
            if attempt.stopped_s is not None and attempt.work_ended_s is not None:
                whole = attempt.stopped_s - attempt.work_ended_s
                stop = min(whole, usual_stop) if attempt.saved else whole
                took["stop", story.name, number] = stop
                if attempt.saved:
                    took["save", story.name, number] = whole - stop
                    saves.append(whole - stop)
    for group, known in record.groups_s.items():
        for which, seconds in enumerate(known):
            if seconds is not None:
                took["bind", group, which] = seconds
    binds = [seconds for known in record.groups_s.values() for seconds in known if seconds is not None]
    usual = MEASURED
    return took, PoolTimes(
        _drawn(binds, usual.bind_s),
        _drawn(fresh, usual.start_s),
        _drawn(plain, usual.stop_s),
        _drawn(saves, usual.save_s),
        _drawn(loads, usual.load_s),
    )


def _drawn(measured: Sequence[float], usual: Distribution) -> Distribution:
    return Distribution(values=tuple(sorted(round(seconds, 4) for seconds in measured))) if measured else usual


def _classes(stories: Sequence[TaskStory]) -> dict[str, str]:
    """The class of each task: its pool and its priority, if there are several and not too many."""
    pools = {story.spec.pool for story in stories}
    levels = {(story.spec.pool, story.spec.priority) for story in stories}
    by_priority = len(levels) <= MOST_CLASSES and len({priority for _, priority in levels}) > 1
    by_pool = 1 < len(pools) <= MOST_CLASSES

    def name(story: TaskStory) -> str:
        words = [story.spec.pool] if by_pool else []
        words += [f"priority {story.spec.priority:g}"] if by_priority else []
        return ", ".join(words) or "tasks"

    return {story.name: name(story) for story in stories}


def _facts(
    record: JournalRecord, stories: Sequence[TaskStory], left_out: Sequence[str], units: CountedUnit
) -> Iterable[str]:
    yield f"{_tasks(len(stories))} in {record.end_s:,.1f} s"
    if left_out:
        yield "left out: " + "; ".join(left_out)
    if units.resource != COUNTED or units.each != 1:
        yield f"a counted GPU is {units.each:g} {units.resource}"
    running = sum(not story.end for story in stories)
    if running:
        yield (
            f"{_tasks(running)} had not ended: their work is taken to be what they had done by then, or their "
            "estimate, if larger"
        )
    if record.from_snapshot:
        there = sum(story.before for story in stories)
        yield f"the journal begins with a snapshot: {_tasks(there)} that existed are submitted at its beginning"


def _assumed(record: JournalRecord, stories: Sequence[TaskStory]) -> Iterable[str]:
    yield "submissions, lengths of work, nodes, and durations of starts, stops and saves are as recorded"
    put_together = sum(len([a for a in story.attempts if a.started_s is not None]) > 1 for story in stories)
    if put_together:
        yield (
            f"{_tasks(put_together)} started more than once: their work is that of their saved attempts and the last; "
            "unsaved work is done again"
        )
    not_again = {
        "EvictRequested": "evictions by hand",
        "TaskDied": "processes that died",
        "TaskStartFailed": "starts that failed",
        "PlacementGroupFailed": "placement groups that could not be created",
        "PlacementGroupLost": "placement groups lost",
    }
    parts = [
        f"{words} ({record.other_events[kind]:,})" for kind, words in not_again.items() if record.other_events[kind]
    ]
    if parts:
        yield "not repeated: " + ", ".join(parts)
    yield "every task waits without limit, and after the end of the journal all of its nodes are present"
