"""State of the replan machine. Settings (the workflow, the rules) are not part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, StoryEntry
from trimtab.machines.replan.estimates import CostTrack
from trimtab.machines.replan.migration import MigrationState
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.workflow import Cluster


@dataclass
class PromisedGain:
    """Expected gain of the last migration: the plan before it, the expected share of an iteration, iteration times
    since.
    """

    move: int
    before: PlacedPlan
    share: float
    bias: float  # measured over predicted time before it
    walls: list[float] = field(default_factory=list)


@dataclass
class RunState:
    """The run, its cluster, and what was decided about its plan."""

    running: PlacedPlan  # its ranks refer to `cluster`, unless `lost` names some of its nodes
    cluster: Cluster  # all nodes, including leaving ones
    reference: dict[str, float]  # cost level of each component for which the plan was made
    now: float = 0.0
    done: int = 0  # iterations counted
    remaining: int | None = None
    leaving: tuple[str, ...] = ()
    leave_by: float | None = None
    lost: tuple[str, ...] = ()  # nodes of the plan that are gone, or were since it was applied
    cluster_change: str = ""  # how the cluster changed since the plan was made
    moved_at: int | None = None  # iterations counted when the last migration ended
    setbacks: int = 0  # consecutive migrations that failed or fell short
    bias: list[float] = field(default_factory=list)  # measured over predicted time under this plan, newest last
    walls: list[float] = field(default_factory=list)  # newest last
    switching: dict[str, float] = field(default_factory=dict)  # offload and onload of each component, as last measured
    switches: dict[str, list[float]] = field(default_factory=dict)  # of each component that took turns, newest last
    syncs: dict[str, list[float]] = field(default_factory=dict)  # on "shared" and "separate" GPUs, newest last
    overheads: dict[str, float] = field(default_factory=dict)  # switches and syncs that the model has now, if measured
    is_cold: bool = True  # the next iteration is the first after a standstill
    carried_bias: float = 1.0  # that of the plan before, until this plan has one
    kept: float = 1.0  # share of the promised gains that came, learned from judged migrations
    first: PlacedPlan | None = None  # the plan that the run began with
    first_bias: float = 1.0  # its measured over predicted time, when it was left
    used: dict[str, int] = field(default_factory=dict)  # GPUs of elastic components
    promise: PromisedGain | None = None
    advised: PlacedPlan | None = None  # last advice, not taken
    advised_levels: dict[str, float] = field(default_factory=dict)
    compared_levels: dict[str, float] = field(default_factory=dict)  # levels of the last comparison; empty: none
    compared_sure_levels: dict[str, float] = field(default_factory=dict)
    failed_tries: int = 0  # of a forced migration
    retry_at: float | None = None
    wait_until: float | None = None  # for nodes, where no plan fits
    stopped: Reason | None = None


@dataclass
class ReplanState(MigrationState):
    """State of the replan machine."""

    run: RunState
    tracks: dict[str, CostTrack]  # by component
    stories: dict[str, list[StoryEntry]]  # of the run and its latest migrations
