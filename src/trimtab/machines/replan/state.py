"""State of a run, and its conversion to plain data and back.

Settings (the workflow, the rules) are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.machines.replan.estimates import CostTrack
from trimtab.machines.replan.migration import OngoingMigration
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import ComponentGroup, PlacedComponent, Plan, TimelineBar
from trimtab.model.run import ComponentChange, DecisionNumbers, Migration, MigrationCost, MigrationStage
from trimtab.model.workflow import Cluster


@dataclass
class PromisedGain:
    """Expected gain of the last migration: the plan before it, the expected share of an iteration, iteration times
    since.
    """

    before: PlacedPlan
    share: float
    bias: float  # measured over predicted time before it
    walls: list[float] = field(default_factory=list)


@dataclass
class ReplanState:
    """State of a run."""

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


def dump_run(run: ReplanState) -> dict[str, Any]:
    plain = ("now", "done", "remaining", "leave_by", "cluster_change", "moved_at", "setbacks", "bias", "walls",
             "switching", "used", "reference", "advised_levels", "compared_levels", "compared_sure_levels",
             "failed_tries", "retry_at", "wait_until")  # fmt: skip
    return {
        **{name: encode(getattr(run, name)) for name in plain},
        "running": encode(run.running),
        "cluster": encode(run.cluster),
        "leaving": list(run.leaving),
        "lost": list(run.lost),
        "promise": encode(run.promise) if run.promise else None,
        "advised": encode(run.advised) if run.advised else None,
        "stopped": encode(run.stopped) if run.stopped else None,
    }


def load_run(data: dict[str, Any]) -> ReplanState:
    kept = dict(data)
    promise, advised, stopped = kept.pop("promise"), kept.pop("advised"), kept.pop("stopped")
    if promise is not None:
        promise = PromisedGain(
            _placed_plan(promise["before"]), promise["share"], promise["bias"], list(promise.get("walls", []))
        )
    return ReplanState(
        running=_placed_plan(kept.pop("running")),
        cluster=decode(Cluster, kept.pop("cluster")),
        leaving=tuple(kept.pop("leaving")),
        lost=tuple(kept.pop("lost")),
        promise=promise,
        advised=_placed_plan(advised) if advised is not None else None,
        stopped=decode(Reason, stopped) if stopped is not None else None,
        **{name: _copied(value) for name, value in kept.items()},
    )


def dump_moving(moving: OngoingMigration | None) -> Any:
    return None if moving is None else encode(moving)


def load_moving(data: Any) -> OngoingMigration | None:
    if data is None:
        return None
    move = data["move"]
    return OngoingMigration(
        move=Migration(
            id=move["id"],
            before=_plan(move["before"]),
            after=_plan(move["after"]),
            changes=decode(tuple[ComponentChange, ...], move["changes"]),
            reason=decode(Reason, move["reason"]),
            numbers=decode(DecisionNumbers, move["numbers"]),
            forced=move.get("forced", False),
        ),
        to=_placed_plan(data["to"]),
        levels=dict(data["levels"]),
        stage=MigrationStage(data["stage"]),
        deadline=data["deadline"],
        end=data["end"],
        took=[(MigrationStage(stage), float(took)) for stage, took in data.get("took", [])],
        failed=decode(Reason, data["failed"]) if data.get("failed") is not None else None,
    )


def dump_tracks(tracks: dict[str, CostTrack]) -> dict[str, Any]:
    return {name: encode(track) for name, track in tracks.items()}


def load_tracks(data: dict[str, Any]) -> dict[str, CostTrack]:
    return decode(dict[str, CostTrack], data)


def load_costs(data: list[Any]) -> list[MigrationCost]:
    return decode(list[MigrationCost], data)


def load_stories(data: dict[str, Any]) -> dict[str, list[StoryEntry]]:
    return decode(dict[str, list[StoryEntry]], data)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


def _placed_plan(data: dict[str, Any]) -> PlacedPlan:
    return PlacedPlan(_plan(data["plan"]), decode(Cluster, data["cluster"]))


def _plan(data: dict[str, Any]) -> Plan:
    """By hand: the codec does not support Literal types."""
    kept = dict(data)
    return Plan(
        groups=decode(tuple[ComponentGroup, ...], kept.pop("groups")),
        components=decode(tuple[PlacedComponent, ...], kept.pop("components")),
        timeline=tuple(TimelineBar(**bar) for bar in kept.pop("timeline")),
        **kept,
    )
