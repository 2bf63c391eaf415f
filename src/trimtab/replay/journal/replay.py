"""Other policies in the world of a journal, and the one that ran, to see how near a replay comes to what was.

The pool machine has the pools, quotas and rules of the journal, with what a policy changes of them; baselines know
nodes and sizes alone. A deed takes as long as it took then where it was done then, else a time drawn from those that
were measured. The row `recorded` is no replay: it is what the journal says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.errors import InfeasibleError
from trimtab.core.resources import GRAIN
from trimtab.machines.pool import events as e
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import PreemptionPolicy
from trimtab.replay.common.churn import ChurnEvent
from trimtab.replay.journal.record import VERBS, GivenInstruction, SettingEvent
from trimtab.replay.journal.world import COUNTED, JournalWorld, base_name
from trimtab.replay.pool.clairvoyant import Clairvoyant
from trimtab.replay.pool.driver import (
    BINS,
    PoolCurves,
    PoolOutcome,
    PoolReality,
    PoolReplay,
    PoolScheduler,
    SimulatedTask,
)
from trimtab.replay.pool.figures import PoolFigures, figures
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.pool.policies import PoolPolicy, scheduler

RECORDED = "recorded"
AS_IT_WAS = "as it was"
SEED = 0


@dataclass(frozen=True)
class AlternativePolicy:
    """A policy to try: what it changes of the pools and rules that the journal has, or a baseline."""

    policy: PoolPolicy
    rules: dict[str, Any] = field(default_factory=dict)  # of preemption, where several pools or labels matter
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: settings of one pool
    unchanged: bool = False  # everything as the journal has it

    @property
    def name(self) -> str:
        """As it stands in tables."""
        return self.policy.name

    def text(self) -> str:
        """As a report states it."""
        if self.unchanged:
            return "the pool machine with the pools and rules of the journal"
        more = [f"{key} {value}" for key, value in self.rules.items()]
        more += [f"{pool}: {key} {value}" for pool, said in self.pools.items() for key, value in said.items()]
        return self.policy.text() + (f" ({', '.join(more)})" if more else "")

    def settings(self, world: JournalWorld) -> list[tuple[float, SettingEvent]]:
        """What the pool machine is told, and when."""
        if self.unchanged:
            return list(world.settings)
        changes = {**self.policy.preemption, **self.rules}
        preempts = self.policy.use == "trimtab"
        found: list[tuple[float, SettingEvent]] = []
        if preempts and not any(isinstance(one, e.PolicySet) for _, one in world.settings):
            found.append((0.0, e.PolicySet(PreemptionPolicy(**changes))))
        for at_s, one in world.settings:
            if isinstance(one, e.PolicySet):
                if preempts:
                    found.append((at_s, e.PolicySet(replace(one.policy, **changes))))
            elif isinstance(one, e.PoolEnsured):
                said = {**self.policy.pool, **self.pools.get(base_name(one.spec.name), {})}
                found.append((at_s, e.PoolEnsured(replace(one.spec, **said))))
            elif isinstance(one, e.QuotaSet) and "quota" in self.pools.get(base_name(one.pool), {}):
                continue
            else:
                found.append((at_s, one))
        return found


UNCHANGED = AlternativePolicy(PoolPolicy(AS_IT_WAS, "trimtab"), unchanged=True)


@dataclass(frozen=True)
class JournalRun:
    """One replay, with its instructions."""

    figures: PoolFigures
    outcome: PoolOutcome
    given: tuple[GivenInstruction, ...] = ()


def run_other(
    world: JournalWorld, other: AlternativePolicy, progress: Callable[[float], None] | None = None
) -> JournalRun:
    """One policy in the world of a journal."""
    given: list[GivenInstruction] = []
    machine = other.policy.use.startswith("trimtab")
    try:
        if other.policy.use == "clairvoyant":
            outcome = _JournalBound(world).run()
        else:
            most = max(world.node_units.values(), default=1)
            decides: PoolScheduler = PoolMachine() if machine else scheduler(other.policy, most, most)[0]
            settings = other.settings(world) if machine else _for_baselines(world.settings)
            outcome = JournalReplay(
                decides,
                world,
                settings,
                heard=lambda now, _, out: given.extend(
                    GivenInstruction(now, one, getattr(one, "task", "")) for one in out
                ),
                progress=progress,
            ).run()
    except InvariantError as fault:
        if "nothing happens any more" not in str(fault):
            raise
        raise InfeasibleError(
            f"under {other.name} some tasks can never run: {fault}",
            hint="with these settings they ask more than their pool or any node ever has",
        ) from None
    return JournalRun(
        in_whole(figures(outcome, other.name, SEED, world.classes), world.units.each), outcome, tuple(given)
    )


def in_whole(one: PoolFigures, each: float) -> PoolFigures:
    """The figures in what was counted, not in units of it."""
    if each == 1:
        return one
    used = [round(many * each) for many in one.curves.used_gpus]
    return replace(one, redone_gpu_h=one.redone_gpu_h * each, curves=replace(one.curves, used_gpus=used))


class JournalReplay(PoolReplay):
    """A run in the world of a journal."""

    def __init__(
        self,
        decides: PoolScheduler,
        world: JournalWorld,
        settings: Sequence[tuple[float, SettingEvent]],
        *,
        heard: Callable[[float, e.PoolEvent, list[e.PoolInstruction]], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._world = world
        self._sizes: dict[str, int] = {}
        self._starts: dict[str, int] = {}  # by task: how often it was started. Attempts count tries to place it as well
        self._stops: set[tuple[str, int]] = set()
        self._left = Counter(work.spec.pool for work in world.works)  # by pool: tasks that have not ended
        self._to_drop: set[str] = set()
        self._endings = {story.name: story.ending for story in world.stories if isinstance(decides, PoolMachine)}
        reality = PoolReality((), 0, world.times, checkpoint_s=0.0, seed=SEED)
        super().__init__(decides, (), reality, heard=heard, progress=progress)
        self._window_s = world.until_s
        # What is said at one moment is said in this order: settings first, as whoever submits found them.
        for at_s, one in settings:
            self._agenda.put(at_s, one)
        self._expect(world.works)

    def _happens(self, what: e.PoolEvent | ChurnEvent) -> None:
        if isinstance(what, e.NodeJoined):
            self._joins(what)
        elif isinstance(what, e.NodeLost):
            if what.node in self._truths.nodes:
                self._count_capacity()
                self._there -= self._sizes.pop(what.node)
                self._node_lost(what.node)
        elif isinstance(what, e.NodeDrained | e.NodeCordoned) and what.node not in self._truths.nodes:
            return
        elif isinstance(what, e.PoolDropped) and self._left[what.pool]:
            self._to_drop.add(what.pool)  # once the last of its tasks has ended
        else:
            super()._happens(what)

    def _tell(self, event: e.PoolEvent) -> None:
        if isinstance(event, e.TaskEnded):
            ending = self._endings.get(event.task)
            if isinstance(ending, e.TaskEnded):
                event = replace(event, error=ending.error)
            elif ending is not None:
                event = replace(ending, task=event.task)
        super()._tell(event)

    def _stopped(self, event: e.TaskStopped) -> None:
        life = self._lives[event.task]
        done = life.stop == "done"
        super()._stopped(event)
        pool = life.work.spec.pool
        self._left[pool] -= done
        if done and not self._left[pool] and pool in self._to_drop:
            self._tell(e.PoolDropped(pool))

    def _sample(self) -> None:
        """A point for every bin, whatever happens in it: runs are short here, and compared with what was."""
        until_s = min(self._agenda.now, self._window_s)
        while self._next_bin <= until_s and len(self._curves.at) <= BINS:
            self._curves.at.append(self._next_bin)
            self._curves.waiting.append(self._waiting)
            self._curves.used_gpus.append(self._used)
            self._next_bin = self._window_s * len(self._curves.at) / BINS
        if self._progress is not None:
            self._progress(until_s / self._window_s if self._window_s else 1.0)

    def _joins(self, what: e.NodeJoined) -> None:
        size = what.total.get(COUNTED) // GRAIN
        self._count_capacity()
        self._there += size - self._sizes.get(what.node, 0)
        self._sizes[what.node] = size
        known = self._truths.nodes.get(what.node)
        if known is None:
            self._truths.joined(what.node, what.total.get(COUNTED) / GRAIN)
        else:
            known.units = what.total.get(COUNTED)
        self._tell(what)

    def _start(self, one: e.StartTask, now: float) -> None:
        self._starts[one.task] = self._starts.get(one.task, 0) + 1
        super()._start(one, now)

    def _stop(self, one: e.StopTask, now: float) -> None:
        # Said again because it takes long: it is under way.
        if (one.task, one.attempt) not in self._stops:
            self._stops.add((one.task, one.attempt))
            super()._stop(one, now)

    def _took(self, what: str, name: str, attempt: int) -> float:
        number = attempt if what == "bind" else self._starts[name]
        known = self._world.took.get((what, name, number))
        return super()._took(what, name, number) if known is None else known


def _for_baselines(settings: Sequence[tuple[float, SettingEvent]]) -> list[tuple[float, SettingEvent]]:
    """Nodes as baselines know them: there with what others leave of them, or gone. A drain that was called off is none,
    and what others take later of a node they do not see."""
    found: list[tuple[float, SettingEvent]] = []
    there: set[str] = set()
    for at, (at_s, one) in enumerate(settings):
        if isinstance(one, e.NodeJoined) and one.node not in there:
            there.add(one.node)
            found.append((at_s, e.NodeJoined(one.node, one.total.minus(one.outside))))
        elif isinstance(one, e.NodeLost):
            there.discard(one.node)
            found.append((at_s, one))
        elif isinstance(one, e.NodeDrained) and _goes(settings[at + 1 :], one.node):
            found.append((at_s, one))
    return found


def _goes(settings: Sequence[tuple[float, SettingEvent]], node: str) -> bool:
    for _, one in settings:
        if isinstance(one, e.NodeLost) and one.node == node:
            return True
        if isinstance(one, e.NodeCordoned) and one.node == node and not one.on:
            return False
    return False


class _JournalBound(Clairvoyant):
    """The clairvoyant bound in the world of a journal."""

    def __init__(self, world: JournalWorld) -> None:
        self._sizes = world.node_units
        happens = tuple(
            ChurnEvent(at_s, one.node, "joined" if isinstance(one, e.NodeJoined) else "lost")
            for at_s, one in _for_baselines(world.settings)
            if isinstance(one, e.NodeJoined | e.NodeLost)
        )
        super().__init__(world.works, PoolReality((), 0, churn=happens, seed=SEED))
        self._window_s = world.until_s

    def _node(self, what: ChurnEvent) -> None:
        self._node_gpus = self._sizes[what.node]
        super()._node(what)


# ---- what was -----------------------------------------------------------------------------------------------------


def recorded(world: JournalWorld) -> JournalRun:
    """What the journal says, summed up as a replay is."""
    lives = [_life(world, number) for number in range(len(world.works))]
    inside = world.until_s
    held = sum(
        life.work.gpus * ((inside if one.stopped_s is None else one.stopped_s) - one.asked_s)
        for life, story in zip(lives, world.stories, strict=True)
        for one in story.attempts
    )
    outcome = PoolOutcome(
        lives,
        world.record.events,
        sum(one.evictions for one in lives),
        inside,
        inside,
        _capacity(world),
        held,
        sum(one.work.gpus * one.work.work_s for one in lives),
        _curves(world),
        0,
        0,
    )
    given = tuple(world.record.given)
    return JournalRun(in_whole(figures(outcome, RECORDED, SEED, world.classes), world.units.each), outcome, given)


def _life(world: JournalWorld, number: int) -> SimulatedTask:
    work, story = world.works[number], world.stories[number]
    end_s = world.record.end_s
    began = [one for one in story.attempts if one.started_s is not None]
    last = began[-1]
    waits = story.ended_s is None and story.open is None
    life = SimulatedTask(work, (), 0.0, story.queued_s)
    life.waited_s = story.waited_s + (end_s - story.queued_s if waits else 0.0)
    life.first_start_s = story.attempts[0].asked_s
    life.evictions, life.losses = story.evictions, story.losses
    life.redone_s = sum(one.worked_s for one in began if one is not last and not one.saved)
    over_s = story.ended_s if story.attempts[-1].leaves else last.over_s
    life.done_s = end_s if over_s is None or not story.end else over_s
    return life


def _capacity(world: JournalWorld) -> float:
    """Units x seconds that nodes had, until the last that happened to a task."""
    until_s, total, there = world.until_s, 0.0, dict[str, tuple[float, int]]()
    for at_s, one in world.settings:
        if isinstance(one, (e.NodeJoined, e.NodeLost)):
            since_s, size = there.pop(one.node, (at_s, 0))
            total += size * max(0.0, min(at_s, until_s) - since_s)
            if isinstance(one, e.NodeJoined):
                there[one.node] = (at_s, one.total.get(COUNTED) // GRAIN)
    return total + sum(size * max(0.0, until_s - since_s) for since_s, size in there.values())


def _curves(world: JournalWorld) -> PoolCurves:
    """Who waited and what was in use, over time."""
    changes: list[tuple[float, int, int]] = []
    for work, story in zip(world.works, world.stories, strict=True):
        queued_s: float | None = story.submitted_s
        for one in story.attempts:
            if queued_s is not None:
                changes += [(queued_s, 1, 0), (one.asked_s, -1, 0)]
            changes.append((one.asked_s, 0, work.gpus))
            queued_s = one.stopped_s
            if one.stopped_s is not None:
                changes.append((one.stopped_s, 0, -work.gpus))
        if queued_s is not None and story.ended_s != queued_s:
            changes.append((queued_s, 1, 0))
            if story.ended_s is not None:
                changes.append((story.ended_s, -1, 0))
    changes.sort(key=lambda one: one[0])
    curves, waiting, used, at = PoolCurves(), 0, 0, 0
    for point in range(BINS + 1):
        now_s = world.until_s * point / BINS
        while at < len(changes) and changes[at][0] <= now_s:
            waiting, used = waiting + changes[at][1], used + changes[at][2]
            at += 1
        curves.at.append(now_s)
        curves.waiting.append(waiting)
        curves.used_gpus.append(used)
    return curves


# ---- how near a replay comes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayAgreement:
    """The policy that ran, replayed, against what was."""

    instructions: int  # that were given then, to tasks that are replayed
    same: int  # of them, from the first on
    first: str  # what differs first: then, and in the replay; empty where nothing does
    makespan: float  # relative error
    completion_worst: float  # relative error of the worst task
    completion_mean: float  # of all


def agreement(world: JournalWorld, was: JournalRun, replayed: JournalRun) -> ReplayAgreement:
    """How near they are. Tasks and groups go by the order in which they appear, not by their numbers."""
    names = {story.name for story in world.stories}
    # A replay ends with its last task; what was done about a pool that was dropped in the end is no part of it.
    last_s = max(one.submit_s for one in world.works)
    drops = [at_s for at_s, one in world.settings if isinstance(one, e.PoolDropped) and at_s > last_s]
    until_s = min([world.until_s, *(math.nextafter(at_s, 0.0) for at_s in drops)])
    then, now = (_deeds([one for one in run.given if one.at_s <= until_s], names) for run in (was, replayed))
    same = next((at for at, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    first = ""
    if same < max(len(then), len(now)):
        words = [str(each[same]) if same < len(each) else "nothing" for each in (then, now)]
        first = f"then {words[0]}, replayed {words[1]}"
    errors = [
        _error((b.done_s or 0.0) - b.work.submit_s, (a.done_s or 0.0) - a.work.submit_s)
        for a, b in zip(was.outcome.lives, replayed.outcome.lives, strict=True)
    ]
    return ReplayAgreement(
        len(then),
        same,
        first,
        _error(replayed.outcome.end_s, was.outcome.end_s),
        max(errors),
        sum(errors) / len(errors),
    )


def _error(is_s: float, was_s: float) -> float:
    return abs(is_s - was_s) / was_s if was_s > 0 else 0.0 if is_s == was_s else 1.0


def _deeds(given: Sequence[GivenInstruction], names: set[str]) -> list[str]:
    """Instructions without numbers that depend on what else there was: groups by the order in which they are made."""
    groups: dict[str, str] = {}
    starts: dict[str, int] = {}
    found = []
    for each in given:
        one = each.one
        if isinstance(one, e.CreatePlacementGroup):
            groups[one.group] = f"group {len(groups) + 1}"
            found.append(f"make {groups[one.group]} on {', '.join(one.nodes)}")
        elif isinstance(one, e.RemovePlacementGroup):
            found.append(f"remove {groups.get(one.group, 'an earlier group')}")
        elif each.task in names:
            name = each.task
            if isinstance(one, e.StartTask):
                starts[name] = starts.get(name, 0) + 1
                places = ", ".join(f"{groups.get(p.group, 'an earlier group')}/{p.bundle}" for p in one.places)
                found.append(f"start {name}, for the {starts[name]}. time, in {places}")
            else:
                found.append(f"{VERBS[type(one)]} {name}")
    return found
