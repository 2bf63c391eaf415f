"""A run that a dashboard looks at while it is written, and a server for it."""

from __future__ import annotations

from pathlib import Path

import run_report_samples as samples
from trimtab.render.html.dashboard.source import DashboardSource
from trimtab.runtime.dashboard.server import DashboardServer

TOKEN = "a-token-of-the-tests"
GAMMA = ["gamma", 4, "H200"]


class Growing(samples.Writing):
    """Every event is in the file at once, as a run has it."""

    def tell(self, event: str, **facts: object) -> None:
        super().tell(event, **facts)
        with open(self.folder / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(self.lines[-1] + "\n")

    def start(self) -> Growing:
        self.begin(samples.NODES)
        self.plan("first", 1, samples.SEPARATE)
        for worker in ("w0", "w1"):
            self.tell("worker", component="rollout", worker=worker, state="serving", code="GROW", reason="planned")
        for number in range(1, 6):
            self.iteration(number, reward=number / 10)
        return self

    def preempt(self) -> None:
        self.tell(
            "task", task="eval-1", pool="evaluation", what="running", code="PREEMPTED", reason="priority 12", gpus=1
        )
        self.tell(
            "task", task="rollout-w1", pool="run-grpo", what="evicted", code="PRIORITY", gpus=1,
            reason="eval-1 of priority 12 takes its slot from priority 8",
        )  # fmt: skip
        self.tell(
            "worker", component="rollout", worker="w1", state="draining", code="TAKEN", reason="its slot is taken"
        )
        self.iteration(6, reward=0.6)

    def join_and_move(self) -> None:
        self.tell("cluster", why="joined", nodes=[*samples.NODES, GAMMA], leaving=[], deadline=None)
        self.iteration(7, reward=0.7)
        samples.move(self, 1, 7, samples.WIDER)
        self.iteration(8, reward=0.8)


def serving(folder: Path, port: int = 0, **more: object) -> DashboardServer:
    """A server of a folder, with the tests' token."""
    source = DashboardSource(folder, **more)  # type: ignore[arg-type]
    return DashboardServer(source, port, every_s=0.05, environment={"TRIMTAB_DASHBOARD_TOKEN": TOKEN})
