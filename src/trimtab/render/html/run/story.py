"""The story of a run, read from its folder for drawing: what ran on which GPU, and events besides.

`RunStory.take` takes one event of `events.jsonl` at a time, so that a run can be followed too. Must never happen: an
event stops the reading or is lost. Iterations that were run again stay as void ones; unknown events are skipped; lines
that cannot be parsed are counted and left out.

Time is that of the run's own timeline (`t_s`, and the times of bars). A resumed run continues where it stopped: the
time in between is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import is_number, is_whole
from trimtab.core.ranks import rank_range
from trimtab.model.run import Iteration
from trimtab.model.run_events import ODD, read_event
from trimtab.render.html.kit.labels import counted
from trimtab.runtime.run.folder import EVENTS
from trimtab.runtime.run.job import UNMEASURED_S

GpuKey = tuple[str, int]  # node name and GPU index

MOVE_INTERRUPTED = "interrupted"  # a move in progress when the run was resumed, until an event gives its result

_MAX_GPUS = 100_000


class ReportPlan(Frozen):
    """A plan that ran, and from when. `groups` are components with the GPU slots that they share in turns."""

    number: int
    why: str
    iteration: int
    t_s: float
    words: str
    predicted_s: float | None  # None: its costs were unknown
    groups: tuple[tuple[tuple[str, ...], tuple[GpuKey, ...]], ...]
    costs_s: Mapping[str, float]

    def gpu_slots(self, component: str) -> tuple[GpuKey, ...]:
        """The GPU slots of a component; none for a CPU component."""
        return next((gpu_slots for names, gpu_slots in self.groups if component in names), ())


class ReportBar(Frozen):
    """A bar of a component under a plan, on its first `gpus` slots (0: all of its group)."""

    component: str
    doing: str
    start: float
    end: float
    iteration: int
    plan: int
    gpus: int = 0
    void: bool = False


class ReportIteration(Frozen):
    """A finished iteration. Void ones were run again."""

    iteration: Iteration
    end_s: float
    plan: int
    metrics: Mapping[str, Mapping[str, float | None]]
    here_s: float
    void: bool = False
    expected_s: float | None = None  # predicted by the costs measured just before
    stay_s: float | None = None  # what the first plan would have taken, by the costs of this iteration


@dataclass
class ReportMigration:
    """A move and its result."""

    id: int
    iteration: int
    began_s: float
    state: str = "begun"
    ended_s: float | None = None
    code: str = ""
    reason: str = ""
    outcome: str = ""  # why it was rolled back, or is stuck
    numbers: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False
    changes: tuple[tuple[str, str, int, int], ...] = ()  # component, how, GPUs before and after
    before: str = ""
    after: str = ""
    predicted_s: float | None = None
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # name, end on the timeline, seconds
    rollback_s: float = 0.0
    promised: float | None = None  # gain, as a share of an iteration
    realised: float | None = None

    @property
    def is_open(self) -> bool:
        return self.ended_s is None or self.state == MOVE_INTERRUPTED

    @property
    def cost_s(self) -> float:
        """Time of its stages, rollback included."""
        return sum(took for _, _, took in self.stages) + self.rollback_s


class ReportDecision(Frozen):
    """A decision to stay, or advice."""

    t_s: float
    iteration: int
    what: str
    code: str
    reason: str
    numbers: Mapping[str, Any]
    plan: str = ""


class ReportEvent(Frozen):
    """An event besides the iterations, for the timeline's marks and the list of events.

    `lane` is where it is drawn: run, moves, nodes, tasks or workers; without a lane it is only listed. A `strong` event
    is drawn through all rows.
    """

    t_s: float
    lane: str
    kind: str
    title: str
    code: str = ""
    reason: str = ""
    strong: bool = False


@dataclass
class ReportNode:
    """A node and the intervals in which it was present; the last one is open while it is."""

    name: str
    gpus: int
    kind: str
    presence: list[tuple[float, float | None]] = field(default_factory=list)


def finite(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def whole(value: Any) -> int | None:
    return value if is_whole(value, maximum=math.inf) else None


def as_text(value: Any) -> str:
    return "" if value is None else str(value)


def ranks_of(text: Any) -> tuple[int, ...]:
    """Parse ranks as plans write them: `0-3,6`."""
    found: list[int] = []
    for part in str(text).split(",") if str(text).strip() else ():
        ranks = rank_range(part)
        if ranks is None or len(found) + len(ranks) > _MAX_GPUS:
            raise ValueError(f"{part!r:.40} are no ranks of {_MAX_GPUS} GPUs")
        found.extend(ranks)
    return tuple(found)


def gpus_of(count: int, kind: str) -> str:
    return f" ({counted(count, 'GPU')}{f', {kind}' if kind else ''})"


def time_left(event: Mapping[str, Any]) -> str:
    """Time until the deadline, which is on the clock of `at` or on the run's own."""
    deadline = finite(event.get("deadline"))
    if deadline is None:
        return ""
    for clock in ("at", "t_s"):
        now = finite(event.get(clock))
        if now is not None and 0 <= deadline - now < 7 * 86400:
            return f" in {deadline - now:.0f} s"
    return ""


