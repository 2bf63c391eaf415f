"""Drives the replan machine of a run: feeds it iterations and cluster events, and executes or records its instructions.

The machine decides (`machines/replan`); the run checks here, between two iterations, for a migration to execute. Other
threads post events, which are handled in the thread of the run, so the machine never sees two at a time. `Replanner`
calls no component and never waits.

`MigrationExecutor` executes a migration stage by stage, and rolls it back if a stage fails. Between two iterations all
components are idle. A component that moves writes its state, ends, is created anew where the new plan has it, and reads
its state; others are not touched, and a resizable component is only resized. Until the last stage every component's
state is on disk or in its process, so a rollback is always possible.

What must never happen: a component that is ended before its state is written; two processes of one component.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.formats.files import replace
from trimtab.machines.replan import events as e
from trimtab.machines.replan.events import RollBackMigration, RunMigrationStage
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import Plan
from trimtab.model.run import DecisionNumbers, Migration, MigrationStage, ReplanRules
from trimtab.model.run_events import ODD
from trimtab.model.workflow import Cluster, Workflow
from trimtab.runtime.run.component import error_text
from trimtab.runtime.run.executor import ComponentLostError, Executor
from trimtab.runtime.run.folder import EmitEvent
from trimtab.runtime.run.measurements import plan_facts

log = logging.getLogger(__name__)


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
        """Give an event to the machine and execute its instructions. A refused one is recorded and changes nothing."""
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
        elif isinstance(instruction, e.MoveJudged):
            gains = {"promised": round(instruction.promised, 4), "realised": round(instruction.realised, 4)}
            self._emit("judged", move=instruction.move, **gains)
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


class MigrationExecutor:
    """From one plan to another, after `iteration` - 1. `loaded` are the components on their GPUs now."""

    def __init__(
        self,
        executor: Executor,
        workflow: Workflow,
        before: PlacedPlan,
        after: PlacedPlan,
        touched: Sequence[str],
        iteration: int,
        loaded: frozenset[str],
        *,
        inside: Path | None,
    ) -> None:
        """States are written `inside` a folder (None: a temporary one)."""
        self._executor, self._workflow = executor, workflow
        self._before, self._after = before, after
        self._iteration, self._loaded, self._inside = iteration, loaded, inside
        self._folder: Path | None = None
        shares = {n for to in (before, after) for n in touched if len(to.plan.group_of(n).components) > 1}
        self._resized = tuple(n for n in touched if executor.has(n, "resize") and n not in shares)
        self._anew = tuple(n for n in touched if n not in self._resized)
        self._saved = tuple(n for n in self._anew if executor.has(n, "save") and executor.has(n, "load"))
        self._released = self._resizing = False

    def run(self, replanner: Replanner) -> bool:
        """Execute the migration that has begun, stage by stage; returns whether it completed.

        If it fails, the old plan is restored or the replanner stops the run. Raises ComponentLostError if a component
        is lost during the rollback.
        """
        try:
            while replanner.move is not None:
                next_step, began = replanner.next_step, self._executor.now()
                assert next_step is not None
                fault = self._try(next_step)
                took_s = self._executor.now() - began
                if isinstance(next_step, RollBackMigration):
                    if fault is None:
                        replanner.rolled_back(took_s)
                    else:
                        replanner.roll_back_failed(fault)
                    return False
                if fault is not None:
                    replanner.stage_failed(next_step.stage, fault)
                    continue
                # The drained iteration would have run anyway: downtime begins after it.
                replanner.stage_done(next_step.stage, 0.0 if next_step.stage is MigrationStage.drain else took_s)
                replanner.poll()
        finally:
            self.end()
        return True

    def _try(self, step: RunMigrationStage | RollBackMigration) -> str | None:
        """Execute a step; returns why it failed."""
        try:
            if isinstance(step, RunMigrationStage):
                self.do(step.stage)
            else:
                self.undo()
        except (TrimtabError, OSError) as fault:
            if isinstance(fault, ComponentLostError) and isinstance(step, RollBackMigration):
                raise
            return fault.what if isinstance(fault, TrimtabError) else error_text(fault)
        finally:
            self._executor.catch_up()
        return None

    def do(self, stage: MigrationStage) -> None:
        """Run a stage; raises if it fails."""
        actions: dict[MigrationStage, Callable[[], None]] = {
            MigrationStage.save: self._save,
            MigrationStage.release: lambda: self._executor.end(self._anew),
            MigrationStage.place: lambda: self._place(self._after),
            MigrationStage.load: self._load,
            MigrationStage.check: self._check,
            MigrationStage.resume: lambda: self._resume(self._after),
        }
        if stage is MigrationStage.release:
            self._released = bool(self._anew)
        if stage in actions:  # the run itself has drained
            actions[stage]()

    def undo(self) -> None:
        """Restore the old plan; raises if that fails."""
        if self._released:
            self._executor.end(self._anew)
        if self._released or self._resizing:
            self._place(self._before)
            self._load()
            self._check()
        self._resume(self._before)

    def end(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self) -> None:
        source = self._workflow.weight_sync.source if self._workflow.weight_sync is not None else None
        if source in self._anew and source not in self._saved:
            raise UnreachableError(
                f"{source} cannot save and load, so it cannot move without losing what it has learned",
                hint="give it save(path) and load(path)",
            )
        self._folder = Path(tempfile.mkdtemp(prefix="move-", dir=self._inside))
        for name in self._saved:
            folder = self._folder / name
            folder.mkdir()
            self._executor.call(name, "save", str(folder))

    def _place(self, to: PlacedPlan) -> None:
        # Components that shrink are resized before others are placed, those that grow after: there are GPUs for both
        # then.
        plan, before = to.plan, (self._before if to is self._after else self._after).plan
        larger = [name for name in self._resized if len(plan.placed(name).gpus) > len(before.placed(name).gpus)]
        self._resizing = bool(self._resized)
        for name in self._resized:
            if name not in larger:
                self._executor.resize(self._workflow, plan, name)
        self._executor.place(self._workflow, to, self._iteration, self._anew)
        for name in larger:
            self._executor.resize(self._workflow, plan, name)

    def _load(self) -> None:
        assert self._folder is not None, "nothing was saved"
        for name in self._saved:
            self._executor.call(name, "load", str(self._folder / name))

    def _check(self) -> None:
        self._executor.check_health(self._workflow.names)

    def _resume(self, to: PlacedPlan) -> None:
        created = frozenset(self._anew) if self._released else frozenset()
        self._executor.settle(to.plan, self._loaded | created)
        sync = self._workflow.weight_sync
        if sync is not None and {sync.source, sync.target} & {*self._anew, *self._resized}:
            self._executor.sync_weights(sync, self._iteration - 1)
