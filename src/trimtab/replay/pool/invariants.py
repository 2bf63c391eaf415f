"""Invariants of a simulated cluster, checked on every event, independent of the scheduler's own state.

Keeps its own state of nodes, placement groups and task processes. Must never happen: more GPUs of a node held or used
than it has; two running attempts of a task; a task that runs after its end, or ends twice; a process in a group that is
not ready; a group removed under a process; a task lost. The cost of a check does not depend on the size of the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.core.resources import GRAIN
from trimtab.machines.pool.events import CreatePlacementGroup, StartTask


class InvariantError(AssertionError):
    """An invariant was violated in a simulation."""


@dataclass
class _Node:
    units: int  # GPU units, ten-thousandths of a GPU
    held: int = 0  # by placement groups
    used: int = 0  # by processes


@dataclass
class _Process:
    attempt: int
    places: tuple[tuple[str, _Node, int], ...]  # group, node, units


@dataclass
class _Group:
    nodes: list[tuple[_Node, int]]
    ready: bool = False
    processes: int = 0


@dataclass
class PoolInvariants:
    """The observed state of a simulated cluster."""

    nodes: dict[str, _Node] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)
    processes: dict[str, _Process] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)  # by submitted task that has not ended: the last attempt
    submitted: int = 0
    done: int = 0
    looks: int = 0  # checks made

    def node_joined(self, node: str, gpus: float) -> None:
        self.nodes[node] = _Node(round(gpus * GRAIN))

    def node_lost(self, node: str) -> None:
        """A node is lost. Its groups and processes hold nothing of a later node of that name."""
        self.nodes.pop(node, None)

    def group_creating(self, instruction: CreatePlacementGroup) -> None:
        """A placement group was requested: from now on it may exist."""
        self.looks += 1
        if instruction.group in self.groups:
            raise InvariantError(f"group {instruction.group} is created twice")
        group = self.groups[instruction.group] = _Group([])
        for name, bundle in zip(instruction.nodes, instruction.bundles, strict=True):
            node = self.nodes.get(name)
            if node is None:
                raise InvariantError(f"group {instruction.group} is placed on {name}, which does not exist")
            units = bundle.get("gpu")
            node.held += units
            group.nodes.append((node, units))
            if node.held > node.units:
                raise InvariantError(f"groups hold {node.held / GRAIN:g} of {node.units / GRAIN:g} GPUs of {name}")

    def group_ready(self, name: str) -> None:
        self.groups[name].ready = True

    def group_removed(self, name: str) -> None:
        group = self.groups.pop(name)
        for node, units in group.nodes:
            node.held -= units

    def group_removing(self, name: str) -> None:
        """Removal was requested: no process may be in the group."""
        group = self.groups.get(name)
        if group is not None and group.processes:
            raise InvariantError(f"group {name} is removed under a process")

    def task_submitted(self, task: str) -> None:
        if task in self.attempts:
            raise InvariantError(f"{task} was submitted twice")
        self.submitted += 1
        self.attempts[task] = 0

    def task_starting(self, instruction: StartTask, units: tuple[int, ...]) -> None:
        """Processes of a task are started."""
        self.looks += 1
        before = self.attempts.get(instruction.task)
        if before is None:
            raise InvariantError(f"{instruction.task} is started, but has ended or was never submitted")
        if instruction.task in self.processes:
            raise InvariantError(f"{instruction.task} is started, but already runs")
        if instruction.attempt <= before:
            raise InvariantError(f"attempt {instruction.attempt} of {instruction.task} starts after attempt {before}")
        if len(instruction.places) != len(units):
            raise InvariantError(f"{instruction.task} starts with {len(instruction.places)} of {len(units)} workers")
        self.attempts[instruction.task] = instruction.attempt
        places = []
        for place, many in zip(instruction.places, units, strict=True):
            node, group = self.nodes.get(place.node), self.groups.get(place.group)
            if node is None or group is None or not group.ready:
                raise InvariantError(f"{instruction.task} starts in {place.group} on {place.node}, which is not ready")
            node.used += many
            group.processes += 1
            places.append((place.group, node, many))
            if node.used > node.units:
                raise InvariantError(
                    f"processes use {node.used / GRAIN:g} of {node.units / GRAIN:g} GPUs of {place.node}"
                )
        self.processes[instruction.task] = _Process(instruction.attempt, tuple(places))

    def task_stopped(self, task: str) -> None:
        """All processes of the task have exited."""
        self.looks += 1
        process = self.processes.pop(task, None)
        if process is None:
            raise InvariantError(f"{task} stops, but does not run")
        for name, node, many in process.places:
            node.used -= many
            group = self.groups.get(name)
            if group is not None:
                group.processes -= 1

    def task_ended(self, task: str) -> None:
        if self.attempts.pop(task, None) is None:
            raise InvariantError(f"{task} ends twice")
        self.done += 1

    def check_totals(self) -> None:
        """Every submitted task has ended or is known; totals equal the sum of their parts."""
        if self.submitted != self.done + len(self.attempts):
            raise InvariantError(
                f"{self.submitted} tasks were submitted, {self.done} ended, {len(self.attempts)} are known"
            )
        for name, node in self.nodes.items():
            used = sum(m for process in self.processes.values() for _, at, m in process.places if at is node)
            if used != node.used:
                raise InvariantError(f"processes use {used} units of {name}, {node.used} are recorded")