_SLACK_S = 1e-6
_UNNAMED = ""
_WORKER_GONE = ("draining", "inactive", "lost", "left", "gone", "ended", "failed")
_MARKED_ALREADY = ("MOVING", "ARRIVED", "STAGE_FAILED", "ROLLED_BACK", "STUCK")  # moves have their own marks


@dataclass
class RunStory:
    """A run. Feed it with `take`, then read its lists."""

    job: str = ""
    wanted: int | None = None  # iterations requested
    seed: int | None = None
    is_advised: bool = False  # an external run, of which only the log was read
    began_at: float | None = None
    last_at: float | None = None
    end_s: float = 0.0  # end of the timeline so far
    state: str = ""  # "": it has not ended
    end_code: str = ""
    end_reason: str = ""
    nodes: list[ReportNode] = field(default_factory=list)
    plans: list[ReportPlan] = field(default_factory=list)
    bars: list[ReportBar] = field(default_factory=list)
    done: list[ReportIteration] = field(default_factory=list)
    moves: list[ReportMigration] = field(default_factory=list)
    decisions: list[ReportDecision] = field(default_factory=list)
    timeline_events: list[ReportEvent] = field(default_factory=list)
    unparsed_lines: list[int] = field(default_factory=list)  # line numbers that could not be parsed
    resumes: int = 0
    events: int = 0
    _order: list[tuple[str, int]] = field(default_factory=list)  # nodes in the order of plan ranks
    _names: dict[str, None] = field(default_factory=dict)  # of components, in order
    _up: dict[tuple[str, str], bool] = field(default_factory=dict)  # workers, and whether they are up
    _shift_s: float = 0.0
    _resuming: bool = False
    _last: int = 0  # number of the last iteration that counts
    _targets: dict[str, tuple[tuple[tuple[str, ...], tuple[GpuKey, ...]], ...]] = field(default_factory=dict)

    # ---- queries ---------------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> list[ReportIteration]:
        """Each iteration once, without void ones."""
        counted = {record.iteration.number: record for record in self.done if not record.void}
        return [counted[number] for number in sorted(counted)]

    @property
    def components(self) -> tuple[str, ...]:
        """In the workflow's order, as far as plans give it."""
        return tuple(self._names)

    @property
    def on_cpu(self) -> tuple[str, ...]:
        placed = {name for plan in self.plans for group, gpu_slots in plan.groups if gpu_slots for name in group}
        return tuple(name for name in self.components if name not in placed)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def here_s(self) -> float:
        """Time of the iterations that count, on the clock of the process that ran them."""
        return sum(record.here_s for record in self.iterations)

    @property
    def wall_s(self) -> float:
        """Time of the iterations that count, on the run's timeline."""
        return sum(record.iteration.wall_s for record in self.iterations)

    def prediction(self, number: int) -> float | None:
        """Predicted iteration time of a plan; None where its costs were not yet measured."""
        plan = self.plans[number]
        later_measured = any(other.why == "measured" for other in self.plans[number + 1 :])
        return None if later_measured and plan.why == "first" else plan.predicted_s

    # ---- reading ---------------------------------------------------------------------------------------------------

    def take(self, event: Mapping[str, Any]) -> None:
        """Process an event of `read_event`. Raises one of `ODD` if it is malformed, and then changes nothing."""
        kind = event["event"]
        at = finite(event.get("at"))
        reader = getattr(self, f"_take_{kind}", None) if isinstance(kind, str) and kind.isalpha() else None
        if reader is not None:
            reader(event)
        self.events += 1
        if at is not None:
            self.began_at = at if self.began_at is None else self.began_at
            self.last_at = at if self.last_at is None else max(self.last_at, at)

    def _time(self, event: Mapping[str, Any], starts: Sequence[float] = ()) -> float:
        """Time of an event; without one, the end of the timeline."""
        stated = finite(event.get("t_s"))
        earliest = min([*starts, *([] if stated is None else [stated])], default=None)
        if earliest is not None and self._resuming:
            # A resumed run may count from 0 again: shift it to the end of the timeline.
            if earliest + self._shift_s < self.end_s - _SLACK_S:
                self._shift_s = self.end_s
            self._resuming = False
        t_s = self.end_s if stated is None else stated + self._shift_s
        self.end_s = max(self.end_s, t_s)
        return t_s

    def _add_event(self, t_s: float, lane: str, kind: str, title: str, *, strong: bool = False, **why: Any) -> None:
        self.timeline_events.append(
            ReportEvent(t_s, lane, kind, title, as_text(why.get("code")), as_text(why.get("reason")), strong)
        )

    def _take_began(self, event: Mapping[str, Any]) -> None:
        t_s = self._time(event)
        self.job = as_text(event.get("job")).rpartition("/")[2]
        self.wanted, self.seed = whole(event.get("iterations")), whole(event.get("seed"))
        self.is_advised = event.get("advised") is True
        self._add_event(t_s, "run", "began", "the run began")

    def _take_resumed(self, event: Mapping[str, Any]) -> None:
        after = int(event["after"])
        # After a loss the same process may continue, and so does its clock.
        self._resuming = True
        t_s = self._time(event)
        void = self._void_after(after)
        for move in self.moves:
            if move.ended_s is None:  # the process that ran it is gone
                move.state, move.ended_s = MOVE_INTERRUPTED, t_s
        self.resumes += 1
        self.state = self.end_code = self.end_reason = ""
        again = f"; {counted(void, 'iteration')} after that is run again" if void == 1 else ""
        again = f"; {void} iterations after that are run again" if void > 1 else again
        self._add_event(t_s, "run", "resumed", f"resumed after iteration {after}{again}", strong=True)

    def _take_lost(self, event: Mapping[str, Any]) -> None:
        after, t_s = int(event["after"]), self._time(event)
        self._void_after(after)
        component = as_text(event.get("component")) or "a component"
        self._add_event(t_s, "run", "lost", f"{component} was lost", reason=event.get("why"), strong=True)

    def _void_after(self, after: int) -> int:
        """Mark iterations after a checkpoint as void; returns how many there were."""
        if after >= self._last:  # a loss may just have made them void
            is_lost = bool(self.timeline_events) and self.timeline_events[-1].kind == "lost"
            void = {record.iteration.number for record in self.done if record.void and record.iteration.number > after}
            return len(void) if is_lost else 0
        numbers = {
            record.iteration.number for record in self.done if not record.void and record.iteration.number > after
        }
        self._void(numbers)
        self._last = after
        return len(numbers)

    def _void(self, numbers: set[int]) -> None:
        self.done = [
            replace(record, void=True) if record.iteration.number in numbers else record for record in self.done
        ]
        self.bars = [replace(bar, void=True) if bar.iteration in numbers else bar for bar in self.bars]

    def _take_plan(self, event: Mapping[str, Any]) -> None:
        t_s = self._time(event)
        seen = self._plan(event, t_s)
        self.plans.append(seen)
        self._names.update(dict.fromkeys((*seen.costs_s, *(name for names, _ in seen.groups for name in names))))
        title = {
            "first": "the first plan",
            "measured": "planned with measured costs",
            "placed": "current placement",  # of an advised run
            "judged": "predicted time of the current placement is known",
        }.get(seen.why, "plan")
        if seen.why not in ("move", "lost"):  # shown as moves and losses
            self._add_event(t_s, "moves", "plan", f"{title}: {seen.words}")

    def _plan(self, event: Mapping[str, Any], t_s: float) -> ReportPlan:
        groups = event["groups"]
        named = [tuple(map(str, group["components"])) for group in groups]
        ranks = [ranks_of(group["gpus"]) for group in groups]
        costs = {str(name): float(value) for name, value in dict(event.get("costs_s") or {}).items()}
        words = as_text(event["plan"])
        placed = self._targets.get(json.dumps(groups)) if event.get("why") == "move" else None
        if placed is None:
            self._add_unnamed_gpus(max((rank for group_ranks in ranks for rank in group_ranks), default=-1) + 1)
            gpu_slots = [(name, gpu) for name, gpus in self._order for gpu in range(gpus)]
            placed = tuple(
                (names, tuple(gpu_slots[rank] for rank in group_ranks))
                for names, group_ranks in zip(named, ranks, strict=True)
            )
        predicted = finite(event.get("predicted_s"))
        if costs and all(cost == UNMEASURED_S for cost in costs.values()):
            predicted = None  # placeholder costs
        iteration = whole(event.get("iteration")) or 1
        return ReportPlan(len(self.plans), as_text(event.get("why")), iteration, t_s, words, predicted, placed, costs)

    def _add_unnamed_gpus(self, gpus: int) -> None:
        """Add an unnamed node where events list fewer GPUs than a plan's ranks use."""
        short = gpus - sum(count for _, count in self._order)
        if short <= 0:
            return
        if not self._order or self._order[-1][0] != _UNNAMED:
            self._order.append((_UNNAMED, 0))
        self._order[-1] = (_UNNAMED, self._order[-1][1] + short)
        unnamed = next((node for node in self.nodes if node.name == _UNNAMED), None)
        if unnamed is None:
            unnamed = ReportNode(_UNNAMED, 0, "", [(0.0, None)])
            self.nodes.append(unnamed)
        unnamed.gpus = max(unnamed.gpus, self._order[-1][1])

    def _take_cluster(self, event: Mapping[str, Any]) -> None:
        listed = [(str(name), int(gpus), as_text(kind)) for name, gpus, kind in event["nodes"]]
        leaving = [str(name) for name in event.get("leaving") or ()]
        why = as_text(event.get("why"))
        first = not self.nodes
        self._resuming = self._resuming or (why == "first" and not first)
        t_s = self._time(event)
        now = {name for name, _, _ in listed}
        known = {node.name: node for node in self.nodes}
        present = {node.name for node in self.nodes if node.presence and node.presence[-1][1] is None}
        for name in sorted(present - now):
            node = known[name]
            node.presence[-1] = (node.presence[-1][0], t_s)
            self._add_event(t_s, "nodes", "lost", f"node {name} is gone{gpus_of(node.gpus, node.kind)}", strong=True)
        for name, gpus, kind in listed:
            if name in known:
                known[name].gpus = max(known[name].gpus, gpus)
            else:
                known[name] = ReportNode(name, gpus, kind)
                self.nodes.append(known[name])
            if name not in present:
                known[name].presence.append((0.0 if first else t_s, None))
                if not first:
                    self._add_event(t_s, "nodes", "joined", f"node {name} joined{gpus_of(gpus, kind)}", strong=True)
        self._order = [(name, gpus) for name, gpus, _ in listed]
        if leaving:
            who = f"node {leaving[0]}" if len(leaving) == 1 else f"nodes {', '.join(leaving)}"
            self._add_event(t_s, "nodes", "draining", f"{who} will leave{time_left(event)}", strong=True)
        if why == "quota":
            self._add_event(t_s, "nodes", "quota", f"the quota is now {counted(sum(g for _, g, _ in listed), 'GPU')}")

    def _take_iteration(self, event: Mapping[str, Any]) -> None:
        iteration = decode(Iteration, event["iteration"])
        raw = [(str(name), str(doing), float(start), float(end)) for name, doing, start, end in event.get("bars") or ()]
        if not all(math.isfinite(start) and math.isfinite(end) and start <= end for _, _, start, end in raw):
            raise ValueError("a bar that ends before it starts")
        metrics = {
            str(name): {str(key): finite(value) for key, value in dict(values).items()}
            for name, values in dict(event.get("metrics") or {}).items()
        }
        here_s = finite(event.get("here_s")) or 0.0
        t_s = self._time(event, [start for _, _, start, _ in raw])
        number = iteration.number
        if number <= self._last:  # repeated: the earlier one is void
            self._void({number})
        gpus = {component.component: component.gpus for component in iteration.components}
        plan = len(self.plans) - 1
        shift = self._shift_s
        mine = [
            ReportBar(name, doing, start + shift, end + shift, number, plan, gpus.get(name, 0) if doing == "run" else 0)
            for name, doing, start, end in raw
        ]
        self.bars += mine
        self._names.update(dict.fromkeys(bar.component for bar in mine))
        end_s = max((bar.end for bar in mine), default=t_s if "t_s" in event else self.end_s + iteration.wall_s)
        self.end_s = max(self.end_s, end_s)
        forecasts = finite(event.get("expected_s")), finite(event.get("stay_s"))
        self.done.append(ReportIteration(iteration, end_s, plan, metrics, here_s, False, *forecasts))
        self._last = max(self._last, number)

    def _take_judged(self, event: Mapping[str, Any]) -> None:
        gains = float(event["promised"]), float(event["realised"])
        for move in (move for move in self.moves if move.id == event["move"]):
            move.promised, move.realised = gains

    def _take_saved(self, event: Mapping[str, Any]) -> None:
        iteration = int(event["iteration"])
        self._add_event(self._time(event), "run", "saved", f"checkpoint after iteration {iteration}")

    def _take_ended(self, event: Mapping[str, Any]) -> None:
        state = str(event["state"])
        t_s = self._time(event)
        self.state, self.end_code, self.end_reason = state, as_text(event.get("code")), as_text(event.get("reason"))
        self._add_event(t_s, "run", "ended", f"the run ended: {state}", code=self.end_code, reason=self.end_reason)

    def _take_decided(self, event: Mapping[str, Any]) -> None:
        what, numbers = str(event["what"]), dict(event.get("numbers") or {})
        plan = event.get("plan")
        words = as_text(plan.get("plan")) if isinstance(plan, Mapping) else as_text(plan)
        code, reason = as_text(event.get("code")), as_text(event.get("reason"))
        t_s = self._time(event)
        self.decisions.append(
            ReportDecision(t_s, whole(event.get("iteration")) or 0, what, code, reason, numbers, words)
        )
        if what not in ("stay", "advised"):  # advised: the earlier advice still holds
            to = f": {words}" if words else ""
            self._add_event(t_s, "moves", "advice", f"advice{to}", code=code, reason=reason)

    def _take_move(self, event: Mapping[str, Any]) -> None:
        number, state = int(event["move"]), str(event["state"])
        took_s = finite(event.get("took_s")) or 0.0
        move = next((known for known in reversed(self.moves) if known.id == number and known.is_open), None)
        if state == "begun" or move is None:
            move = self._begun(event, number)
            self.moves.append(move)
            how = " (forced)" if move.forced else ""
            title = f"move {number}{how}: {move.before or '?'} → {move.after or '?'}"
            self._add_event(move.began_s, "moves", "move", title, code=move.code, reason=move.reason, strong=True)
        t_s = self._time(event)
        move.ended_s = None  # an interrupted move continues
        code, reason = as_text(event.get("code")), as_text(event.get("reason"))
        move.state = state if state != "stage" else move.state
        if state == "stage" and event.get("stage"):
            name = str(event["stage"])
            kept = [stage for stage in move.stages if stage[0] != name]
            move.stages = [*kept, (name, t_s, took_s)]
        elif state == "rolling back":
            move.outcome = reason
            self._add_event(t_s, "moves", "rollback", f"move {number} rolls back", code=code, reason=reason)
        elif state in ("arrived", "rolled back", "stuck"):
            move.ended_s = t_s
            move.rollback_s = took_s if state == "rolled back" else 0.0
            move.outcome = move.outcome or (reason if state != "arrived" else "")
            kind = {"arrived": "arrived", "rolled back": "rollback"}.get(state, "lost")
            title = {"arrived": "is done", "rolled back": "was rolled back", "stuck": "is stuck"}[state]
            strong = state != "arrived"
            self._add_event(t_s, "moves", kind, f"move {number} {title}", code=code, reason=reason, strong=strong)

    def _begun(self, event: Mapping[str, Any], number: int) -> ReportMigration:
        plan = event.get("plan")
        changes = []
        for component, how, before, after in event.get("changes") or ():
            changes.append((str(component), str(how), len(before), len(after)))
        move = ReportMigration(
            id=number,
            iteration=whole(event.get("iteration")) or 0,
            began_s=self._time(event),
            code=as_text(event.get("code")),
            reason=as_text(event.get("reason")),
            numbers=dict(event.get("numbers") or {}),
            forced=bool(event.get("forced")),
            changes=tuple(changes),
            before=self.plans[-1].words if self.plans else "",
        )
        if isinstance(plan, Mapping) and "groups" in plan:
            # Ranks refer to the current nodes, even if others join or leave before the move is done.
            target = self._plan(plan, move.began_s)
            self._targets = {json.dumps(plan["groups"]): target.groups}
            move.after, move.predicted_s = target.words, target.predicted_s
        return move

    def _take_range(self, event: Mapping[str, Any]) -> None:
        component, min_gpus, max_gpus = str(event["component"]), int(event["least"]), int(event["most"])
        words = (
            f"{component} may use {min_gpus} to {max_gpus} GPUs"
            if min_gpus != max_gpus
            else f"{component} uses {min_gpus} GPUs"
        )
        self._add_event(self._time(event), "workers", "range", words)

    def _take_told(self, event: Mapping[str, Any]) -> None:
        reason = as_text(event["reason"])
        lane = "" if event.get("code") in _MARKED_ALREADY else "run"
        self._add_event(self._time(event), lane, "told", reason or "told", code=event.get("code"))

    def _take_task(self, event: Mapping[str, Any]) -> None:
        task, what = str(event["task"]), str(event["what"])
        pool = as_text(event.get("pool"))
        title = f"{task}{f' ({pool})' if pool and pool != task else ''}: {what}"
        strong = what in ("evicted", "preempted")
        kind = "evicted" if strong else "task"
        self._add_event(
            self._time(event), "tasks", kind, title, code=event.get("code"), reason=event.get("reason"), strong=strong
        )

    def _take_worker(self, event: Mapping[str, Any]) -> None:
        component, worker, state = str(event["component"]), str(event["worker"]), str(event["state"])
        is_up = state not in _WORKER_GONE
        was_up = self._up.get((component, worker), False)
        self._up[component, worker] = is_up
        kind = "worker" if is_up else "left"
        # A worker's state changes with every weight sync: such changes are listed, not marked.
        lane = "workers" if is_up != was_up else ""
        title = f"{component}: worker {worker} {state}"
        self._add_event(self._time(event), lane, kind, title, code=event.get("code"), reason=event.get("reason"))


def read_story(folder: Path) -> RunStory:
    """The story of the run in a folder. InputError where there is none."""
    path = folder / EVENTS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        missing = not folder.exists()
        what = "there is no such folder" if missing else "there is no run in this folder"
        hint = "name the folder of a run: the one that holds events.jsonl"
        raise InputError(what, where=str(folder), hint=hint) from None
    except NotADirectoryError:
        raise InputError(
            "this is a file, not the folder of a run", where=str(folder), hint="name the folder that it is in"
        ) from None
    except OSError as fault:
        raise InputError(f"cannot be read: {fault.strerror or fault}", where=str(path)) from None
    story = RunStory()
    whole_lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]  # a half-written last line is dropped
    for number, line in enumerate(whole_lines, 1):
        try:
            story.take(read_event(line.decode("utf-8", "replace")))
        except ODD:  # noqa: PERF203
            story.unparsed_lines.append(number)
    if story.unparsed_lines and len(story.unparsed_lines) >= data.count(b"\n"):
        raise InputError("no line can be parsed", where=str(path), hint="is it the folder of a run?")
    return story
