"""The current state of a run, updated event by event: its tasks, workers and stories, and the timeline of open pages.

The story of the run is the report's own (`run.story`), so that both show the same; the board adds the subject of each
event. Pure. A malformed event is counted and left out. An increment of the timeline costs as much as is new, however
long the run is: the run may be in this very process. Where the past changed (void iterations, out-of-order events, a
component's first GPUs) everything is sent anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.ranks import ranks_text
from trimtab.model.run_events import ODD
from trimtab.render.html.kit.labels import counted, duration, gpus_words, known, reason_text, share
from trimtab.render.html.run.figures import ReportCost, costs, idle_shares, status_sentence
from trimtab.render.html.run.story import (
    ReportBar,
    ReportEvent,
    ReportMigration,
    ReportNode,
    RunStory,
    as_text,
    finite,
    whole,
)
from trimtab.render.html.run.timeline import LANES, RunChart, TimelineTrack, chart_data, legend, run_chart

Subject = tuple[str, str]
"""Kind (task, worker, node, component, move or mark) and name."""

OVER = ("done", "ended", "failed", "cancelled", "completed", "left", "gone")
RECENT = 200  # iterations that costs are computed from
BARS_EACH = 64  # maximum per iteration


@dataclass
class SubjectStatus:
    """A task or a worker: its state, and since when on the run's timeline."""

    name: str
    group: str  # the pool of a task, the component of a worker
    id: str = ""  # its id within its component
    state: str = ""
    since_s: float = 0.0
    code: str = ""
    reason: str = ""
    gpus: int | None = None
    running: int | None = None  # requests of a worker, where known
    limit: int | None = None  # maximum requests of a worker
    times: int = 0  # number of evictions or departures

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def load(self) -> str:
        """Requests of a worker; empty where unknown."""
        if self.running is None or self.is_over:
            return ""
        return str(self.running) if self.limit is None else f"{self.running} of {self.limit}"


