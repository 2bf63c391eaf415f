"""The loop machine of one run, live: iterations and news go in, and what it says of them is told and kept to be done.

The machine decides (`trimtab.loop`); whoever runs the job asks here, between two iterations, whether there is a move to
carry out. Other threads post what they hear; it is handed over in the thread of the run, so that the machine never sees
two events at a time. Nothing here calls a component or waits.
"""

from __future__ import annotations

import json
import logging
import queue
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.formats.files import replace
from trimtab.machines.replan import events as e
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.model.plan import Plan
from trimtab.model.run import DecisionNumbers, Iteration, Migration, MigrationStage, ReplanRules
from trimtab.model.run_events import ODD
from trimtab.model.workflow import Cluster, Workflow
from trimtab.runtime.run.measurements import plan_facts

log = logging.getLogger(__name__)

Tell = Callable[..., None]


class Replanner:
    """One run under watch. `move` is what has begun and has not arrived, `todo` what is to be done for it next."""

    def __init__(self, machine: ReplanMachine, tell: Tell, now: Callable[[], float]) -> None:
        self.machine = machine
        self.move: Migration | None = None
        self.todo: e.RunMigrationStage | e.RollBackMigration | None = None
        self.advised: Plan | None = None
        self.stop: Reason | None = None
        self.ranges: dict[str, tuple[int, int]] = {}
        self._tell = tell
        self._now = now
        self._posted: queue.SimpleQueue[e.ReplanEvent] = queue.SimpleQueue()

    # ---- what happens ----------------------------------------------------------------------------------------------

    def post(self, event: e.ReplanEvent) -> None:
        """From any thread: something to be handed over when the run looks next."""
        self._posted.put(event)

    def look(self) -> None:
        """Hand over what was posted, and say that time has passed where something is due."""
        while True:
            try:
                event = self._posted.get_nowait()
            except queue.Empty:
                break
            self.handle(event)
        due = self.machine.next_deadline()
        if due is not None and due <= self._now():
            self.handle(e.ReplanTick())

    def began(self, done: int, remaining: int) -> None:
        """The run begins, or goes on after so many iterations."""
        self.handle(e.RunResumed(done, remaining))

    def iteration(self, one: Iteration) -> None:
        """An iteration is over."""
        self.handle(e.IterationDone(one))

    def changed(
        self, cluster: Cluster, why: e.ClusterChangeCause, leaving: tuple[str, ...], deadline: float | None
    ) -> None:
        """There are other nodes than before, or some will go."""
        self._tell("cluster", why=why.value, leaving=list(leaving), deadline=deadline, nodes=nodes_facts(cluster))
        self.handle(e.ClusterChanged(cluster, why, leaving, deadline))

    def stage_done(self, stage: MigrationStage, took_s: float) -> None:
        """A stage of the move is done; the run stood still for so long."""
        assert self.move is not None
        move = self.move
        self._tell("move", move=move.id, state="stage", stage=stage.value, took_s=round(took_s, 4))
        self.handle(e.MigrationStageDone(move.id, stage, took_s))
        if self.machine.moving is None:
            self.move = self.todo = None
            self._tell("move", move=move.id, state="arrived", **_said(ReasonCode.arrived, self.machine.plan.describe()))

    def stage_failed(self, stage: MigrationStage, why: str) -> None:
        """A stage of the move failed; `todo` is the way back then."""
        assert self.move is not None
        self.handle(e.MigrationStageFailed(self.move.id, stage, why))

    def rolled_back(self, took_s: float) -> None:
        """The old plan is in place again."""
        assert self.move is not None
        move, self.move, self.todo = self.move, None, None
        self._tell("move", move=move.id, state="rolled back", took_s=round(took_s, 4))
        self.handle(e.RolledBack(move.id, took_s))

    def roll_back_failed(self, why: str) -> None:
        """The old plan could not be put in place again: the run stops."""
        assert self.move is not None
        move, self.move, self.todo = self.move, None, None
        self._tell("move", move=move.id, state="stuck", **_said(ReasonCode.stuck, why))
        self.handle(e.RollBackFailed(move.id, why))

    def handle(self, event: e.ReplanEvent) -> None:
        """Give an event to the machine and heed what it says. What it refuses is told, and changes nothing."""
        try:
            said = self.machine.handle(event, self._now())
        except InputError as refused:
            self._tell("told", **_said(ReasonCode.refused, refused.what))
            return
        for instruction in said:
            self._heed(instruction)

    # ---- what it says ----------------------------------------------------------------------------------------------

    def _heed(self, said: e.ReplanInstruction) -> None:
        if isinstance(said, e.KeepPlan):
            self._decided("stay", said.reason, said.numbers)
        elif isinstance(said, e.AdvisePlan):
            self.advised = said.plan
            self._decided("advise", said.reason, said.numbers, plan=plan_facts(said.plan))
        elif isinstance(said, e.BeginMigration):
            self.move = said.move
            self._tell("move", state="begun", **move_facts(said.move), iteration=self.machine.iterations)
        elif isinstance(said, e.RunMigrationStage):
            self.todo = said
        elif isinstance(said, e.RollBackMigration):
            self.todo = said
            self._tell("move", move=said.move.id, state="rolling back", stage=said.at.value, **_said_by(said.reason))
        elif isinstance(said, e.SetGpuRange):
            self.ranges[said.component] = (said.least, said.most)
            self._tell("range", component=said.component, least=said.least, most=said.most)
        elif isinstance(said, e.StopRun):
            self.stop = said.reason
        elif isinstance(said, e.Notify):
            self._tell("told", **_said_by(said.reason))

    def _decided(self, what: str, reason: Reason, numbers: DecisionNumbers, **facts: Any) -> None:
        figures = {name: value for name, value in asdict(numbers).items() if value is not None}
        self._tell(
            "decided", what=what, iteration=self.machine.iterations, numbers=figures, **_said_by(reason), **facts
        )


def save_machine(path: Path, machine: ReplanMachine) -> None:
    """Write all that a machine knows, so that a run that is resumed need not learn it again. Raises OSError."""
    replace(path, json.dumps(machine.dump(), allow_nan=False) + "\n")


def load_machine(path: Path, workflow: Workflow, cluster: Cluster, rules: ReplanRules) -> ReplanMachine | None:
    """A machine as it was kept; None where there is none, or it was of another job or cluster."""
    try:
        machine = ReplanMachine.load(plain.loads(path.read_bytes()), workflow, rules)
    except FileNotFoundError:
        return None
    except (OSError, *ODD) as fault:
        log.warning("what was learned before is not used: %s cannot be understood: %s", path, fault)
        return None
    known = {placed.name for placed in machine.plan.components}
    return machine if machine.cluster == cluster and known == set(workflow.names) else None


def nodes_facts(cluster: Cluster) -> list[list[Any]]:
    """The nodes of a cluster as an event holds them."""
    return [[node.name, node.gpus, node.gpu] for node in cluster.nodes]


def move_facts(move: Migration) -> Mapping[str, Any]:
    """A move as an event holds it."""
    return {
        "move": move.id,
        "forced": move.forced,
        "numbers": {name: value for name, value in asdict(move.numbers).items() if value is not None},
        "changes": [
            [one.component, one.how.value, [list(seat) for seat in one.before], [list(seat) for seat in one.after]]
            for one in move.changes
        ],
        "plan": plan_facts(move.after),
        **_said_by(move.reason),
    }


def _said_by(reason: Reason) -> dict[str, str]:
    return _said(reason.code, reason.sentence)


def _said(code: ReasonCode, sentence: str) -> dict[str, str]:
    return {"code": code.value, "reason": sentence}
