"""What must be true in a simulated cluster, looked at with every event; it believes nothing that a scheduler says.

It keeps books of its own of what exists: nodes, placement groups on them, processes of tasks. What must never happen:
more GPUs of a node held or used than it has; two lives of a task at once; a task that runs again after its end, or ends
twice; a process in a group that does not stand; a group removed under a process; a task lost. Each look costs the same
however large the cluster is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.core.resources import GRAIN
from trimtab.machines.pool.events import CreatePlacementGroup, StartTask


class InvariantError(AssertionError):
    """Something that must never happen has happened in a simulation."""


@dataclass
class _Node:
    units: int  # of GPU, in ten-thousandths
    held: int = 0  # by groups
    used: int = 0  # by processes


@dataclass
class _Process:
    attempt: int
    places: tuple[tuple[str, _Node, int], ...]  # group, node, units


@dataclass
class _Group:
    nodes: list[tuple[_Node, int]]
    standing: bool = False
    processes: int = 0


@dataclass
class PoolInvariants:
    """The books of a simulated cluster."""

    nodes: dict[str, _Node] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)
    processes: dict[str, _Process] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)  # by task that was submitted and has not ended: the last one
    submitted: int = 0
    done: int = 0
    looks: int = 0

    # ---- nodes ----

    def joined(self, node: str, gpus: float) -> None:
        """A node is there."""
        self.nodes[node] = _Node(round(gpus * GRAIN))

    def lost(self, node: str) -> None:
        """A node is gone. What was on it holds nothing of a node of that name that comes later."""
        self.nodes.pop(node, None)

    # ---- groups ----

    def making(self, one: CreatePlacementGroup) -> None:
        """A placement group is asked for: from now on it may exist."""
        self.looks += 1
        if one.group in self.groups:
            raise InvariantError(f"group {one.group} is made twice")
        group = self.groups[one.group] = _Group([])
        for name, bundle in zip(one.nodes, one.bundles, strict=True):
            node = self.nodes.get(name)
            if node is None:
                raise InvariantError(f"group {one.group} goes to {name}, which is not there")
            units = bundle.get("gpu")
            node.held += units
            group.nodes.append((node, units))
            if node.held > node.units:
                raise InvariantError(f"groups hold {node.held / GRAIN:g} of {node.units / GRAIN:g} GPUs of {name}")

    def standing(self, name: str) -> None:
        """The group stands."""
        self.groups[name].standing = True

    def gone(self, name: str) -> None:
        """The group is gone."""
        group = self.groups.pop(name)
        for node, units in group.nodes:
            node.held -= units

    def removing(self, name: str) -> None:
        """The group is to go: nobody may be in it."""
        group = self.groups.get(name)
        if group is not None and group.processes:
            raise InvariantError(f"group {name} is removed under a process")

    # ---- tasks ----

    def came(self, task: str) -> None:
        """A task was submitted."""
        if task in self.attempts:
            raise InvariantError(f"{task} is submitted twice")
        self.submitted += 1
        self.attempts[task] = 0

    def starting(self, one: StartTask, units: tuple[int, ...]) -> None:
        """Processes of a task are made."""
        self.looks += 1
        before = self.attempts.get(one.task)
        if before is None:
            raise InvariantError(f"{one.task} is started, and has ended or never came")
        if one.task in self.processes:
            raise InvariantError(f"{one.task} is started, and runs already")
        if one.attempt <= before:
            raise InvariantError(f"start {one.attempt} of {one.task} comes after start {before}")
        if len(one.places) != len(units):
            raise InvariantError(f"{one.task} starts with {len(one.places)} of {len(units)} members")
        self.attempts[one.task] = one.attempt
        places = []
        for place, many in zip(one.places, units, strict=True):
            node, group = self.nodes.get(place.node), self.groups.get(place.group)
            if node is None or group is None or not group.standing:
                raise InvariantError(f"{one.task} starts in {place.group} on {place.node}, which does not stand")
            node.used += many
            group.processes += 1
            places.append((place.group, node, many))
            if node.used > node.units:
                raise InvariantError(
                    f"processes use {node.used / GRAIN:g} of {node.units / GRAIN:g} GPUs of {place.node}"
                )
        self.processes[one.task] = _Process(one.attempt, tuple(places))

    def stopped(self, task: str) -> None:
        """Nothing of the task is left."""
        self.looks += 1
        process = self.processes.pop(task, None)
        if process is None:
            raise InvariantError(f"{task} stops, and does not run")
        for name, node, many in process.places:
            node.used -= many
            group = self.groups.get(name)
            if group is not None:
                group.processes -= 1

    def ended(self, task: str) -> None:
        """The task has done its work and is gone."""
        if self.attempts.pop(task, None) is None:
            raise InvariantError(f"{task} ends twice")
        self.done += 1

    def whole(self) -> None:
        """Every task that came has ended or is still there; sums are what their parts say."""
        if self.submitted != self.done + len(self.attempts):
            raise InvariantError(f"{self.submitted} tasks came, {self.done} ended, {len(self.attempts)} are there")
        for name, node in self.nodes.items():
            used = sum(m for one in self.processes.values() for _, at, m in one.places if at is node)
            if used != node.used:
                raise InvariantError(f"processes use {used} units of {name}, the books say {node.used}")
