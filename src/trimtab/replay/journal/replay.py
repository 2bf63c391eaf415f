"""Replays policies in the world of a journal, and the recorded policy, to measure how close a replay is.

The pool machine has the pools, quotas and rules of the journal, with a policy's changes; baselines know nodes and sizes
only. An operation takes its recorded duration if it was recorded, else one drawn from the measured ones. The row
`recorded` is not a replay: it is the journal itself.

Policies to try are given by name, or by a file with a policy, a list of policies, or `policies` with a list, as in a
scenario. `preemption` changes the preemption rules, `pool` settings of all pools, `pools` settings of a pool by name.
Everything else stays as recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trimtab.core.errors import InfeasibleError, InputError, check_known, meant
from trimtab.core.frozen import Frozen
from trimtab.core.resources import GRAIN, Resources
from trimtab.formats import sections, yaml_text
from trimtab.formats.sections import Section
from trimtab.machines.pool import events as e
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import PoolSpec, PreemptionPolicy, rules_of
from trimtab.replay.common.comparison import BY_USE
from trimtab.replay.common.timing import ChurnEvent
from trimtab.replay.journal.record import GivenInstruction, SettingEvent, verb
from trimtab.replay.journal.world import COUNTED, JournalWorld, base_name
from trimtab.replay.pool import driver
from trimtab.replay.pool.clairvoyant import Clairvoyant
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.pool.policies import KNOWN, POOL_KEYS, PREEMPTION_KEYS, PoolPolicy, scheduler
from trimtab.replay.pool.scenario import PoolFigures, PoolPolicySection, figures

RECORDED = "recorded"
AS_IT_WAS = "as it was"
SEED = 0


class AlternativePolicy(Frozen):
    """A policy to try: changes to the journal's pools and rules, or a baseline."""

    policy: PoolPolicy
    rules: dict[str, Any] = field(default_factory=dict)  # preemption rules for labels and pools
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: settings of a pool
    unchanged: bool = False  # everything as recorded

    @property
    def name(self) -> str:
        return self.policy.name

    def text(self) -> str:
        if self.unchanged:
            return "the pool machine with the pools and rules of the journal"
        more = [f"{key} {value}" for key, value in self.rules.items()]
        more += [f"{pool}: {key} {value}" for pool, changes in self.pools.items() for key, value in changes.items()]
        return self.policy.text() + (f" ({', '.join(more)})" if more else "")

    def settings(self, world: JournalWorld) -> list[tuple[float, SettingEvent]]:
        """Configuration events for the pool machine, with their times."""
        if self.unchanged:
            return list(world.settings)
        changes = {**self.policy.preemption, **self.rules}
        preempts = self.policy.use == "trimtab"
        found: list[tuple[float, SettingEvent]] = []
        if preempts and not any(isinstance(event, e.PolicySet) for _, event in world.settings):
            found.append((0.0, e.PolicySet(PreemptionPolicy(**changes))))
        for at_s, event in world.settings:
            if isinstance(event, e.PolicySet):
                if preempts:
                    found.append((at_s, e.PolicySet(replace(event.policy, **changes))))
            elif isinstance(event, e.PoolEnsured):
                changed = {**self.policy.pool, **self.pools.get(base_name(event.spec.name), {})}
                found.append((at_s, e.PoolEnsured(replace(event.spec, **changed))))
            elif isinstance(event, e.QuotaSet) and "quota" in self.pools.get(base_name(event.pool), {}):
                continue
            else:
                found.append((at_s, event))
        return found


UNCHANGED = AlternativePolicy(PoolPolicy(AS_IT_WAS, "trimtab"), unchanged=True)


class JournalRun(Frozen):
    """A replay and its instructions."""

    figures: PoolFigures
    outcome: driver.PoolOutcome
    given: tuple[GivenInstruction, ...] = ()


def run_alternative(
    world: JournalWorld, other: AlternativePolicy, progress: Callable[[float], None] | None = None
) -> JournalRun:
    """Runs a policy in the world of a journal."""
    given: list[GivenInstruction] = []
    machine = other.policy.use.startswith("trimtab")
    try:
        if other.policy.use == "clairvoyant":
            outcome = _JournalBound(world).run()
        else:
            most = max(world.node_units.values(), default=1)
            decides: driver.PoolScheduler = PoolMachine() if machine else scheduler(other.policy, most, most)[0]
            settings = other.settings(world) if machine else _for_baselines(world.settings)
            outcome = JournalReplay(
                decides,
                world,
                settings,
                on_event=lambda now, _, out: given.extend(
                    GivenInstruction(now, instruction, getattr(instruction, "task", "")) for instruction in out
                ),
                progress=progress,
            ).run()
    except InvariantError as fault:
        if "no event is left" not in str(fault):
            raise
        raise InfeasibleError(
            f"under {other.name} some tasks can never run: {fault}",
            hint="with these settings they ask for more than their pool or any node ever has",
        ) from None
    return JournalRun(
        in_resource_amounts(figures(outcome, other.name, SEED, world.classes), world.units.each), outcome, tuple(given)
    )


