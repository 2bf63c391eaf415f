"""The records of a run's story, and parsing of plain values.

Independent of files and pictures: `story` makes them from events, the report and its pictures read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.numbers import is_number, is_whole
from trimtab.core.ranks import rank_range
from trimtab.model.run import Iteration
from trimtab.render.html.kit.labels import counted

GpuKey = tuple[str, int]
"""Node name and GPU index."""

MOVE_INTERRUPTED = "interrupted"
"""The state of a move that was in progress when the run was resumed, until an event gives its result."""

_MAX_GPUS = 100_000


@dataclass(frozen=True)
class ReportPlan:
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


@dataclass(frozen=True)
class ReportBar:
    """A bar of a component under a plan, on its first `gpus` slots (0: all of its group)."""

    component: str
    doing: str
    start: float
    end: float
    iteration: int
    plan: int
    gpus: int = 0
    void: bool = False


@dataclass(frozen=True)
class ReportIteration:
    """A finished iteration. Void ones were run again."""

    iteration: Iteration
    end_s: float
    plan: int
    metrics: Mapping[str, Mapping[str, float | None]]
    here_s: float
    void: bool = False


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

    @property
    def is_open(self) -> bool:
        """Whether more events may follow."""
        return self.ended_s is None or self.state == MOVE_INTERRUPTED

    @property
    def cost_s(self) -> float:
        """Time of its stages, rollback included."""
        return sum(took for _, _, took in self.stages) + self.rollback_s


@dataclass(frozen=True)
class ReportDecision:
    """A decision to stay, or advice."""

    t_s: float
    iteration: int
    what: str
    code: str
    reason: str
    numbers: Mapping[str, Any]
    plan: str = ""


@dataclass(frozen=True)
class ReportEvent:
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
