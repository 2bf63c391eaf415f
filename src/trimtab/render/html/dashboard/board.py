"""A run as it stands, kept up to date event by event, and the stories of whoever takes part in it.

The story of the run is the report's own (`run_report_story`), so that both show the same; here stands besides who each
event was about: a task, a rollout worker, a node, a component or a move. Nothing is read or drawn here, an odd event is
counted and left out, and nothing that was understood is ever forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.ranks import ranks_text
from trimtab.model.run_events import ODD
from trimtab.render.html.kit.labels import counted, duration, share
from trimtab.render.html.run.facts import ReportEvent, ReportMigration, ReportNode, as_text, whole
from trimtab.render.html.run.figures import ReportCost, costs, idle_shares
from trimtab.render.html.run.story import RunStory
from trimtab.render.html.run.summary import status_sentence

Subject = tuple[str, str]
"""What a story is of: task, worker, node, component, move or mark, and its name."""

OVER = ("done", "ended", "failed", "cancelled", "completed", "left", "gone")
RECENT = 200  # iterations that costs are told of
BARS_EACH = 64  # at most, of an iteration


@dataclass
class SubjectStatus:
    """A task or a worker: how it stands, and since when on the run's timeline."""

    name: str
    group: str  # the pool of a task, the component of a worker
    id: str = ""  # what its component calls it
    state: str = ""
    since_s: float = 0.0
    code: str = ""
    reason: str = ""
    gpus: int | None = None
    running: int | None = None  # requests that a worker has, where it says so
    limit: int | None = None  # and how many it takes at most
    times: int = 0  # evicted, or gone

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.state in OVER

    @property
    def load(self) -> str:
        """What a worker has to do, in words; empty where nobody knows."""
        if self.running is None or self.is_over:
            return ""
        return str(self.running) if self.limit is None else f"{self.running} of {self.limit}"


