"""What an elastic group reports: step results, log entries, and facts for status and metrics.

Counts and remembers; decides nothing. The facts are plain data, which the controller shows and turns into metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason
from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.elastic.events import WaitForMembers
from trimtab.model.nodes import ElasticSpec, NodeState, NodeView, World

STORY_KEPT = 50


class GroupLogEntry(Frozen):
    """One event of a group.

    Kinds: found (a node present at the start), joined, draining, node lost, node left; started, lost, left (of a
    member); world, step (begun), redone, waits, gave up.
    """

    kind: str
    sentence: str
    member: str = ""
    node: str = ""
    reason: Reason | None = None
    at: float = 0.0  # by the controller's clock
    step: int = 0  # complete steps then; of a step: its number
    task: str = ""  # of a started member: its task
    size: int = 0  # of a world or a step: the number of members
    total: Resources = NOTHING  # of a node: its resources

    def __str__(self) -> str:
        return self.sentence


class StepResult(Frozen):
    """A complete step: every member of the world has committed it."""

    number: int  # 1, 2, 3 ...
    world: World
    values: tuple[Any, ...]  # by rank: what `commit` returned (`compute` without a commit); None: lost since
    compute_s: tuple[float, ...]  # by rank
    commit_s: tuple[float, ...]  # by rank; empty without a commit
    seconds: float  # from the first call to the last answer, of the attempt that counts
    waited_s: float = 0.0  # before that: for members, a new world, failed attempts
    redone: int = 0  # failed attempts before
    changes: tuple[GroupLogEntry, ...] = ()  # since the previous step

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def combined(self) -> Any:
        """The mean over ranks if values are numbers (or objects or mappings of numbers: by name); else None."""
        return _mean([value for value in self.values if value is not None])


class GroupStats:
    """Counters and recent events of a group."""

    def __init__(self) -> None:
        self.wanted = 0
        self.redone = 0
        self._joined_at: dict[str, float] = {}  # nodes that joined and have not taken part in a step yet
        self._began = False
        self._at_start: set[str] = set()  # nodes of the first update, announced or not yet
        self._join_to_step_s: list[float] = []
        self._drain_lead_s: list[float] = []
        self._story: list[dict[str, Any]] = []

    def start(self, nodes: Iterable[str]) -> None:
        """Nodes present before the group: they do not join, even if they are announced later."""
        if not self._began:
            self._at_start = set(nodes)
            self._began = bool(self._at_start)

    def nodes(
        self, before: Mapping[str, NodeView], after: Mapping[str, NodeView], now: float, unit: Resources
    ) -> Iterator[GroupLogEntry]:
        """Events of nodes that could hold members."""
        for node, view in after.items():
            total = view.facts.total
            if not unit.within(total):
                continue
            had = before.get(node)
            if had is None and node in self._at_start:
                yield GroupLogEntry("found", f"node {node[:12]} has {total}", node=node, total=total)
            elif had is None:
                self._joined_at[node] = view.since
                yield GroupLogEntry(
                    "joined", f"node {node[:12]} joined with {total}", "", node, view.reason, total=total
                )
            if view.state is NodeState.draining and (had is None or had.state is not NodeState.draining):
                left = "" if view.deadline is None else f" in {view.deadline - now:.0f} s"
                sentence = f"node {node[:12]} will go{left}: {view.reason.sentence}"
                yield GroupLogEntry("draining", sentence, "", node, view.reason)
        for node, had in before.items():
            if node not in after and unit.within(had.facts.total):
                self._joined_at.pop(node, None)
                self._at_start.discard(node)
                gone = "node left" if had.state is NodeState.draining else "node lost"
                yield GroupLogEntry(gone, f"node {node[:12]} is gone", node=node)

    def stepped(self, world: World, now: float) -> None:
        """A step is complete: nodes that had joined have worked for the first time."""
        for node in world.nodes:
            if node in self._joined_at:
                self._join_to_step_s.append(now - self._joined_at.pop(node))

    def left(self, node: NodeView | None, now: float) -> None:
        """A member has left its node, which may be draining."""
        if node is not None and node.state is NodeState.draining and node.deadline is not None:
            self._drain_lead_s.append(node.deadline - now)

    def record(self, entry: GroupLogEntry) -> None:
        code = entry.reason.code.value if entry.reason else ""
        self._story.append({"at": entry.at, "state": entry.kind, "code": code, "sentence": entry.sentence})
        del self._story[:-STORY_KEPT]

    def observed(self) -> dict[str, list[float]]:
        """Measurements since the last call."""
        joins, self._join_to_step_s = self._join_to_step_s, []
        leads, self._drain_lead_s = self._drain_lead_s, []
        return {"join_to_step_s": joins, "drain_lead_s": leads}

    def facts(
        self,
        seen: Mapping[str, Any],
        spec: ElasticSpec,
        pool: str,
        wait: WaitForMembers | None,
        gave_up: Reason | None,
        now: float,
    ) -> dict[str, Any]:
        reason = gave_up or (wait.reason if wait else None)
        return {
            **seen,
            "pool": pool,
            "state": "gave up" if gave_up else "waiting" if wait else "working" if seen["epoch"] else "starting",
            "reason": {"code": reason.code.value, "sentence": reason.sentence} if reason else None,
            "deadline": wait.deadline if wait and not gave_up else None,
            "unit": spec.unit.floats(),
            "story": list(self._story),
            "time": now,
        }


def _mean(values: list[Any]) -> Any:
    if not values:
        return None
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return math.fsum(values) / len(values)
    fields = [value if isinstance(value, Mapping) else getattr(value, "__dict__", None) for value in values]
    if any(not mapping for mapping in fields):
        return None
    found = {name: _mean([mapping.get(name) for mapping in fields if mapping]) for name in fields[0] or ()}
    return {name: value for name, value in found.items() if value is not None} or None
