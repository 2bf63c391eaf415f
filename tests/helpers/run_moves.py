"""Jobs for tests of moves: a rollout that grows, beside a trainer, on GPUs that neither shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_parts import Noting
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Component, Node, PlacementJob, Variant, WeightSync, Workflow
from trimtab.runtime.run.component import Batch, Place
from trimtab.runtime.run.emulated import Disturbance
from trimtab.runtime.run.job import ComponentCode, RunJob
from trimtab.runtime.run.run import RunEnd

AUTO = ReplanRules(mode=ReplanMode.auto, assumed_move_s=1.0, least_iterations=4, dwell_iterations=4)


def component(name: str, work: float, *after: str) -> Component:
    """Takes work/g seconds on g GPUs, with a little that no GPU takes away."""
    points = tuple((gpus, 0.5 + work / gpus) for gpus in (1, 2, 4, 8))
    return Component(name, (Variant(seconds={"": points}, floor_seconds=0.4),), after, switch_seconds=2.0, engine=name)


def workflow(scale: float = 1.0) -> Workflow:
    return Workflow(
        (component("rollout", 12.0 * scale), component("trainer", 12.0 * scale, "rollout")),
        batches=4,
        staleness=1,
        weight_sync=WeightSync("trainer", "rollout", 0.1 * scale, 0.1 * scale),
    )


def cluster(*gpus: int) -> Cluster:
    return Cluster(tuple(Node(f"node{at}", count) for at, count in enumerate(gpus)))


def drifting(
    mode: str = "auto", drift: bool = True, noise: float = 0.03, iterations: int = 60, gpus: int = 8
) -> RunJob:
    grows = Disturbance(noise=noise, drift_to=3.0 if drift else 1.0, drift_over=40)
    parts = {
        "rollout": ComponentCode(disturbance=grows),
        "trainer": ComponentCode(disturbance=Disturbance(noise=noise)),
    }
    rules = ReplanRules(**{**vars(AUTO), "mode": ReplanMode(mode)})
    return RunJob(PlacementJob(cluster(gpus), workflow()), parts, iterations=iterations, save_every=10, rules=rules)


def parts_that_move(use: str = "run_moves:Learns", fails: str = "", iterations: int = 60) -> RunJob:
    """The same with components that keep a number; they take the time of emulated ones."""
    grows = Disturbance(drift_to=3.0, drift_over=40)
    part = {"use": use, "paced": True}
    parts = {
        "rollout": ComponentCode(**part, disturbance=grows, settings={"fails": fails}),
        "trainer": ComponentCode(**part, settings={"fails": ""}),
    }
    near = Path(__file__).parent
    return RunJob(
        PlacementJob(cluster(8), workflow()), parts, iterations=iterations, save_every=10, rules=AUTO, near=near
    )


class Learns(Noting):
    """Fails once, when it is moved for the first time."""

    made = 0

    def __init__(self, *, place: Place, fails: str = "") -> None:
        super().__init__(place=place)
        self.moved, self.fails = place.iteration > 1, fails
        marker = (place.folder or Path()) / f"failed-{place.component}"
        self.first = self.moved and bool(fails) and not marker.exists()
        self.marker = marker
        if self.first and fails == "make":
            self.failed()

    def failed(self) -> None:
        self.marker.touch()
        self.first = False
        raise RuntimeError(f"no {self.fails}")

    def save(self, path: Path) -> None:
        if self.fails == "save" and path.parent.name.startswith("move-") and not self.marker.exists():
            self.failed()
        super().save(path)

    def load(self, path: Path) -> None:
        if self.first and self.fails == "load":
            self.failed()
        super().load(path)

    def health(self) -> bool | str:
        if self.first and self.fails == "health":
            self.marker.touch()
            self.first = False
            return "it is ill"
        return True

    def sync(self, weights: int, version: int) -> None:
        if self.first and self.fails == "sync":
            self.failed()
        super().sync(weights, version)

    def step(self, batch: Batch) -> Any:
        self.first = False
        return super().step(batch)


class Forgetful:
    """Has learned something, and cannot say what."""

    def __init__(self, *, place: Place, fails: str = "") -> None:
        self.total = 0

    def step(self, batch: Batch) -> Any:
        self.total += 1
        return self.total

    def weights(self) -> int:
        return self.total


def trained(end: RunEnd) -> float:
    """Batches that the trainer says it has done at the end: mean of the last iteration's, and what comes after it."""
    last = end.metrics[len(end.iterations)]["trainer"]["total"]
    assert last is not None
    return last + 1.5


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [one for one in told if not kinds or one["event"] in kinds]


def moves_of(folder: Path, state: str) -> list[dict[str, Any]]:
    return [one for one in events(folder, "move") if one["state"] == state]


def quick(name: str, *after: str) -> Component:
    points = tuple((gpus, 0.04 + 0.8 / gpus) for gpus in (1, 2, 4, 8))
    return Component(name, (Variant(seconds={"": points}, floor_seconds=0.03),), after, switch_seconds=0.2, engine=name)


def on_ray(iterations: int, rules: ReplanRules | None = None) -> RunJob:
    """On two nodes of four GPUs, in iterations of a third of a second: the rollout soon takes three times as long."""
    parts = {
        "rollout": ComponentCode("run_moves:Learns", paced=True, disturbance=Disturbance(drift_to=3.0, drift_over=6)),
        "trainer": ComponentCode("run_moves:Learns", paced=True),
    }
    flow = Workflow(
        (quick("rollout"), quick("trainer", "rollout")),
        batches=4,
        staleness=1,
        weight_sync=WeightSync("trainer", "rollout", 0.01, 0.01),
    )
    rules = rules or ReplanRules(**{**vars(AUTO), "assumed_move_s": 0.2, "back_off_s": 0.2})
    near = Path(__file__).parent
    return RunJob(PlacementJob(cluster(4, 4), flow), parts, iterations=iterations, save_every=4, rules=rules, near=near)