@dataclass
class RunBoard:
    """Everything that is known of a run. Feed it with `take`."""

    story: RunStory = field(default_factory=RunStory)
    tasks: dict[str, SubjectStatus] = field(default_factory=dict)
    workers: dict[str, SubjectStatus] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    is_alive: bool | None = None  # whether the run's process is there, where that is known
    lines: int = 0
    _about: list[Subject | None] = field(default_factory=list)  # whom each happening was about
    _chapters: dict[Subject, list[int]] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any] | None) -> None:
        """One event; None stands for a line that is none."""
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
            self._stands(kind, event, self.story.timeline_events[-1])

    def _stands(self, kind: str, event: Mapping[str, Any], happening: ReportEvent) -> None:
        if kind == "task":
            name, group, state = str(event["task"]), as_text(event.get("pool")), str(event["what"])
        else:
            name, group, state = worker_name(event), str(event["component"]), str(event["state"])
        known = self.tasks if kind == "task" else self.workers
        status = known.setdefault(name, SubjectStatus(name, group, str(event.get("worker", name))))
        if happening.t_s < status.since_s:  # told late: what is known is newer
            return
        gone = (
            state in ("evicted", "preempted") if kind == "task" else happening.kind == "left" and bool(happening.lane)
        )
        status.times += gone
        if state != status.state:
            status.since_s = happening.t_s
        status.group, status.state, status.code, status.reason = (
            group or status.group,
            state,
            happening.code,
            happening.reason,
        )
        status.gpus = whole(event.get("gpus")) if "gpus" in event else status.gpus
        status.running = whole(event.get("running"))

    def load(self, component: str, loads: Mapping[str, tuple[int, int]]) -> bool:
        """What a component's workers have to do now; whether that is news. Empty where nobody tells."""
        changed = False
        for worker in self.workers.values():
            if worker.group == component and (loads or worker.limit is not None):
                now = loads.get(worker.id, (None, None))
                changed = changed or now != (worker.running, worker.limit)
                worker.running, worker.limit = now
        return changed

    def _subjects(self, event: Mapping[str, Any], happening: ReportEvent) -> Iterator[Subject]:
        kind = event["event"]
        if kind == "task":
            yield "task", str(event["task"])
        elif kind == "worker":
            yield "worker", worker_name(event)
            yield "component", str(event["component"])
        elif kind == "move":
            yield "move", str(event["move"])
            if happening.kind == "move":
                for change in event.get("changes") or ():
                    if change[1] != "stays":
                        yield "component", str(change[0])
        elif kind in ("lost", "range"):
            yield "component", as_text(event.get("component"))
        elif kind == "cluster" and happening.kind == "draining":
            for name in event.get("leaving") or ():
                yield "node", str(name)
        elif kind == "cluster":
            named = [node.name for node in self.story.nodes if happening.title.startswith(f"node {node.name} ")]
            if named:
                yield "node", max(named, key=len)

    @property
    def status_sentence(self) -> str:
        """How it stands with the run, in a sentence."""
        story = self.story
        if not story.events or story.state or story.is_advised or self.is_alive is None:
            return status_sentence(story)
        if self.is_alive:
            return "It runs."
        return "It did not come to its end: its process is gone. `trimtab run --resume` goes on with it."

    @property
    def is_active(self) -> bool:
        """Whether there is a run that can be asked for something; of one on another machine it is believed."""
        return bool(self.lines) and not self.story.state and not self.story.is_advised and self.is_alive is not False

    # ---- asking ------------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> list[ReportCost]:
        """What each component cost in the last iterations, and how idle its GPUs were."""
        story = self.story
        done = story.done[-RECENT:]
        if len(story.done) > RECENT:
            numbers = {record.iteration.number for record in done}
            bars = story.bars[-RECENT * BARS_EACH :]
            story = replace(story, done=done, bars=[bar for bar in bars if bar.iteration in numbers])
        return costs(story, idle_shares(story))

    def is_there(self, node: ReportNode) -> bool:
        """Whether a node is there now."""
        return bool(node.presence) and node.presence[-1][1] is None

    def on_node(self, name: str) -> dict[str, list[int]]:
        """Components that the plan of now has on a node, with their GPUs of it."""
        plan = self.story.plans[-1] if self.story.plans else None
        found: dict[str, list[int]] = {}
        for names, gpu_slots in plan.groups if plan is not None else ():
            gpus = [gpu for node, gpu in gpu_slots if node == name]
            if gpus:
                found.update(dict.fromkeys(names, gpus))
        return found

    def subject_of(self, at: int) -> Subject | None:
        """Whom a happening was about, by its number."""
        return self._about[at] if 0 <= at < len(self._about) else None

    def story_of(self, kind: str, name: str) -> dict[str, Any] | None:
        """A story for the page: title, facts, and chapters of time, what and why. None where there is no such one."""
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
        return [*_standing(task), ("pool", task.group), ("GPUs", _number(task.gpus)), ("evicted", evicted)]

    def _worker_facts(self, name: str) -> list[tuple[str, str]] | None:
        worker = self.workers.get(name)
        if worker is None:
            return None
        gone = counted(worker.times, "time") if worker.times else ""
        return [*_standing(worker), ("component", worker.group), ("requests", worker.load), ("went", gone)]

    def _node_facts(self, name: str) -> list[tuple[str, str]] | None:
        node = next((node for node in self.story.nodes if node.name == name), None)
        if node is None:
            return None
        times = ", ".join(
            f"{duration(since)} to {duration(until) if until is not None else 'now'}" for since, until in node.presence
        )
        here = "; ".join(f"{component} on GPU {ranks_text(gpus)}" for component, gpus in self.on_node(name).items())
        state = "will go" if name in self.leaving else "there" if self.is_there(node) else "gone"
        has = f"{node.gpus} × {node.kind}" if node.kind else counted(node.gpus, "GPU")
        return [("state", state), ("has", has), ("there", times), ("runs", here if state != "gone" else "")]

    def _component_facts(self, name: str) -> list[tuple[str, str]] | None:
        cost = next((cost for cost in self.costs if cost.component == name), None)
        if cost is None:
            return None
        plan = self.story.plans[-1] if self.story.plans else None
        gpu_slots = plan.gpu_slots(name) if plan is not None else ()
        nodes = ", ".join(dict.fromkeys(node for node, _ in gpu_slots if node))
        return [
            ("runs on", f"{counted(len(gpu_slots), 'GPU')}{f' of {nodes}' if nodes else ''}" if gpu_slots else "CPUs"),
            ("own time", _seconds(cost.busy_s)),
            ("planned", _seconds(cost.predicted_s)),
            ("waits", _seconds(cost.wait_s)),
            ("switch", _seconds(cost.switch_s)),
            ("GPUs idle", share(cost.idle) if cost.idle is not None else ""),
            ("drift", f"× {cost.drift:.2f}" if cost.drift is not None else ""),
        ]

    def _move_facts(self, name: str) -> list[tuple[str, str]] | None:
        moves = [move for move in self.story.moves if str(move.id) == name]
        if not moves:
            return None
        move: ReportMigration = moves[-1]
        stages = ", ".join(f"{stage} {duration(took)}" for stage, _, took in move.stages)
        gain = move.numbers.get("gain_s")
        gain_text = duration(gain) if isinstance(gain, (int, float)) and not isinstance(gain, bool) else ""
        return [
            ("state", move.state + (", had to be" if move.forced else "")),
            ("from", move.before),
            ("to", move.after),
            ("why", " ".join(filter(None, (f"{move.code}:" if move.code else "", move.reason)))),
            ("gain per iteration", gain_text),
            ("stages", stages),
            ("took", duration(move.cost_s) if move.cost_s else ""),
            ("outcome", move.outcome),
        ]


def worker_name(event: Mapping[str, Any]) -> str:
    """A worker's name among those of all components."""
    worker, component = str(event["worker"]), str(event["component"])
    return worker if worker.startswith(component) else f"{component} {worker}"


def _standing(status: SubjectStatus) -> list[tuple[str, str]]:
    why = f"{status.code}: {status.reason}" if status.code and status.reason else status.code or status.reason
    return [("state", f"{status.state}, since {duration(status.since_s)}"), ("why", why)]


def _chapter(event: ReportEvent) -> list[str]:
    why = f"{event.code}: {event.reason}" if event.code and event.reason else event.code or event.reason
    return [duration(event.t_s), event.title, why]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)