def in_resource_amounts(run: PoolFigures, each: float) -> PoolFigures:
    """Converts figures from units to the counted resource."""
    if each == 1:
        return run
    used = [round(many * each) for many in run.curves.used_gpus]
    return replace(run, redone_gpu_h=run.redone_gpu_h * each, curves=replace(run.curves, used_gpus=used))


class JournalReplay(driver.PoolReplay):
    """A run in the world of a journal."""

    def __init__(
        self,
        decides: driver.PoolScheduler,
        world: JournalWorld,
        settings: Sequence[tuple[float, SettingEvent]],
        *,
        on_event: Callable[[float, e.PoolEvent, list[e.PoolInstruction]], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._world = world
        self._sizes: dict[str, int] = {}
        self._starts: dict[str, int] = {}  # by task: number of starts; attempts also count failed placements
        self._stops: set[tuple[str, int]] = set()
        self._left = Counter(work.spec.pool for work in world.workload)  # by pool: tasks that have not ended
        self._to_drop: set[str] = set()
        self._endings = {story.name: story.ending for story in world.stories if isinstance(decides, PoolMachine)}
        reality = driver.PoolReality((), 0, world.times, checkpoint_s=0.0, seed=SEED)
        super().__init__(decides, (), reality, on_event=on_event, progress=progress)
        self._window_s = world.until_s
        # At equal times settings come first: tasks were submitted under them.
        for at_s, event in settings:
            self._agenda.put(at_s, event)
        self._expect(world.workload)

    def _process(self, event: e.PoolEvent | ChurnEvent) -> None:
        if isinstance(event, e.NodeJoined):
            self._node_joins_with(event)
        elif isinstance(event, e.NodeLost):
            if event.node in self._invariants.nodes:
                self._count_capacity()
                self._gpus_present -= self._sizes.pop(event.node)
                self._node_lost(event.node)
        elif isinstance(event, e.NodeDrained | e.NodeCordoned) and event.node not in self._invariants.nodes:
            return
        elif isinstance(event, e.PoolDropped) and self._left[event.pool]:
            self._to_drop.add(event.pool)  # after its last task has ended
        else:
            super()._process(event)

    def _send_event(self, event: e.PoolEvent) -> None:
        if isinstance(event, e.TaskEnded):
            ending = self._endings.get(event.task)
            if isinstance(ending, e.TaskEnded):
                event = replace(event, error=ending.error)
            elif ending is not None:
                event = replace(ending, task=event.task)
        super()._send_event(event)

    def _stopped(self, event: e.TaskStopped) -> None:
        task = self._tasks[event.task]
        done = task.stop == "done"
        super()._stopped(event)
        pool = task.work.spec.pool
        self._left[pool] -= done
        if done and not self._left[pool] and pool in self._to_drop:
            self._send_event(e.PoolDropped(pool))

    def _sample(self) -> None:
        """Adds a point for every bin: runs are short here and are compared with the recording."""
        until_s = min(self._agenda.now, self._window_s)
        while self._next_bin <= until_s and len(self._curves.at) <= driver.BINS:
            self._curves.add(self._next_bin, self._waiting, self._used)
            self._next_bin = self._window_s * len(self._curves.at) / driver.BINS
        if self._progress is not None:
            self._progress(until_s / self._window_s if self._window_s else 1.0)

    def _node_joins_with(self, event: e.NodeJoined) -> None:
        size = event.total.get(COUNTED) // GRAIN
        self._count_capacity()
        self._gpus_present += size - self._sizes.get(event.node, 0)
        self._sizes[event.node] = size
        known = self._invariants.nodes.get(event.node)
        if known is None:
            self._invariants.node_joined(event.node, event.total.get(COUNTED) / GRAIN)
        else:
            known.units = event.total.get(COUNTED)
        self._send_event(event)

    def _start(self, instruction: e.StartTask, now: float) -> None:
        self._starts[instruction.task] = self._starts.get(instruction.task, 0) + 1
        super()._start(instruction, now)

    def _stop(self, instruction: e.StopTask, now: float) -> None:
        # A repeated StopTask: the stop is under way.
        if (instruction.task, instruction.attempt) not in self._stops:
            self._stops.add((instruction.task, instruction.attempt))
            super()._stop(instruction, now)

    def _duration(self, what: str, name: str, attempt: int) -> float:
        number = attempt if what == "bind" else self._starts[name]
        known = self._world.took.get((what, name, number))
        return super()._duration(what, name, number) if known is None else known


def _for_baselines(settings: Sequence[tuple[float, SettingEvent]]) -> list[tuple[float, SettingEvent]]:
    """Node events for baselines: nodes join with what non-Ray users leave, or are lost. Cancelled drains and later
    changes are ignored.
    """
    found: list[tuple[float, SettingEvent]] = []
    there: set[str] = set()
    for at, (at_s, event) in enumerate(settings):
        if isinstance(event, e.NodeJoined) and event.node not in there:
            there.add(event.node)
            found.append((at_s, e.NodeJoined(event.node, event.total.minus(event.outside))))
        elif isinstance(event, e.NodeLost):
            there.discard(event.node)
            found.append((at_s, event))
        elif isinstance(event, e.NodeDrained) and _is_lost_later(settings[at + 1 :], event.node):
            found.append((at_s, event))
    return found


def _is_lost_later(settings: Sequence[tuple[float, SettingEvent]], node: str) -> bool:
    for _, event in settings:
        if isinstance(event, e.NodeLost) and event.node == node:
            return True
        if isinstance(event, e.NodeCordoned) and event.node == node and not event.on:
            return False
    return False


class _JournalBound(Clairvoyant):
    """The clairvoyant bound in the world of a journal."""

    def __init__(self, world: JournalWorld) -> None:
        self._sizes = world.node_units
        happens = tuple(
            ChurnEvent(at_s, event.node, "joined" if isinstance(event, e.NodeJoined) else "lost")
            for at_s, event in _for_baselines(world.settings)
            if isinstance(event, e.NodeJoined | e.NodeLost)
        )
        super().__init__(world.workload, driver.PoolReality((), 0, churn=happens, seed=SEED))
        self._window_s = world.until_s

    def _node(self, event: ChurnEvent) -> None:
        self._node_gpus = self._sizes[event.node]
        super()._node(event)


# ---- the recording ------------------------------------------------------------------------------------------------


def recorded(world: JournalWorld) -> JournalRun:
    """The figures of the journal itself."""
    tasks = [_recorded_task(world, number) for number in range(len(world.workload))]
    inside = world.until_s
    held = sum(
        task.work.gpus * ((inside if attempt.stopped_s is None else attempt.stopped_s) - attempt.assigned_s)
        for task, story in zip(tasks, world.stories, strict=True)
        for attempt in story.attempts
    )
    outcome = driver.PoolOutcome(
        tasks,
        world.record.events,
        sum(task.evictions for task in tasks),
        inside,
        inside,
        _capacity(world),
        held,
        sum(task.work.gpus * task.work.work_s for task in tasks),
        _curves(world),
        0,
        0,
    )
    given = tuple(world.record.given)
    return JournalRun(
        in_resource_amounts(figures(outcome, RECORDED, SEED, world.classes), world.units.each), outcome, given
    )


def _recorded_task(world: JournalWorld, number: int) -> driver.SimulatedTask:
    work, story = world.workload[number], world.stories[number]
    end_s = world.record.end_s
    began = [attempt for attempt in story.attempts if attempt.started_s is not None]
    last = began[-1]
    waits = story.ended_s is None and story.open is None
    task = driver.SimulatedTask(work, (), 0.0, story.queued_s)
    task.waited_s = story.waited_s + (end_s - story.queued_s if waits else 0.0)
    task.first_start_s = story.attempts[0].assigned_s
    task.evictions, task.losses = story.evictions, story.losses
    task.redone_s = sum(attempt.worked_s for attempt in began if attempt is not last and not attempt.saved)
    work_ended_s = story.ended_s if story.attempts[-1].evicted else last.work_ended_s
    task.done_s = end_s if work_ended_s is None or not story.end else work_ended_s
    return task


def _capacity(world: JournalWorld) -> float:
    """Unit-seconds of all nodes until the last event of a task."""
    until_s, total, there = world.until_s, 0.0, dict[str, tuple[float, int]]()
    for at_s, event in world.settings:
        if isinstance(event, (e.NodeJoined, e.NodeLost)):
            since_s, size = there.pop(event.node, (at_s, 0))
            total += size * max(0.0, min(at_s, until_s) - since_s)
            if isinstance(event, e.NodeJoined):
                there[event.node] = (at_s, event.total.get(COUNTED) // GRAIN)
    return total + sum(size * max(0.0, until_s - since_s) for since_s, size in there.values())


def _curves(world: JournalWorld) -> driver.PoolCurves:
    """Waiting tasks and units in use over time."""
    changes: list[tuple[float, int, int]] = []
    for work, story in zip(world.workload, world.stories, strict=True):
        queued_s: float | None = story.submitted_s
        for attempt in story.attempts:
            if queued_s is not None:
                changes += [(queued_s, 1, 0), (attempt.assigned_s, -1, 0)]
            changes.append((attempt.assigned_s, 0, work.gpus))
            queued_s = attempt.stopped_s
            if attempt.stopped_s is not None:
                changes.append((attempt.stopped_s, 0, -work.gpus))
        if queued_s is not None and story.ended_s != queued_s:
            changes.append((queued_s, 1, 0))
            if story.ended_s is not None:
                changes.append((story.ended_s, -1, 0))
    changes.sort(key=lambda change: change[0])
    curves, waiting, used, at = driver.PoolCurves(), 0, 0, 0
    for point in range(driver.BINS + 1):
        now_s = world.until_s * point / driver.BINS
        while at < len(changes) and changes[at][0] <= now_s:
            waiting, used = waiting + changes[at][1], used + changes[at][2]
            at += 1
        curves.add(now_s, waiting, used)
    return curves


# ---- agreement ----------------------------------------------------------------------------------------------------


class ReplayAgreement(Frozen):
    """How close the replay of the recorded policy is to the recording."""

    instructions: int  # recorded instructions for replayed tasks
    same: int  # equal instructions before the first difference
    first: str  # the first difference: recorded and replayed; empty if none
    makespan: float  # relative error
    completion_worst: float  # relative error of the worst task
    completion_mean: float  # mean over all tasks


def agreement(world: JournalWorld, was: JournalRun, replayed: JournalRun) -> ReplayAgreement:
    """Compares a replay with the recording. Tasks and groups are matched by order of appearance, not by number."""
    names = {story.name for story in world.stories}
    # A replay ends with its last task; instructions for a pool dropped after that are not part of it.
    last_s = max(task.submit_s for task in world.workload)
    drops = [at_s for at_s, event in world.settings if isinstance(event, e.PoolDropped) and at_s > last_s]
    until_s = min([world.until_s, *(math.nextafter(at_s, 0.0) for at_s in drops)])
    then, now = (
        _instruction_texts([given for given in run.given if given.at_s <= until_s], names) for run in (was, replayed)
    )
    same = next((at for at, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    first = ""
    if same < max(len(then), len(now)):
        words = [str(each[same]) if same < len(each) else "nothing" for each in (then, now)]
        first = f"recorded {words[0]}, replayed {words[1]}"
    errors = [
        _error((b.done_s or 0.0) - b.work.submit_s, (a.done_s or 0.0) - a.work.submit_s)
        for a, b in zip(was.outcome.tasks, replayed.outcome.tasks, strict=True)
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


def _instruction_texts(given: Sequence[GivenInstruction], names: set[str]) -> list[str]:
    """Instructions without run-specific numbers: groups are named by order of creation."""
    groups: dict[str, str] = {}
    starts: dict[str, int] = {}
    found = []
    for item in given:
        instruction = item.instruction
        if isinstance(instruction, e.CreatePlacementGroup):
            groups[instruction.group] = f"group {len(groups) + 1}"
            found.append(f"make {groups[instruction.group]} on {', '.join(instruction.nodes)}")
        elif isinstance(instruction, e.RemovePlacementGroup):
            found.append(f"remove {groups.get(instruction.group, 'an earlier group')}")
        elif item.task in names:
            name = item.task
            if isinstance(instruction, e.StartTask):
                starts[name] = starts.get(name, 0) + 1
                places = ", ".join(f"{groups.get(p.group, 'an earlier group')}/{p.bundle}" for p in instruction.places)
                found.append(f"start {name}, for the {starts[name]}. time, in {places}")
            else:
                found.append(f"{verb(instruction)} {name}")
    return found


RULE_KEYS = ("label_rules", "cross_pool", "protected_pools")  # preemption keys that only a journal policy takes
ONE_POOL_KEYS = (*POOL_KEYS, "quota", "borrow", "reserved_priority", "dynamic_limit")


class JournalPolicySection(PoolPolicySection):
    """A policy of a file."""

    use: str = "trimtab"
    preemption: dict[str, Any] = Field(default_factory=dict)
    pool: dict[str, Any] = Field(default_factory=dict)
    pools: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


class _PolicyFile(Section):
    policies: list[Annotated[JournalPolicySection, BY_USE]] = Field(min_length=1)


def read_alternatives(given: Sequence[str]) -> list[AlternativePolicy]:
    """Policies named by `--with`: names of policies, or files."""
    found: list[AlternativePolicy] = []
    for name in given:
        path = Path(name)
        if name in KNOWN:
            found.append(AlternativePolicy(PoolPolicy(name, name)))
        elif path.suffix in (".yaml", ".yml", ".json") or path.exists():
            found += _file(path)
        else:
            hint = meant(name, KNOWN, "a YAML file, or one of " + ", ".join(KNOWN))
            raise InputError(f"{name} is neither a policy nor a file", where="command line: --with", hint=hint)
    taken = [RECORDED, AS_IT_WAS]
    for at, other in enumerate(found):
        if other.name in taken:
            raise InputError(f"two policies are named {other.name}", where="--with", hint="give one a `name`")
        taken.append(found[at].name)
    return found


def _file(path: Path) -> list[AlternativePolicy]:
    source, data = yaml_text.read_source(path)
    if isinstance(data, Mapping) and "policies" in data:
        listed: Any = data["policies"]
    else:
        listed = data if isinstance(data, list) else [data]
    policies = sections.read(_PolicyFile, {"policies": listed}, source).policies
    # The only policy of a file is named after the file unless it has a name.
    alone = path.stem if len(policies) == 1 else None
    return [_other(policy, alone, str(path)) for policy in policies]


def _other(section: JournalPolicySection, alone: str | None, where: str) -> AlternativePolicy:
    rules = {key: value for key, value in section.preemption.items() if key in RULE_KEYS}
    preemption = {key: value for key, value in section.preemption.items() if key not in RULE_KEYS}
    changes = bool(section.preemption or section.pool or section.pools)
    name = section.name or (alone if alone is not None and changes else section.use)
    try:
        check_known(preemption, (*PREEMPTION_KEYS, *RULE_KEYS), f"policy {name}")
        policy = PoolPolicy(name, section.use, preemption, section.pool, section.threshold_gpu_s)
        if (rules and section.use != "trimtab") or (section.pools and not section.use.startswith("trimtab")):
            raise InputError(f"{section.use} takes no such settings", where=name, hint="they go with use: trimtab")
        if "label_rules" in rules:
            if not isinstance(rules["label_rules"], Mapping):
                raise InputError("label_rules maps labels to values and to the values that they may evict", where=name)
            rules["label_rules"] = rules_of(rules["label_rules"])
        if "protected_pools" in rules:
            rules["protected_pools"] = tuple(map(str, rules["protected_pools"]))
        PreemptionPolicy(**preemption, **rules)
        pools = {pool: _one_pool(pool, settings or {}) for pool, settings in section.pools.items()}
    except InputError as error:
        error.where = f"{where}: {error.where or name}"
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(str(error), where=f"{where}: {name}") from None
    return AlternativePolicy(policy, rules, pools)


def _one_pool(pool: str, given: dict[str, Any]) -> dict[str, Any]:
    check_known(given, ONE_POOL_KEYS, f"pools.{pool}")
    found = dict(given)
    if "quota" in found:
        found["quota"] = Resources.of(found["quota"], where=f"pools.{pool}.quota")
    PoolSpec(pool, **{"quota": Resources(), **found})  # raises where a value is wrong
    return found


def fitted(other: AlternativePolicy, world: JournalWorld) -> AlternativePolicy:
    """The policy with quotas in units of the world. Raises InputError for a pool that is not in the journal."""
    known = {base_name(event.spec.name) for _, event in world.settings if isinstance(event, e.PoolEnsured)}
    pools = {}
    for name, section in other.pools.items():
        check_known([name], sorted(known), f"policy {other.name}", "the journal has no pool {}")
        quota = {"quota": world.units.counted(section["quota"])} if "quota" in section else {}
        pools[name] = {**section, **quota}
    return replace(other, pools=pools)