@dataclass
class RunBoard:
    """The state of a run. Feed it with `take`."""

    story: RunStory = field(default_factory=RunStory)
    tasks: dict[str, SubjectStatus] = field(default_factory=dict)
    workers: dict[str, SubjectStatus] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    is_alive: bool | None = None  # whether the run's process is alive; None: unknown
    lines: int = 0
    _about: list[Subject | None] = field(default_factory=list)  # subject of each event
    _chapters: dict[Subject, list[int]] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any] | None) -> None:
        """Process an event; None stands for a malformed line."""
        self.lines += 1
        before = len(self.story.timeline_events)
        try:
            if event is None:
                raise ValueError("no event")
            self.story.take(event)
        except ODD:
            self.story.unparsed_lines.append(self.lines)
            return
        for at in range(before, len(self.story.timeline_events)):
            subjects = list(self._subjects(event, self.story.timeline_events[at]))
            self._about.append(subjects[0] if subjects else None)
            for subject in subjects:
                self._chapters.setdefault(subject, []).append(at)
        kind = event["event"]
        if kind == "cluster":
            self.leaving = tuple(map(str, event.get("leaving") or ()))
        elif kind in ("task", "worker") and len(self.story.timeline_events) > before:
            self._update_status(kind, event, self.story.timeline_events[-1])

    def _update_status(self, kind: str, event: Mapping[str, Any], timeline_event: ReportEvent) -> None:
        if kind == "task":
            name, group, state = str(event["task"]), as_text(event.get("pool")), str(event["what"])
        else:
            name, group, state = worker_name(event), str(event["component"]), str(event["state"])
        subjects = self.tasks if kind == "task" else self.workers
        status = subjects.setdefault(name, SubjectStatus(name, group, str(event.get("worker", name))))
        if timeline_event.t_s < status.since_s:  # late event: the known state is newer
            return
        gone = (
            state in ("evicted", "preempted")
            if kind == "task"
            else timeline_event.kind == "left" and bool(timeline_event.lane)
        )
        status.times += gone
        if state != status.state:
            status.since_s = timeline_event.t_s
        status.group, status.state, status.code, status.reason = (
            group or status.group,
            state,
            timeline_event.code,
            timeline_event.reason,
        )
        status.gpus = whole(event.get("gpus")) if "gpus" in event else status.gpus
        status.running = whole(event.get("running"))

    def load(self, component: str, loads: Mapping[str, tuple[int, int]]) -> bool:
        """Set the loads of a component's workers (empty: unknown); whether they changed."""
        changed = False
        for worker in self.workers.values():
            if worker.group == component and (loads or worker.limit is not None):
                now = loads.get(worker.id, (None, None))
                changed = changed or now != (worker.running, worker.limit)
                worker.running, worker.limit = now
        return changed

    def _subjects(self, event: Mapping[str, Any], timeline_event: ReportEvent) -> Iterator[Subject]:
        kind = event["event"]
        if kind == "task":
            yield "task", str(event["task"])
        elif kind == "worker":
            yield "worker", worker_name(event)
            yield "component", str(event["component"])
        elif kind == "move":
            yield "move", str(event["move"])
            if timeline_event.kind == "move":
                for change in event.get("changes") or ():
                    if change[1] != "stays":
                        yield "component", str(change[0])
        elif kind in ("lost", "range"):
            yield "component", as_text(event.get("component"))
        elif kind == "cluster" and timeline_event.kind == "draining":
            for name in event.get("leaving") or ():
                yield "node", str(name)
        elif kind == "cluster":
            named = [node.name for node in self.story.nodes if timeline_event.title.startswith(f"node {node.name} ")]
            if named:
                yield "node", max(named, key=len)

    @property
    def status_sentence(self) -> str:
        story = self.story
        if not story.events or story.state or story.is_advised or self.is_alive is None:
            return status_sentence(story)
        if self.is_alive:
            return "Running."
        return "It did not finish: its process is gone. `trimtab run --resume` continues it."

    @property
    def is_active(self) -> bool:
        """Whether the run accepts requests; assumed of a run on another machine."""
        return bool(self.lines) and not self.story.state and not self.story.is_advised and self.is_alive is not False

    # ---- queries -----------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> list[ReportCost]:
        """Cost and idle share of each component in the last iterations."""
        story = self.story
        done = story.done[-RECENT:]
        if len(story.done) > RECENT:
            numbers = {record.iteration.number for record in done}
            bars = story.bars[-RECENT * BARS_EACH :]
            story = replace(story, done=done, bars=[bar for bar in bars if bar.iteration in numbers])
        return costs(story, idle_shares(story))

    def is_present(self, node: ReportNode) -> bool:
        return bool(node.presence) and node.presence[-1][1] is None

    def on_node(self, name: str) -> dict[str, list[int]]:
        """Components that the current plan has on a node, with their GPUs there."""
        plan = self.story.plans[-1] if self.story.plans else None
        found: dict[str, list[int]] = {}
        for names, gpu_slots in plan.groups if plan is not None else ():
            gpus = [gpu for node, gpu in gpu_slots if node == name]
            if gpus:
                found.update(dict.fromkeys(names, gpus))
        return found

    def story_of(self, kind: str, name: str) -> dict[str, Any] | None:
        """A story for the page: title, facts, and chapters of time, what and why. None where it does not exist."""
        if kind == "mark":
            return self._mark(name)
        facts = (
            getattr(self, f"_{kind}_facts", None) if kind in ("task", "worker", "node", "component", "move") else None
        )
        found = facts(name) if facts is not None else None
        if found is None:
            return None
        chapters = [self.story.timeline_events[at] for at in self._chapters.get((kind, name), ())]
        return {
            "kind": kind,
            "name": name,
            "facts": [[word, value] for word, value in found if value],
            "chapters": [_chapter(event) for event in sorted(chapters, key=lambda event: event.t_s)],
        }

    def _mark(self, name: str) -> dict[str, Any] | None:
        at = int(name) if name.isdecimal() and len(name) < 9 else -1
        if not 0 <= at < len(self.story.timeline_events):
            return None
        subject = self._about[at]
        found = self.story_of(*subject) if subject is not None else None
        event = self.story.timeline_events[at]
        if found is None:
            return {"kind": "event", "name": event.title, "facts": [], "chapters": [_chapter(event)]}
        return {**found, "at": round(event.t_s, 6)}

    def _task_facts(self, name: str) -> list[tuple[str, str]] | None:
        task = self.tasks.get(name)
        if task is None:
            return None
        evicted = counted(task.times, "time") if task.times else ""
        return [
            *_status_facts(task),
            ("pool", task.group),
            ("GPUs", known(task.gpus, "{:g}".format, "")),
            ("evicted", evicted),
        ]

    def _worker_facts(self, name: str) -> list[tuple[str, str]] | None:
        worker = self.workers.get(name)
        if worker is None:
            return None
        gone = counted(worker.times, "time") if worker.times else ""
        return [*_status_facts(worker), ("component", worker.group), ("requests", worker.load), ("stopped", gone)]

    def _node_facts(self, name: str) -> list[tuple[str, str]] | None:
        node = next((node for node in self.story.nodes if node.name == name), None)
        if node is None:
            return None
        times = ", ".join(
            f"{duration(since)} to {duration(until) if until is not None else 'now'}" for since, until in node.presence
        )
        here = "; ".join(f"{component} on GPU {ranks_text(gpus)}" for component, gpus in self.on_node(name).items())
        state = "draining" if name in self.leaving else "present" if self.is_present(node) else "gone"
        return [
            ("state", state),
            ("has", gpus_words(node.gpus, node.kind)),
            ("present", times),
            ("runs", here if state != "gone" else ""),
        ]

    def _component_facts(self, name: str) -> list[tuple[str, str]] | None:
        cost = next((cost for cost in self.costs if cost.component == name), None)
        if cost is None:
            return None
        plan = self.story.plans[-1] if self.story.plans else None
        gpu_slots = plan.gpu_slots(name) if plan is not None else ()
        nodes = ", ".join(dict.fromkeys(node for node, _ in gpu_slots if node))
        return [
            ("runs on", f"{counted(len(gpu_slots), 'GPU')}{f' of {nodes}' if nodes else ''}" if gpu_slots else "CPUs"),
            ("own time", known(cost.busy_s, otherwise="")),
            ("planned", known(cost.predicted_s, otherwise="")),
            ("waits", known(cost.wait_s, otherwise="")),
            ("switch", known(cost.switch_s, otherwise="")),
            ("GPUs idle", known(cost.idle, share, "")),
            ("drift", known(cost.drift, "× {:.2f}".format, "")),
        ]

    def _move_facts(self, name: str) -> list[tuple[str, str]] | None:
        moves = [move for move in self.story.moves if str(move.id) == name]
        if not moves:
            return None
        move: ReportMigration = moves[-1]
        stages = ", ".join(f"{stage} {duration(took)}" for stage, _, took in move.stages)
        return [
            ("state", move.state + (", forced" if move.forced else "")),
            ("from", move.before),
            ("to", move.after),
            ("why", " ".join(filter(None, (f"{move.code}:" if move.code else "", move.reason)))),
            ("gain per iteration", known(finite(move.numbers.get("gain_s")), otherwise="")),
            ("stages", stages),
            ("took", duration(move.cost_s) if move.cost_s else ""),
            ("outcome", move.outcome),
        ]


