"""What the folder of a run tells, put in order for drawing: who did what on which GPU, and what happened beside it.

Read by the report from `events.jsonl`; `RunStory.take` takes one event at a time, so that a run can be followed as
well. Nothing is judged here and nothing is lost: iterations that were run again stay as void ones. Unknown events are
passed over, lines that cannot be understood are counted and left out, and neither ever stops the reading.

Time is that of the run's own timeline (`t_s`, and the times of bars). A run that was ended and resumed goes on where it
stopped: the time in between, when nothing ran, is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.errors import InputError
from trimtab.model.run import Iteration
from trimtab.model.run_events import ODD, read_event
from trimtab.render.html.kit.labels import counted
from trimtab.render.html.run.facts import (
    MOVE_INTERRUPTED,
    GpuKey,
    ReportBar,
    ReportDecision,
    ReportEvent,
    ReportIteration,
    ReportMigration,
    ReportNode,
    ReportPlan,
    as_text,
    finite,
    gpus_of,
    ranks_of,
    time_left,
    whole,
)
from trimtab.runtime.run.folder import EVENTS
from trimtab.runtime.run.job import UNMEASURED_S

_SLACK_S = 1e-6
_UNNAMED = ""
_WORKER_GONE = ("draining", "inactive", "lost", "left", "gone", "ended", "failed")
_MARKED_ALREADY = ("MOVING", "ARRIVED", "STAGE_FAILED", "ROLLED_BACK", "STUCK")  # moves have marks of their own


@dataclass
class RunStory:
    """All of a run. Feed it with `take`, then read its lists."""

    job: str = ""
    wanted: int | None = None  # iterations that it was to have
    seed: int | None = None
    is_advised: bool = False  # somebody else's run, of which only the log was read
    began_at: float | None = None
    last_at: float | None = None
    end_s: float = 0.0  # how far the timeline is
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
    unparsed_lines: list[int] = field(default_factory=list)  # lines that could not be understood
    resumes: int = 0
    events: int = 0
    _order: list[tuple[str, int]] = field(default_factory=list)  # nodes as ranks of plans count through them
    _names: dict[str, None] = field(default_factory=dict)  # of components, in order
    _up: dict[tuple[str, str], bool] = field(default_factory=dict)  # workers, and whether they are there
    _shift_s: float = 0.0
    _resuming: bool = False
    _last: int = 0  # number of the last iteration that counts
    _targets: dict[str, tuple[tuple[tuple[str, ...], tuple[GpuKey, ...]], ...]] = field(default_factory=dict)

    # ---- asking ----------------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> list[ReportIteration]:
        """Each iteration once, as it counts."""
        counted = {record.iteration.number: record for record in self.done if not record.void}
        return [counted[number] for number in sorted(counted)]

    @property
    def components(self) -> tuple[str, ...]:
        """All of them in the workflow's order, as far as plans tell it."""
        return tuple(self._names)

    @property
    def on_cpu(self) -> tuple[str, ...]:
        """Components that no plan gave GPUs."""
        placed = {name for plan in self.plans for group, gpu_slots in plan.groups if gpu_slots for name in group}
        return tuple(name for name in self.components if name not in placed)

    @property
    def gpus(self) -> int:
        """Of all nodes that ever were there."""
        return sum(node.gpus for node in self.nodes)

    @property
    def here_s(self) -> float:
        """What the iterations that count took on the clock of whoever drove them."""
        return sum(record.here_s for record in self.iterations)

    @property
    def wall_s(self) -> float:
        """What they took on the run's timeline."""
        return sum(record.iteration.wall_s for record in self.iterations)

    def prediction(self, number: int) -> float | None:
        """What a plan promised; nothing where its costs had yet to be measured."""
        plan = self.plans[number]
        later_measured = any(other.why == "measured" for other in self.plans[number + 1 :])
        return None if later_measured and plan.why == "first" else plan.predicted_s

    # ---- reading ---------------------------------------------------------------------------------------------------

    def take(self, event: Mapping[str, Any]) -> None:
        """One event, as `read_event` gave it. Raises one of `ODD`, having changed nothing, if it is odd."""
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
        """When an event was; where it does not say, how far the timeline is."""
        stated = finite(event.get("t_s"))
        earliest = min([*starts, *([] if stated is None else [stated])], default=None)
        if earliest is not None and self._resuming:
            # A run that was resumed may count from 0 again: its beginning is where the timeline had come to.
            if earliest + self._shift_s < self.end_s - _SLACK_S:
                self._shift_s = self.end_s
            self._resuming = False
        t_s = self.end_s if stated is None else stated + self._shift_s
        self.end_s = max(self.end_s, t_s)
        return t_s

    def _happened(self, t_s: float, lane: str, kind: str, title: str, *, strong: bool = False, **why: Any) -> None:
        self.timeline_events.append(
            ReportEvent(t_s, lane, kind, title, as_text(why.get("code")), as_text(why.get("reason")), strong)
        )

    def _take_began(self, event: Mapping[str, Any]) -> None:
        t_s = self._time(event)
        self.job = as_text(event.get("job")).rpartition("/")[2]
        self.wanted, self.seed = whole(event.get("iterations")), whole(event.get("seed"))
        self.is_advised = event.get("advised") is True
        self._happened(t_s, "run", "began", "the run began")

    def _take_resumed(self, event: Mapping[str, Any]) -> None:
        after = int(event["after"])
        # After a loss that was told a moment ago the same process goes on, and so does its clock.
        self._resuming = True
        t_s = self._time(event)
        void = self._void_after(after)
        for move in self.moves:
            if move.ended_s is None:  # whoever was in the midst of it is not there any more
                move.state, move.ended_s = MOVE_INTERRUPTED, t_s
        self.resumes += 1
        self.state = self.end_code = self.end_reason = ""
        again = f"; {counted(void, 'iteration')} after that is run again" if void == 1 else ""
        again = f"; {void} iterations after that are run again" if void > 1 else again
        self._happened(t_s, "run", "resumed", f"resumed after iteration {after}{again}", strong=True)

    def _take_lost(self, event: Mapping[str, Any]) -> None:
        after, t_s = int(event["after"]), self._time(event)
        self._void_after(after)
        component = as_text(event.get("component")) or "a component"
        self._happened(t_s, "run", "lost", f"{component} was lost", reason=event.get("why"), strong=True)

    def _void_after(self, after: int) -> int:
        """Iterations after a state do not count; gives how many of them there were."""
        if after >= self._last:
            return self._voided(after)
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

    def _voided(self, after: int) -> int:
        """Those that a loss made void a moment ago."""
        numbers = [record.iteration.number for record in self.done if record.void and record.iteration.number > after]
        is_told = bool(self.timeline_events) and self.timeline_events[-1].kind == "lost"
        return len(set(numbers)) if is_told else 0

    def _take_plan(self, event: Mapping[str, Any]) -> None:
        t_s = self._time(event)
        seen = self._plan(event, t_s)
        self.plans.append(seen)
        self._names.update(dict.fromkeys((*seen.costs_s, *(name for names, _ in seen.groups for name in names))))
        title = {
            "first": "the first plan",
            "measured": "planned with measured costs",
            "placed": "the placement in place",  # of a run that is only advised
            "judged": "what the placement in place should take is known",
        }.get(seen.why, "plan")
        if seen.why not in ("move", "lost"):  # those are told as moves and losses
            self._happened(t_s, "moves", "plan", f"{title}: {seen.words}")

    def _plan(self, event: Mapping[str, Any], t_s: float) -> ReportPlan:
        groups = event["groups"]
        named = [tuple(map(str, group["components"])) for group in groups]
        ranks = [ranks_of(group["gpus"]) for group in groups]
        costs = {str(name): float(value) for name, value in dict(event.get("costs_s") or {}).items()}
        words = as_text(event["plan"])
        placed = self._targets.get(json.dumps(groups)) if event.get("why") == "move" else None
        if placed is None:
            self._make_room(max((rank for group_ranks in ranks for rank in group_ranks), default=-1) + 1)
            gpu_slots = [(name, gpu) for name, gpus in self._order for gpu in range(gpus)]
            placed = tuple(
                (names, tuple(gpu_slots[rank] for rank in group_ranks))
                for names, group_ranks in zip(named, ranks, strict=True)
            )
        predicted = finite(event.get("predicted_s"))
        if costs and all(cost == UNMEASURED_S for cost in costs.values()):
            predicted = None  # the costs only stand for unknown ones
        iteration = whole(event.get("iteration")) or 1
        return ReportPlan(len(self.plans), as_text(event.get("why")), iteration, t_s, words, predicted, placed, costs)

    def _make_room(self, gpus: int) -> None:
        """Nobody said which nodes there are, or too few: the ranks of a plan are GPUs all the same."""
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
            self._happened(t_s, "nodes", "lost", f"node {name} is gone{gpus_of(node.gpus, node.kind)}", strong=True)
        for name, gpus, kind in listed:
            if name in known:
                known[name].gpus = max(known[name].gpus, gpus)
            else:
                known[name] = ReportNode(name, gpus, kind)
                self.nodes.append(known[name])
            if name not in present:
                known[name].presence.append((0.0 if first else t_s, None))
                if not first:
                    self._happened(t_s, "nodes", "joined", f"node {name} joined{gpus_of(gpus, kind)}", strong=True)
        self._order = [(name, gpus) for name, gpus, _ in listed]
        if leaving:
            who = f"node {leaving[0]}" if len(leaving) == 1 else f"nodes {', '.join(leaving)}"
            self._happened(t_s, "nodes", "draining", f"{who} will go{time_left(event)}", strong=True)
        if why == "quota":
            self._happened(t_s, "nodes", "quota", f"the quota is now {counted(sum(g for _, g, _ in listed), 'GPU')}")

    def _take_iteration(self, event: Mapping[str, Any]) -> None:
        iteration = decode(Iteration, event["iteration"])
        raw = [(str(name), str(doing), float(start), float(end)) for name, doing, start, end in event.get("bars") or ()]
        if not all(math.isfinite(start) and math.isfinite(end) and start <= end for _, _, start, end in raw):
            raise ValueError("a bar that is no stretch of time")
        metrics = {
            str(name): {str(key): finite(value) for key, value in dict(values).items()}
            for name, values in dict(event.get("metrics") or {}).items()
        }
        here_s = finite(event.get("here_s")) or 0.0
        t_s = self._time(event, [start for _, _, start, _ in raw])
        number = iteration.number
        if number <= self._last:  # told again: what was before does not count
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
        self.done.append(ReportIteration(iteration, end_s, plan, metrics, here_s))
        self._last = max(self._last, number)

    def _take_saved(self, event: Mapping[str, Any]) -> None:
        iteration = int(event["iteration"])
        self._happened(self._time(event), "run", "saved", f"state saved after iteration {iteration}")

    def _take_ended(self, event: Mapping[str, Any]) -> None:
        state = str(event["state"])
        t_s = self._time(event)
        self.state, self.end_code, self.end_reason = state, as_text(event.get("code")), as_text(event.get("reason"))
        self._happened(t_s, "run", "ended", f"the run ended: {state}", code=self.end_code, reason=self.end_reason)

    def _take_decided(self, event: Mapping[str, Any]) -> None:
        what, numbers = str(event["what"]), dict(event.get("numbers") or {})
        plan = event.get("plan")
        words = as_text(plan.get("plan")) if isinstance(plan, Mapping) else as_text(plan)
        code, reason = as_text(event.get("code")), as_text(event.get("reason"))
        t_s = self._time(event)
        self.decisions.append(
            ReportDecision(t_s, whole(event.get("iteration")) or 0, what, code, reason, numbers, words)
        )
        if what not in ("stay", "advised"):  # advised: what was told before still stands
            to = f": {words}" if words else ""
            self._happened(t_s, "moves", "advice", f"advice{to}", code=code, reason=reason)

    def _take_move(self, event: Mapping[str, Any]) -> None:
        number, state = int(event["move"]), str(event["state"])
        took_s = finite(event.get("took_s")) or 0.0
        open_one = next((move for move in reversed(self.moves) if move.id == number and move.is_open), None)
        if state == "begun" or open_one is None:
            begun = self._begun(event, number)
            self.moves.append(begun)
            open_one = begun
            how = " (it has to be)" if begun.forced else ""
            title = f"move {number}{how}: {begun.before or '?'} → {begun.after or '?'}"
            self._happened(begun.began_s, "moves", "move", title, code=begun.code, reason=begun.reason, strong=True)
        t_s = self._time(event)
        open_one.ended_s = None  # one that was broken off is told on
        code, reason = as_text(event.get("code")), as_text(event.get("reason"))
        open_one.state = state if state != "stage" else open_one.state
        if state == "stage" and event.get("stage"):
            name = str(event["stage"])
            kept = [stage for stage in open_one.stages if stage[0] != name]
            open_one.stages = [*kept, (name, t_s, took_s)]
        elif state == "rolling back":
            open_one.outcome = reason
            self._happened(t_s, "moves", "rollback", f"move {number} goes back", code=code, reason=reason)
        elif state in ("arrived", "rolled back", "stuck"):
            open_one.ended_s = t_s
            open_one.rollback_s = took_s if state == "rolled back" else 0.0
            open_one.outcome = open_one.outcome or (reason if state != "arrived" else "")
            kind = {"arrived": "arrived", "rolled back": "rollback"}.get(state, "lost")
            title = {"arrived": "is done", "rolled back": "was rolled back", "stuck": "is stuck"}[state]
            strong = state != "arrived"
            self._happened(t_s, "moves", kind, f"move {number} {title}", code=code, reason=reason, strong=strong)

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
            # Ranks count through the nodes of now, also if others come and go before the move is over.
            target = self._plan(plan, move.began_s)
            self._targets = {json.dumps(plan["groups"]): target.groups}
            move.after, move.predicted_s = target.words, target.predicted_s
        return move

    def _take_range(self, event: Mapping[str, Any]) -> None:
        component, least, most = str(event["component"]), int(event["least"]), int(event["most"])
        words = f"{component} may have {least} to {most} GPUs" if least != most else f"{component} has {least} GPUs"
        self._happened(self._time(event), "workers", "range", words)

    def _take_told(self, event: Mapping[str, Any]) -> None:
        reason = as_text(event["reason"])
        lane = "" if event.get("code") in _MARKED_ALREADY else "run"
        self._happened(self._time(event), lane, "told", reason or "told", code=event.get("code"))

    def _take_task(self, event: Mapping[str, Any]) -> None:
        task, what = str(event["task"]), str(event["what"])
        pool = as_text(event.get("pool"))
        title = f"{task}{f' ({pool})' if pool and pool != task else ''}: {what}"
        strong = what in ("evicted", "preempted")
        kind = "evicted" if strong else "task"
        self._happened(
            self._time(event), "tasks", kind, title, code=event.get("code"), reason=event.get("reason"), strong=strong
        )

    def _take_worker(self, event: Mapping[str, Any]) -> None:
        component, worker, state = str(event["component"]), str(event["worker"]), str(event["state"])
        is_up = state not in _WORKER_GONE
        was_up = self._up.get((component, worker), False)
        self._up[component, worker] = is_up
        kind = "worker" if is_up else "left"
        # Between coming and going, states change with every weight sync: those are listed, not marked.
        lane = "workers" if is_up != was_up else ""
        title = f"{component}: worker {worker} {state}"
        self._happened(self._time(event), lane, kind, title, code=event.get("code"), reason=event.get("reason"))


def read_story(folder: Path) -> RunStory:
    """The story of the run in a folder. InputError where there is none; changes nothing."""
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
        raise InputError(f"it cannot be read: {fault.strerror or fault}", where=str(path)) from None
    story = RunStory()
    for number, line in _lines(data):
        try:
            story.take(read_event(line))
        except ODD:  # noqa: PERF203
            story.unparsed_lines.append(number)
    if story.unparsed_lines and len(story.unparsed_lines) >= data.count(b"\n"):
        raise InputError("no line of it can be understood", where=str(path), hint="is it the folder of a run?")
    return story


def _lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Whole lines with their numbers; what a crash, or a run that is writing, left half-written goes."""
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        yield number, line.decode("utf-8", "replace")
