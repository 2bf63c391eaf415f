"""Drives the replan machine of a run: feeds it iterations and cluster events, and executes or records its instructions.

The machine decides (`machines/replan`); the run checks here, between two iterations, for a migration to execute. Other
threads post events, which are handled in the thread of the run, so the machine never sees two at a time. Nothing here
calls a component or waits.
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
from trimtab.model.run import DecisionNumbers, Migration, MigrationStage, ReplanRules
from trimtab.model.run_events import ODD
from trimtab.model.workflow import Cluster, Workflow
from trimtab.runtime.run.measurements import plan_facts

log = logging.getLogger(__name__)

EmitEvent = Callable[..., None]


class Replanner:
    """`move` is a migration that has begun and is not complete, `next_step` its next instruction."""

    def __init__(
        self,
        machine: ReplanMachine,
        emit: EmitEvent,
        now: Callable[[], float],
        posted: queue.SimpleQueue[e.ReplanEvent],
    ) -> None:
        """`posted` are events from other threads, for the next `poll`."""
        self.machine = machine
        self.move: Migration | None = None
        self.next_step: e.RunMigrationStage | e.RollBackMigration | None = None
        self.advised: Plan | None = None
        self.stop: Reason | None = None
        self.ranges: dict[str, tuple[int, int]] = {}
        self._emit = emit
        self._now = now
        self._posted = posted

    # ---- events --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Handle posted events, and a tick if a deadline has passed."""
        while not self._posted.empty():  # only this thread takes them
            self.handle(self._posted.get())
        due = self.machine.next_deadline()
        if due is not None and due <= self._now():
            self.handle(e.ReplanTick())

    def cluster_changed(self, change: e.ClusterChanged) -> None:
        facts = {"leaving": list(change.leaving), "deadline": change.deadline, "nodes": nodes_facts(change.cluster)}
        self._emit("cluster", why=change.why.value, **facts)
        self.handle(change)

    def stage_done(self, stage: MigrationStage, took_s: float) -> None:
        """A stage is done; the run was stopped for `took_s`."""
        assert self.move is not None
        move = self.move
        self._emit("move", move=move.id, state="stage", stage=stage.value, took_s=round(took_s, 4))
        self.handle(e.MigrationStageDone(move.id, stage, took_s))
        if self.machine.moving is None:
            self.move = self.next_step = None
            self._emit("move", move=move.id, state="arrived", **_code(ReasonCode.arrived, self.machine.plan.describe()))

    def stage_failed(self, stage: MigrationStage, why: str) -> None:
        """A stage failed; `next_step` is the rollback then."""
        assert self.move is not None
        self.handle(e.MigrationStageFailed(self.move.id, stage, why))

    def rolled_back(self, took_s: float) -> None:
        assert self.move is not None
        move, self.move, self.next_step = self.move, None, None
        self._emit("move", move=move.id, state="rolled back", took_s=round(took_s, 4))
        self.handle(e.RolledBack(move.id, took_s))

    def roll_back_failed(self, why: str) -> None:
        """The old plan could not be restored: the run stops."""
        assert self.move is not None
        move, self.move, self.next_step = self.move, None, None
        self._emit("move", move=move.id, state="stuck", **_code(ReasonCode.stuck, why))
        self.handle(e.RollBackFailed(move.id, why))

    def handle(self, event: e.ReplanEvent) -> None:
        """Give an event to the machine and execute its instructions. A refused event is recorded and changes
        nothing.
        """
        try:
            instructions = self.machine.handle(event, self._now())
        except InputError as refused:
            self._emit("told", **_code(ReasonCode.refused, refused.what))
            return
        for instruction in instructions:
            self._apply(instruction)

    # ---- instructions --------------------------------------------------------------------------------------------

    def _apply(self, instruction: e.ReplanInstruction) -> None:
        if isinstance(instruction, e.KeepPlan):
            self._decided("stay", instruction.reason, instruction.numbers)
        elif isinstance(instruction, e.AdvisePlan):
            self.advised = instruction.plan
            self._decided("advise", instruction.reason, instruction.numbers, plan=plan_facts(instruction.plan))
        elif isinstance(instruction, e.BeginMigration):
            self.move = instruction.move
            self._emit("move", state="begun", **move_facts(instruction.move), iteration=self.machine.iterations)
        elif isinstance(instruction, e.RunMigrationStage):
            self.next_step = instruction
        elif isinstance(instruction, e.RollBackMigration):
            self.next_step = instruction
            self._emit(
                "move",
                move=instruction.move.id,
                state="rolling back",
                stage=instruction.at.value,
                **_reason(instruction.reason),
            )
        elif isinstance(instruction, e.SetGpuRange):
            self.ranges[instruction.component] = (instruction.min_gpus, instruction.max_gpus)
            self._emit("range", component=instruction.component, least=instruction.min_gpus, most=instruction.max_gpus)
        elif isinstance(instruction, e.StopRun):
            self.stop = instruction.reason
        elif isinstance(instruction, e.Notify):
            self._emit("told", **_reason(instruction.reason))

    def _decided(self, what: str, reason: Reason, numbers: DecisionNumbers, **facts: Any) -> None:
        figures = {name: value for name, value in asdict(numbers).items() if value is not None}
        self._emit("decided", what=what, iteration=self.machine.iterations, numbers=figures, **_reason(reason), **facts)


def save_machine(path: Path, machine: ReplanMachine) -> None:
    """Write the machine's state for a resumed run. Raises OSError."""
    replace(path, json.dumps(machine.dump(), allow_nan=False) + "\n")


def load_machine(path: Path, workflow: Workflow, cluster: Cluster, rules: ReplanRules) -> ReplanMachine | None:
    """The saved machine; None without one, or if it is of another job or cluster."""
    try:
        machine = ReplanMachine.load(plain.loads(path.read_bytes()), workflow, rules)
    except FileNotFoundError:
        return None
    except (OSError, *ODD) as fault:
        log.warning("starting without past measurements: %s cannot be read: %s", path, fault)
        return None
    known = {placed.name for placed in machine.plan.components}
    return machine if machine.cluster == cluster and known == set(workflow.names) else None


def nodes_facts(cluster: Cluster) -> list[list[Any]]:
    return [[node.name, node.gpus, node.gpu] for node in cluster.nodes]


def move_facts(move: Migration) -> Mapping[str, Any]:
    return {
        "move": move.id,
        "forced": move.forced,
        "numbers": {name: value for name, value in asdict(move.numbers).items() if value is not None},
        "changes": [
            [
                change.component,
                change.how.value,
                [list(seat) for seat in change.before],
                [list(seat) for seat in change.after],
            ]
            for change in move.changes
        ],
        "plan": plan_facts(move.after),
        **_reason(move.reason),
    }


def _reason(reason: Reason) -> dict[str, str]:
    return _code(reason.code, reason.sentence)


def _code(code: ReasonCode, sentence: str) -> dict[str, str]:
    return {"code": code.value, "reason": sentence}
