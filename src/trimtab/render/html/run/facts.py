"""The nouns of a run's story, and how its plain facts are read.

Frozen where they do not grow. They know nothing of files or pictures: `run_report_story` makes them from events, the
report and its pictures read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.model.run import Iteration
from trimtab.render.html.kit.labels import counted

GpuKey = tuple[str, int]
"""A node, and a GPU of it."""

MOVE_INTERRUPTED = "broken off"
"""The state of a move that was under way when the run was resumed, until somebody says what became of it."""

_MOST_GPUS = 100_000


@dataclass(frozen=True)
class ReportPlan:
    """A plan that ran, and from when. `groups` are components with the seats that they take turns on."""

    number: int
    why: str
    iteration: int
    t_s: float
    words: str
    predicted_s: float | None  # None: nothing was known of its costs
    groups: tuple[tuple[tuple[str, ...], tuple[GpuKey, ...]], ...]
    costs_s: Mapping[str, float]

    def gpu_slots(self, component: str) -> tuple[GpuKey, ...]:
        """Where a component is; nowhere for one on CPUs."""
        return next((gpu_slots for names, gpu_slots in self.groups if component in names), ())


@dataclass(frozen=True)
class ReportBar:
    """A stretch of a component under a plan, on its first `gpus` seats (0: all of its group)."""

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
    """An iteration that is over. Void ones were run again."""

    iteration: Iteration
    end_s: float
    plan: int
    metrics: Mapping[str, Mapping[str, float | None]]
    here_s: float
    void: bool = False


@dataclass
class ReportMigration:
    """A move from its beginning to wherever it came."""

    id: int
    iteration: int
    began_s: float
    state: str = "begun"
    ended_s: float | None = None
    code: str = ""
    reason: str = ""
    outcome: str = ""  # why it went back, or got stuck
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
        """Whether more may be told of it."""
        return self.ended_s is None or self.state == MOVE_INTERRUPTED

    @property
    def cost_s(self) -> float:
        """What its stages took, the way back included."""
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
    """Something that happened beside the work, for the marks of the timeline and the list of events.

    `lane` is where it is drawn: run, moves, nodes, tasks or workers; without one it is only listed. A `strong` one goes
    through all rows.
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
    """A node and the times in which it was there; the last one is open as long as it is."""

    name: str
    gpus: int
    kind: str
    presence: list[tuple[float, float | None]] = field(default_factory=list)


def finite(value: Any) -> float | None:
    """A number, where it is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    """A whole number, where it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: Any) -> str:
    """Words, of whatever stands for them."""
    return "" if value is None else str(value)


def ranks_of(text: Any) -> tuple[int, ...]:
    """Ranks as plans write them: `0-3,6`."""
    found: list[int] = []
    for part in str(text).split(",") if str(text).strip() else ():
        first, _, last = part.strip().partition("-")
        ranks = range(int(first), int(last or first) + 1)
        if len(found) + len(ranks) > _MOST_GPUS:
            raise ValueError("more GPUs than there can be")
        found.extend(ranks)
    return tuple(found)


def gpus_of(count: int, kind: str) -> str:
    """What a node has, in brackets."""
    return f" ({counted(count, 'GPU')}{f', {kind}' if kind else ''})"


def time_left(event: Mapping[str, Any]) -> str:
    """How long is left; deadlines are stated on the clock of `at`, or on the run's own."""
    deadline = finite(event.get("deadline"))
    if deadline is None:
        return ""
    for clock in ("at", "t_s"):
        now = finite(event.get(clock))
        if now is not None and 0 <= deadline - now < 7 * 86400:
            return f" in {deadline - now:.0f} s"
    return ""
