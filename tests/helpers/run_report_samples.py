"""Folders of runs for tests of the report: of one that saw everything, and of a large one, as a run writes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

AT = 1_794_700_000.0
NAMES = ("rollout", "reward", "reference", "trainer")


class Writing:
    """Writes what a run would: `t` is the time on its own timeline."""

    def __init__(self, folder: Path, *, with_t_s: bool = True, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.with_t_s = folder, with_t_s
        self.t = 0.0
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.plan_now: dict[str, Any] = {}

    def tell(self, event: str, **facts: Any) -> None:
        stamp = {"t_s": round(self.t, 4)} if self.with_t_s else {}
        self.lines.append(json.dumps({"event": event, "at": AT + self.t, **stamp, **facts}))

    def write(self, end: str = "") -> Path:
        (self.folder / "events.jsonl").write_text("".join(line + "\n" for line in self.lines) + end)
        return self.folder

    def begin(self, nodes: list[list[Any]], iterations: int = 40, job: str = "grpo") -> None:
        self.tell("began", job=job, iterations=iterations, seed=0)
        self.tell("cluster", why="first", nodes=nodes, leaving=[], deadline=None)

    def plan(self, why: str, iteration: int, plan: dict[str, Any]) -> None:
        self.plan_now = plan
        self.tell("plan", why=why, iteration=iteration, **plan)

    def iteration(self, number: int, *, factor: float = 1.0, reward: float = 0.5, extra: tuple[str, ...] = ()) -> None:
        """One under the plan: rollout, then reward on CPUs, then the trainer; shared ones switch."""
        plan, bars, measured = self.plan_now, [], []
        began = self.t
        shared = {name for group in plan["groups"] if len(group["components"]) > 1 for name in group["components"]}
        gpus = {name: ranks(group["gpus"]) for group in plan["groups"] for name in group["components"]}
        for name, cost in plan["costs_s"].items():
            if name in shared:
                bars.append([name, "switch", self.t, self.t + 0.05])
                self.t += 0.05
            busy = cost * (factor if name == "rollout" else 1.0) * self.random.gauss(1.0, 0.03)
            bars.append([name, "run", self.t, self.t + busy])
            self.t += busy
            measured.append({"component": name, "busy_s": busy, "gpus": len(gpus.get(name, ())), "batches": 4})
        bars += [["trainer", "sync", self.t, self.t + 0.1], ["rollout", "sync", self.t, self.t + 0.1]]
        self.t += 0.1
        facts = {"number": number, "wall_s": self.t - began, "components": measured}
        if extra:
            facts["extra"] = list(extra)
        self.tell(
            "iteration",
            iteration=facts,
            here_s=self.t - began,
            metrics={"reward": {"reward": reward, "perfect": reward / 2}, "trainer": {"loss": 1 - reward}},
            sync_s=0.1,
            bars=bars,
        )


def ranks(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def plan_of(*groups: tuple[tuple[str, ...], str], costs: dict[str, float], predicted: float) -> dict[str, Any]:
    words = " | ".join(f"{', '.join(names)} {len(ranks(gpus))}" for names, gpus in groups)
    return {
        "plan": words,
        "predicted_s": predicted,
        "groups": [{"components": list(names), "gpus": gpus, "kind": ""} for names, gpus in groups],
        "costs_s": costs,
        "switch_s": {},
        "sync_s": 0.1,
    }


def numbers(gain: float = 0.8) -> dict[str, Any]:
    return {
        "iteration_s": 3.1, "new_iteration_s": 3.1 - gain, "gain_s": gain, "sure_gain_s": gain / 2, "horizon": 20,
        "cost_s": 2.5, "cost_measured": True, "margin": 0.5, "dwell_left": 0,
    }  # fmt: skip


SEPARATE = plan_of(
    (("rollout",), "0-3"), (("reference", "trainer"), "4-7"),
    costs={"rollout": 1.0, "reward": 0.1, "reference": 0.4, "trainer": 1.2}, predicted=2.9,
)  # fmt: skip
WIDER = plan_of(
    (("rollout",), "0-5"), (("reference", "trainer"), "6-11"),
    costs={"rollout": 0.9, "reward": 0.1, "reference": 0.3, "trainer": 0.8}, predicted=2.3,
)  # fmt: skip
FEWER = plan_of(
    (("rollout", "reference", "trainer"), "0-3"),
    costs={"rollout": 1.6, "reward": 0.1, "reference": 0.5, "trainer": 1.4}, predicted=3.9,
)  # fmt: skip
NODES = [["alpha", 4, "H200"], ["beta", 4, "H200"]]


def move(
    run: Writing, number: int, iteration: int, to: dict[str, Any], *, fails: str = "", forced: bool = False
) -> None:
    changes = [["rollout", "grows", [["alpha", g] for g in range(4)], [["alpha", g] for g in range(6)]],
               ["trainer", "moves", [["beta", 0]], [["gamma", 0]]], ["reward", "stays", [], []]]  # fmt: skip
    run.tell(
        "move", move=number, state="begun", iteration=iteration, code="ROOM_CHANGED",
        reason="a node joined: 2.3 s instead of 3.1 s an iteration pays within 4", numbers=numbers(), forced=forced,
        changes=changes, plan=to,
    )  # fmt: skip
    for stage, took in (("drain", 0.0), ("save", 0.4), ("release", 0.2), ("place", 1.1), ("load", 0.5), ("check", 0.1),
                        ("resume", 0.0)):  # fmt: skip
        if stage == fails:
            run.tell("move", move=number, state="rolling back", iteration=iteration, stage=stage, code="STAGE_FAILED",
                     reason=f"{stage} failed: no space left on device")  # fmt: skip
            run.t += 0.7
            run.tell("move", move=number, state="rolled back", iteration=iteration, took_s=0.7, code="ROLLED_BACK",
                     reason="the old plan runs again")  # fmt: skip
            return
        run.t += took
        run.tell("move", move=number, state="stage", iteration=iteration, stage=stage, took_s=took)
    run.tell("move", move=number, state="arrived", iteration=iteration, code="ARRIVED", reason="the new plan runs")
    run.plan("move", iteration + 1, to)


def eventful(folder: Path, *, ends: bool = True) -> Path:
    """A run with a join, an eviction, a rolled-back move, two moves, a loss with void iterations, and a drain."""
    run = Writing(folder)
    run.begin(NODES)
    run.plan("first", 1, SEPARATE)
    run.tell("range", component="rollout", least=2, most=4)
    for worker in ("w0", "w1"):
        run.tell("worker", component="rollout", worker=worker, state="serving", code="GROW", reason="the plan has it")

    def iterations(first: int, last: int) -> None:
        for number in range(first, last + 1):
            saves = ("checkpoint",) if number % 5 == 0 else ()
            run.iteration(number, factor=1 + number / 40, reward=number / 45, extra=saves)
            if saves:
                run.tell("saved", iteration=number)
            run.tell(
                "decided", iteration=number, what="stay", code="COSTS_STEADY" if number > 8 else "TOO_FEW",
                reason="nothing costs other than what the plan was made for" if number > 8 else "too few iterations",
                numbers=numbers(0.01),
            )  # fmt: skip

    iterations(1, 10)
    run.tell("task", task="eval-1", pool="evaluation", what="running", code="PREEMPTED", reason="priority 12", gpus=1)
    run.tell("task", task="rollout-w1", pool="run-grpo", what="evicted", code="PRIORITY", gpus=1,
             reason="eval-1 of priority 12 takes its slot from priority 8")  # fmt: skip
    run.tell("worker", component="rollout", worker="w1", state="draining", code="PRIORITY", reason="its slot is taken")
    iterations(11, 13)
    run.tell("task", task="eval-1", pool="evaluation", what="ended", code="COMPLETED", reason="it is done", gpus=1)
    run.tell("task", task="rollout-w1", pool="run-grpo", what="returned", code="RETURNED", reason="room again", gpus=1)
    run.tell("worker", component="rollout", worker="w1", state="serving", code="GROW", reason="there is room")
    run.tell("cluster", why="joined", nodes=[*NODES, ["gamma", 4, "H200"]], leaving=[], deadline=None)
    iterations(14, 15)
    move(run, 1, 15, WIDER, fails="load")
    iterations(16, 20)
    move(run, 2, 20, WIDER)
    iterations(21, 27)
    run.tell("lost", component="trainer", why="its process died (signal 9)", after=25, void=2)
    run.t += 1.5
    run.tell("resumed", after=25, void=2)
    iterations(26, 30)
    run.tell("told", code="NO_GAIN", reason="no plan is faster by more than real runs tell apart")
    run.tell(
        "decided", iteration=30, what="advise", code="BETTER_PLAN", reason="one more GPU for rollout would gain 0.2 s",
        numbers=numbers(0.2), plan=SEPARATE,
    )  # fmt: skip
    run.tell("cluster", why="draining", nodes=[*NODES, ["gamma", 4, "H200"]], leaving=["beta", "gamma"],
             deadline=AT + run.t + 30)  # fmt: skip
    iterations(31, 32)
    run.tell("something new", of="another version")
    move(run, 3, 32, FEWER, forced=True)
    run.tell("cluster", why="lost", nodes=[["alpha", 4, "H200"]], leaving=[], deadline=None)
    iterations(33, 40)
    if ends:
        run.tell("ended", state="done", code="COMPLETED", reason="all 40 iterations are done", iteration=40)
    return run.write()


def large(folder: Path, *, nodes: int = 32, gpus: int = 8, bars: int = 10_000) -> Path:
    """Many GPUs and many bars: rollout beside a group that takes turns."""
    run = Writing(folder)
    total = nodes * gpus
    half = total // 2
    run.begin([[f"node{i:02d}", gpus, "H200"] for i in range(nodes)], iterations=bars // 8)
    plans = [
        plan_of((("rollout",), f"0-{cut - 1}"), (("reference", "trainer"), f"{cut}-{total - 1}"),
                costs={"rollout": 4.0, "reward": 0.3, "reference": 1.0, "trainer": 3.0}, predicted=8.5)
        for cut in (half, half + gpus, half - gpus)
    ]  # fmt: skip
    run.plan("first", 1, plans[0])
    last = bars // 8
    for number in range(1, last + 1):
        run.iteration(number, factor=1 + number / last, reward=number / last)
        if number % 10 == 0:
            run.tell("saved", iteration=number)
        if number % 300 == 0:
            move(run, number // 300, number, plans[number // 300 % 3])
    run.tell("ended", state="done", code="COMPLETED", reason="all iterations are done", iteration=last)
    return run.write()