def worker_name(event: Mapping[str, Any]) -> str:
    worker, component = str(event["worker"]), str(event["component"])
    return worker if worker.startswith(component) else f"{component} {worker}"


def _status_facts(status: SubjectStatus) -> list[tuple[str, str]]:
    why = reason_text(status.code, status.reason)
    return [("state", f"{status.state}, since {duration(status.since_s)}"), ("why", why)]


def _chapter(event: ReportEvent) -> list[str]:
    return [duration(event.t_s), event.title, reason_text(event.code, event.reason)]


_WHOLE = ("keys", "nodes", "cpu", "lanes", "moves", "open", "end")  # sent whole whenever they change


class LiveTimeline:
    """Follows one story."""

    def __init__(self, story: RunStory) -> None:
        self._story = story
        self._begin()

    def _begin(self) -> None:
        self._bars = self._story.bars  # replaced when the past changes, otherwise only appended to
        self._bar_count = self._mark_count = 0
        self._sent: dict[str, Any] = {"cpu": []}
        self._starts: dict[str, float] = {}  # of the last bar of each track
        self._looks: dict[tuple[str, str, bool], ReportBar] = {}
        self._kinds: dict[tuple[str, str], ReportEvent] = {}
        self.used_gpu_s = 0.0

    def whole(self) -> dict[str, Any]:
        data = chart_data(run_chart(self._story))
        _name(data, self._story.timeline_events, 0)
        return data

    def news(self) -> dict[str, Any]:
        """What to add since the last call; with `anew` it replaces everything."""
        story = self._story
        changed = story.bars is not self._bars or list(story.on_cpu) != self._sent["cpu"]
        message = None if changed and self._bar_count else self._added()
        if message is None:
            self._begin()
            message = {**(self._added() or {}), "anew": True}
        return message

    def _added(self) -> dict[str, Any] | None:
        """The increment; None where it does not come after what was sent."""
        story = self._story
        bars, marks = story.bars[self._bar_count :], story.timeline_events[self._mark_count :]
        chart = run_chart(replace(story, bars=bars, timeline_events=marks))
        data = chart_data(chart)
        starts = {str(track["rows"]): track["bars"] for track in data["tracks"]}
        if any(found[0] < self._starts.get(rows, 0.0) for rows, found in starts.items()):
            return None
        _name(data, marks, self._mark_count)
        self._starts.update({rows: found[-5] for rows, found in starts.items()})
        self._looks.update({(bar.component, bar.doing, bar.void): bar for bar in bars})
        for mark in marks:
            self._kinds.setdefault((mark.lane, mark.kind), mark)
        self._bar_count, self._mark_count = len(story.bars), len(story.timeline_events)
        self.used_gpu_s += chart.used_gpu_s
        used = {lane for lane, _ in self._kinds}
        data["lanes"] = [[lane, words] for lane, words in LANES.items() if lane in used]
        message = {name: data[name] for name in _WHOLE if self._sent.get(name) != data[name]}
        if not self._sent.get("keys"):
            message["shapes"] = data["shapes"]
        self._sent = {name: data[name] for name in _WHOLE}
        return message | {name: data[name] for name in ("tracks", "marks") if data[name]}

    @property
    def available_gpu_s(self) -> float:
        return self._small().available_gpu_s

    @property
    def legend(self) -> str:
        return legend(self._small()) if self._story.components or self._kinds else ""

    def _small(self) -> RunChart:
        """A chart with one bar and one mark of each kind."""
        story = self._story
        tracks = (TimelineTrack(((0, 0, 0),), tuple(self._looks.values())),)
        kinds = tuple(self._kinds.values())
        return RunChart(story.components, tuple(story.nodes), story.on_cpu, tracks, kinds, (), story.end_s)


def _name(data: Mapping[str, Any], timeline_events: list[ReportEvent], first: int) -> None:
    """Give marks stable numbers: the order in which they arrived."""
    order = sorted(range(len(timeline_events)), key=lambda at: timeline_events[at].t_s)
    for mark in data["marks"]:
        mark[6] = first + order[mark[6]]
