"""A run that is over, as a simulated job: what its folder says of costs, nodes and moves becomes the reality.

Costs: what each component took in each iteration, against its profile on the GPUs that it had. The middle of five
neighbours is its level, which an oracle may know; the rest is noise, which nobody may. Nodes: what happened to them,
before the iteration that came next. Moves: what stages took, where the run moved. Nothing is invented beyond the last
iteration that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.errors import InputError
from trimtab.formats.files import unreadable
from trimtab.machines.replan.estimates import profiled_seconds
from trimtab.model.run import Iteration, MigrationStage
from trimtab.model.run_events import ODD, check_plan, read_event
from trimtab.model.workflow import Cluster, Node, Workflow
from trimtab.replay.common.timing import Distribution
from trimtab.replay.replan.noise import PastNoise
from trimtab.replay.replan.reality import Drift, MigrationTimes, ScheduledNodeEvent

EVENTS, JOB = "events.jsonl", "job.yaml"
NEIGHBOURS = 2  # on each side
FEWEST = 5  # iterations


@dataclass(frozen=True)
class PastRunReality:
    """What a folder tells."""

    iterations: int
    drift: dict[str, Drift]
    noise: PastNoise
    moves: MigrationTimes
    cluster: Cluster | None
    events: tuple[ScheduledNodeEvent, ...]


@dataclass
class _FolderReader:
    """The events of a folder, one after another; what was run again takes the place of what was before."""

    workflow: Workflow
    levels: dict[int, dict[str, float]] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    first: Cluster | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    events: list[ScheduledNodeEvent] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    taken: int = 0

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "iteration":
            self._iteration(decode(Iteration, event["iteration"]))
        elif kind == "resumed":
            self.levels = {number: one for number, one in self.levels.items() if number <= int(event["after"])}
        elif kind == "plan":
            self.plan = check_plan(event)
        elif kind == "cluster":
            self._cluster(event)
        elif kind == "move" and event["state"] == "stage":
            self.stages.setdefault(event["stage"], []).append(float(event["took_s"]))
        self.taken += 1

    def _iteration(self, one: Iteration) -> None:
        kinds = {name: group["kind"] for group in self.plan["groups"] for name in group["components"]}
        found = {}
        for part in one.components:
            component = self.workflow.component(part.component)
            variant = self.plan.get("variants", {}).get(part.component, "")
            profiled = profiled_seconds(component, variant, kinds.get(part.component, ""), part.gpus)
            batches = part.batches or self.workflow.batches
            if profiled:
                found[part.component] = part.busy_s * self.workflow.batches / batches / profiled
        self.levels[one.number] = found

    def _cluster(self, event: dict[str, Any]) -> None:
        now = {name: Node(name, int(gpus), kind) for name, gpus, kind in event["nodes"]}
        leaving, number = set(event["leaving"]), max(self.levels, default=0) + 1
        if self.first is None:
            self.first = Cluster(tuple(now.values()))
        else:
            gone = [(node, "lost") for name, node in self.nodes.items() if name not in now]
            new = [(node, "joined") for name, node in now.items() if name not in self.nodes]
            for node, what in (*gone, *new):
                self.events.append(ScheduledNodeEvent(node, "lost" if what == "lost" else "joined", None, number))
            for name in leaving - self.leaving:
                notice = max(0.0, float(event["deadline"] or event["t_s"]) - float(event["t_s"]))
                self.events.append(ScheduledNodeEvent(now[name], "draining", None, number, notice))
        self.nodes, self.leaving = now, leaving


def read_past_run(folder: Path, workflow: Workflow) -> PastRunReality:
    """What the folder of a run tells of a workflow. InputError where it is none, or is not understood."""
    path = folder / EVENTS
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    reading = _FolderReader(workflow)
    try:
        for line in lines:
            reading.take(read_event(line))
    except (*ODD, StopIteration) as error:
        why = getattr(error, "what", error)
        raise InputError(f"the line cannot be understood: {why}", where=f"{path}, line {reading.taken + 1}") from None
    done = len(reading.levels)
    if done < FEWEST or sorted(reading.levels) != list(range(1, done + 1)):
        raise InputError(f"the run has {done} iterations that tell costs", where=str(folder), hint=f"{FEWEST} or more")
    drift, noise = {}, {}
    for name in workflow.names:
        levels = _whole([reading.levels[number].get(name) for number in range(1, done + 1)])
        middle = [median(levels[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]) for at in range(done)]
        drift[name] = Drift(points=tuple(enumerate(middle, 1)))
        noise[name] = tuple(level / one for level, one in zip(levels, middle, strict=True))
    return PastRunReality(
        done, drift, PastNoise(folder.name, noise), _moves(reading.stages), reading.first, tuple(reading.events)
    )


def _whole(levels: list[float | None]) -> list[float]:
    """The levels of all iterations: what was not measured is as before it, and at first as profiled."""
    found: list[float] = []
    for one in levels:
        found.append(one if one else found[-1] if found else 1.0)
    return found


def _moves(stages: Mapping[str, list[float]]) -> MigrationTimes:
    known = [stage.value for stage in MigrationStage if stage is not MigrationStage.drain and stage.value in stages]
    times: dict[str, Any] = {f"{stage}_s": Distribution(values=tuple(stages[stage])) for stage in known}
    return MigrationTimes(**times)
