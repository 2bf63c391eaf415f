"""A finished run as a simulated job: costs, nodes and migrations from its folder become the reality.

Costs: measured time of each component per iteration, relative to its profile on the GPUs it had. The median of five
neighbours is its level, which an oracle may know; the rest is noise, which no policy may know. Nodes: their events,
before the following iteration. Migrations: measured stage durations. Nothing is invented beyond the last measured
iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.files import unreadable
from trimtab.machines.replan.estimates import profiled_seconds
from trimtab.model.run import Iteration, MigrationStage
from trimtab.model.run_events import ODD, check_plan, read_event
from trimtab.model.workflow import Cluster, Node, Workflow
from trimtab.replay.common.timing import Distribution
from trimtab.replay.replan.reality import Drift, MigrationTimes, PastNoise, ScheduledNodeEvent

EVENTS, JOB = "events.jsonl", "job.yaml"
NEIGHBOURS = 2  # on each side
MIN_ITERATIONS = 5  # iterations


class PastRunReality(Frozen):
    """The reality recorded in a run folder."""

    iterations: int
    drift: dict[str, Drift]
    noise: PastNoise
    moves: MigrationTimes
    cluster: Cluster | None
    events: tuple[ScheduledNodeEvent, ...]


@dataclass
class _FolderReader:
    """Accumulates the events of a folder; iterations that were run again replace earlier ones."""

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
            self.levels = {number: levels for number, levels in self.levels.items() if number <= int(event["after"])}
        elif kind == "plan":
            self.plan = check_plan(event)
        elif kind == "cluster":
            self._cluster(event)
        elif kind == "move" and event["state"] == "stage":
            self.stages.setdefault(event["stage"], []).append(float(event["took_s"]))
        self.taken += 1

    def _iteration(self, iteration: Iteration) -> None:
        kinds = {name: group["kind"] for group in self.plan["groups"] for name in group["components"]}
        found = {}
        for part in iteration.components:
            component = self.workflow.component(part.component)
            variant = self.plan.get("variants", {}).get(part.component, "")
            profiled = profiled_seconds(component, variant, kinds.get(part.component, ""), part.gpus)
            batches = part.batches or self.workflow.batches
            if profiled:
                found[part.component] = part.busy_s * self.workflow.batches / batches / profiled
        self.levels[iteration.number] = found

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
    """Reads the folder of a run. Raises InputError if it is none or cannot be parsed."""
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
        raise InputError(f"the line cannot be parsed: {why}", where=f"{path}, line {reading.taken + 1}") from None
    done = len(reading.levels)
    if done < MIN_ITERATIONS or sorted(reading.levels) != list(range(1, done + 1)):
        raise InputError(
            f"the run has {done} iterations with costs", where=str(folder), hint=f"at least {MIN_ITERATIONS} are needed"
        )
    drift, noise = {}, {}
    for name in workflow.names:
        levels = _filled([reading.levels[number].get(name) for number in range(1, done + 1)])
        middle = [median(levels[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]) for at in range(done)]
        drift[name] = Drift(points=tuple(enumerate(middle, 1)))
        noise[name] = tuple(level / centre for level, centre in zip(levels, middle, strict=True))
    return PastRunReality(
        done, drift, PastNoise(folder.name, noise), _moves(reading.stages), reading.first, tuple(reading.events)
    )


def _filled(levels: list[float | None]) -> list[float]:
    """Levels of all iterations: unmeasured ones keep the last level, at first that of the profile."""
    found: list[float] = []
    for level in levels:
        found.append(level if level else found[-1] if found else 1.0)
    return found


def _moves(stages: Mapping[str, list[float]]) -> MigrationTimes:
    known = [stage.value for stage in MigrationStage if stage is not MigrationStage.drain and stage.value in stages]
    times: dict[str, Any] = {f"{stage}_s": Distribution(values=tuple(stages[stage])) for stage in known}
    return MigrationTimes(**times)
