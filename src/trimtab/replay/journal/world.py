"""The world of a journal, for other policies to live in: what came to the cluster, how long it took, what nodes did.

Taken from the journal: every arrival with what it asked, how long its work was, the time that each start, stop and save
took, and nodes as they came and went. Put together: the work of a task that left or was lost is what its saved attempts
did, and the last one. Not known: how long a task would have worked that had not ended, so it counts as done with what
it had done (or as long as it had said). A task that never began has no length: it is left out, and said so. Here every
task waits as long as it takes, and after the end of the journal all nodes are there, so that every policy can finish.

One resource is counted, GPUs where anybody asks for them; in units of which all tasks ask a whole number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from trimtab.core.errors import InputError
from trimtab.core.resources import GRAIN, Resources
from trimtab.machines.pool import events as e
from trimtab.model.pool import PoolSpec, PreemptionPolicy, TaskSpec
from trimtab.replay.common.timing import MEASURED, Distribution, PoolTimes
from trimtab.replay.journal.record import JournalRecord, RecordedAttempt, SettingEvent, TaskStory
from trimtab.replay.pool.policies import UNLIMITED_S
from trimtab.replay.pool.workload import WorkloadTask

COUNTED = "gpu"  # what the counted resource is called in a replay, whatever it was
MOST_CLASSES = 6  # more of them are told apart by pool alone
MeasuredDurations = dict[tuple[str, str, int], float]


@dataclass(frozen=True)
class CountedUnit:
    """The resource that is counted, and how much of it is one here."""

    resource: str
    each: float  # of it, in one unit

    def counted(self, amounts: Resources) -> Resources:
        """The same amounts, with the counted resource in units."""
        units = {name: many for name, many in amounts if name != self.resource}
        if many := amounts.get(self.resource):
            units[COUNTED] = round(many / self.each)
        return Resources(tuple(sorted(units.items())))

    def whole(self, bundles: Iterable[Resources]) -> int:
        """How many units bundles ask together."""
        return sum(round(one.get(self.resource) / self.each) for one in bundles) // GRAIN


@dataclass(frozen=True)
class JournalWorld:
    """What is given, whoever schedules."""

    record: JournalRecord
    units: CountedUnit
    workload: tuple[WorkloadTask, ...]
    stories: tuple[TaskStory, ...]  # of those works
    settings: tuple[tuple[float, SettingEvent], ...]
    took: MeasuredDurations
    times: PoolTimes
    until_s: float  # the last that happened to a task; utilisation counts until then
    facts: tuple[str, ...]  # sentences on what was, and what of it is known
    assumed: tuple[str, ...]  # sentences on what a replay makes of it
    classes: tuple[str, ...] = ()

    @property
    def node_units(self) -> dict[str, int]:
        """The most that each node ever had, in units."""
        found: dict[str, int] = {}
        for _, one in self.settings:
            if isinstance(one, e.NodeJoined):
                found[one.node] = max(found.get(one.node, 0), one.total.get(COUNTED) // GRAIN)
        return found


def world_of(record: JournalRecord) -> JournalWorld:
    """The world of a journal. InputError where nobody in it ever ran."""
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
    until_s = max(_last(story, record.end_s) for story in stories)
    return JournalWorld(
        record,
        units,
        workload,
        stories,
        tuple(_settings(record, units)),
        took,
        times,
        until_s,
        tuple(_facts(record, stories, left_out, units)),
        tuple(_assumed(record, stories)),
        tuple(dict.fromkeys(classes[one.name] for one in sorted(stories, key=_rank))),
    )


# ---- lengths ------------------------------------------------------------------------------------------------------


def length_s(story: TaskStory, end_s: float) -> float | None:
    """How long the work of a task is: None where nobody can know."""
    began = [one for one in story.attempts if one.started_s is not None]
    if not began:
        return None
    kept = sum(one.worked_s for one in began if one.saved)
    last = began[-1]
    if story.end == "done":
        return kept + (0.0 if last.saved else last.worked_s)
    so_far = kept + max((_worked(one, end_s) for one in began if not one.saved), default=0.0)
    return so_far if story.end else max(so_far, story.spec.estimate_s)


def _worked(one: RecordedAttempt, end_s: float) -> float:
    """How long it was at work, until the end of the journal where it still is."""
    work_ended_s = end_s if one.work_ended_s is None else one.work_ended_s
    return 0.0 if one.started_s is None else max(0.0, work_ended_s - one.started_s)


def _with_lengths(record: JournalRecord) -> tuple[list[tuple[TaskStory, float]], list[str]]:
    kept, left_out = [], Counter[str]()
    for story in record.tasks:
        length = length_s(story, record.end_s)
        if story.spec.shares is not None:
            left_out["that took turns in the slots of others"] += 1
        elif length is None:
            left_out[f"that never began ({story.end or 'they wait'})"] += 1
        else:
            kept.append((story, length))
    return kept, [f"{_tasks(many)} {which}" for which, many in sorted(left_out.items())]


def _last(story: TaskStory, end_s: float) -> float:
    if story.ended_s is None:
        return end_s
    return max(story.ended_s, story.submitted_s)


def _tasks(many: int) -> str:
    return f"{many:,} task" if many == 1 else f"{many:,} tasks"


# ---- amounts ------------------------------------------------------------------------------------------------------


def _units(specs: Sequence[TaskSpec]) -> CountedUnit:
    asked = [one for spec in specs for one in spec.size]
    names = Counter(name for one in asked for name, _ in one)
    resource = COUNTED if COUNTED in names else "cpu" if "cpu" in names else sorted(names)[0]
    common = math.gcd(GRAIN, *(one.get(resource) for one in asked))
    return CountedUnit(resource, common / GRAIN)


def _spec(story: TaskStory, units: CountedUnit) -> TaskSpec:
    spec = story.spec
    return replace(
        spec,
        id=story.name,
        pool=story.pool,
        bundles=tuple(units.counted(one) for one in spec.bundles),
        room=tuple(units.counted(one) for one in spec.room),
        residual=(),
        wait_s=UNLIMITED_S,
        restarts=-1,
        awaits_node=True,
        over_quota_waits=True,
        start_timeout_s=UNLIMITED_S,
        client=None,
    )


def _pool(spec: PoolSpec, units: CountedUnit) -> PoolSpec:
    reserved = tuple(units.counted(one) for one in spec.reserved)
    return replace(spec, quota=units.counted(spec.quota), reserved=reserved, wait_s=UNLIMITED_S, client=None)


# ---- what was set, and nodes --------------------------------------------------------------------------------------


def _settings(record: JournalRecord, units: CountedUnit) -> Iterable[tuple[float, SettingEvent]]:
    """As they came, in units; and at the end of the journal whatever is needed for all to be open again."""
    nodes: dict[str, e.NodeJoined] = {}
    gone: set[str] = set()
    shut: set[str] = set()
    drained: set[str] = set()
    names = [one.spec.name for _, one in record.settings if isinstance(one, e.PoolEnsured)]
    for at_s, one in record.settings:
        if isinstance(one, e.PoolEnsured):
            yield at_s, e.PoolEnsured(_pool(one.spec, units))
        elif isinstance(one, e.QuotaSet):
            yield at_s, e.QuotaSet(one.pool, units.counted(one.quota))
        elif isinstance(one, e.PolicySet):
            yield at_s, e.PolicySet(_protecting(one.policy, names))
        elif isinstance(one, e.NodeJoined):
            nodes[one.node] = replace(one, total=units.counted(one.total), outside=units.counted(one.outside))
            gone.discard(one.node)
            yield at_s, nodes[one.node]
        elif isinstance(one, e.NodeLost):
            gone.add(one.node)
            shut.discard(one.node)
            yield at_s, one
        else:
            if isinstance(one, e.PoolDropped):
                if one.pool in drained:  # under another policy some of its tasks may be left
                    drained.remove(one.pool)
                    yield at_s, e.PoolDrained(one.pool, on=False)
            elif isinstance(one, e.PoolDrained):
                (drained.add if one.on else drained.discard)(one.pool)
            elif isinstance(one, e.NodeDrained) or one.on:
                shut.add(one.node)
            else:
                shut.discard(one.node)
            yield at_s, one
    for name in sorted(drained):
        yield record.end_s, e.PoolDrained(name, on=False)
    for node in sorted(shut):
        yield record.end_s, e.NodeCordoned(node, on=False)
    for node in sorted(gone):
        if node in nodes:
            yield record.end_s, nodes[node]


def base_name(pool: str) -> str:
    """What a pool was called, whichever time it was asked for."""
    return pool.partition(" (")[0]


def _protecting(policy: PreemptionPolicy, names: Sequence[str]) -> PreemptionPolicy:
    """A pool that is protected is so whichever time it was asked for."""
    spared = tuple(name for name in names if base_name(name) in policy.protected_pools)
    return replace(policy, protected_pools=spared) if policy.protected_pools else policy


# ---- times --------------------------------------------------------------------------------------------------------


def _times(stories: Sequence[TaskStory], record: JournalRecord) -> tuple[MeasuredDurations, PoolTimes]:
    """How long every deed took, and from what those are drawn that were not done then."""
    took: MeasuredDurations = {}
    fresh = [one.started_s - one.assigned_s for one in _begun(stories) if not one.restored and one.started_s is not None]
    plain = [one.stopped_s - one.work_ended_s for one in _stopped(stories) if not one.saved and one.stopped_s and one.work_ended_s]
    usual_start, usual_stop = (median(one) if one else 0.0 for one in (fresh, plain))
    loads, saves = [], []
    for story in stories:
        for number, one in enumerate(story.attempts, 1):
            if one.started_s is not None:
                whole = one.started_s - one.assigned_s
                start = min(whole, usual_start) if one.restored else whole
                took["start", story.name, number] = start
                took["load", story.name, number] = whole - start
                loads += [whole - start] if one.restored else []
            elif one.work_ended_s is not None:
                # Told to leave before it was there: it would have been, some time later.
                took["start", story.name, number] = one.work_ended_s - one.assigned_s + usual_start
                took["load", story.name, number] = 0.0
            if one.stopped_s is not None and one.work_ended_s is not None:
                whole = one.stopped_s - one.work_ended_s
                stop = min(whole, usual_stop) if one.saved else whole
                took["stop", story.name, number] = stop
                if one.saved:
                    took["save", story.name, number] = whole - stop
                    saves.append(whole - stop)
    for group, known in record.groups_s.items():
        for which, seconds in enumerate(known):
            if seconds is not None:
                took["bind", group, which] = seconds
    binds = [one for known in record.groups_s.values() for one in known if one is not None]
    usual = MEASURED
    return took, PoolTimes(
        _drawn(binds, usual.bind_s),
        _drawn(fresh, usual.start_s),
        _drawn(plain, usual.stop_s),
        _drawn(saves, usual.save_s),
        _drawn(loads, usual.load_s),
    )


def _begun(stories: Sequence[TaskStory]) -> list[RecordedAttempt]:
    return [one for story in stories for one in story.attempts if one.started_s is not None and not story.before]


def _stopped(stories: Sequence[TaskStory]) -> list[RecordedAttempt]:
    return [one for story in stories for one in story.attempts if one.stopped_s is not None]


def _drawn(measured: Sequence[float], usual: Distribution) -> Distribution:
    return Distribution(values=tuple(sorted(round(one, 4) for one in measured))) if measured else usual


# ---- words --------------------------------------------------------------------------------------------------------


def _classes(stories: Sequence[TaskStory]) -> dict[str, str]:
    """The class of each task: its pool and its priority, as far as there are several and not too many."""
    pools = {one.spec.pool for one in stories}
    levels = {(one.spec.pool, one.spec.priority) for one in stories}
    by_priority = len(levels) <= MOST_CLASSES and len({priority for _, priority in levels}) > 1
    by_pool = 1 < len(pools) <= MOST_CLASSES

    def name(story: TaskStory) -> str:
        words = [story.spec.pool] if by_pool else []
        words += [f"priority {story.spec.priority:g}"] if by_priority else []
        return ", ".join(words) or "tasks"

    return {one.name: name(one) for one in stories}


def _rank(story: TaskStory) -> tuple[str, float]:
    return story.spec.pool, -story.spec.priority


def _facts(
    record: JournalRecord, stories: Sequence[TaskStory], left_out: Sequence[str], units: CountedUnit
) -> Iterable[str]:
    yield f"{_tasks(len(stories))} in {record.end_s:,.1f} s"
    if left_out:
        yield "left out: " + "; ".join(left_out)
    if units.resource != COUNTED or units.each != 1:
        yield f"what is counted as a GPU is {units.each:g} {units.resource}"
    running = sum(not one.end for one in stories)
    if running:
        yield (
            f"{_tasks(running)} had not ended: their work is taken to be what they had done by then, or as much as "
            "they had said, where that is more"
        )
    if record.from_snapshot:
        there = sum(one.before for one in stories)
        yield f"the journal begins with a snapshot: {_tasks(there)} that were there already come at its beginning"


def _assumed(record: JournalRecord, stories: Sequence[TaskStory]) -> Iterable[str]:
    yield "arrivals, lengths of work, nodes, and what starts, stops and saves took are as recorded"
    put_together = sum(len([a for a in one.attempts if a.started_s is not None]) > 1 for one in stories)
    if put_together:
        yield (
            f"{_tasks(put_together)} began more than once: their work is what their saved attempts did, and the last; "
            "what was not saved is done again"
        )
    not_again = {
        "EvictRequested": "evictions by hand",
        "TaskDied": "processes that died",
        "TaskStartFailed": "starts that failed",
        "PlacementGroupFailed": "placement groups that could not be made",
        "PlacementGroupLost": "placement groups lost",
    }
    said = [f"{words} ({record.other_events[kind]:,})" for kind, words in not_again.items() if record.other_events[kind]]
    if said:
        yield "not repeated: " + ", ".join(said)
    yield "every task waits as long as it takes, and once the journal has ended all of its nodes are there"
