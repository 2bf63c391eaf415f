"""Executes a migration stage by stage, and rolls it back if a stage fails.

Between two iterations all components are idle. A component that moves writes its state, ends, is created anew where the
new plan has it, and reads its state; others are not touched, and a resizable component is only resized. Until the last
stage every component's state is on disk or in its process, so a rollback is always possible.

What must never happen: a component that is ended before its state is written; two processes of one component.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.machines.replan.events import RollBackMigration, RunMigrationStage
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.run import MigrationStage
from trimtab.model.workflow import Workflow
from trimtab.runtime.run.component import error_text
from trimtab.runtime.run.components import ComponentLostError, Components
from trimtab.runtime.run.replanner import Replanner


class MigrationExecutor:
    """From one plan to another, after `iteration` - 1. `loaded` are the components on their GPUs now."""

    def __init__(
        self,
        components: Components,
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
        self._components, self._executor, self._workflow = components, components.executor, workflow
        self._before, self._after = before, after
        self._iteration, self._loaded, self._inside = iteration, loaded, inside
        self._folder: Path | None = None
        shares = {n for to in (before, after) for n in touched if len(to.plan.group_of(n).components) > 1}
        self._resized = tuple(n for n in touched if components.has(n, "resize") and n not in shares)
        self._anew = tuple(n for n in touched if n not in self._resized)
        self._saved = tuple(n for n in self._anew if components.has(n, "save") and components.has(n, "load"))
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
            MigrationStage.release: self._release,
            MigrationStage.place: lambda: self._place(self._after),
            MigrationStage.load: self._load,
            MigrationStage.check: self._check,
            MigrationStage.resume: lambda: self._resume(self._after),
        }
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
            self._components.call(name, "save", str(folder))

    def _release(self) -> None:
        self._released = bool(self._anew)
        self._executor.end(self._anew)

    def _place(self, to: PlacedPlan) -> None:
        # Components that shrink are resized before others are placed, those that grow after: there are GPUs for both
        # then.
        plan, before = to.plan, (self._before if to is self._after else self._after).plan
        larger = [name for name in self._resized if len(plan.placed(name).gpus) > len(before.placed(name).gpus)]
        self._resizing = bool(self._resized)
        for name in self._resized:
            if name not in larger:
                self._components.resize(self._workflow, plan, name)
        self._components.place(self._workflow, to, self._iteration, self._anew)
        for name in larger:
            self._components.resize(self._workflow, plan, name)

    def _load(self) -> None:
        assert self._folder is not None, "nothing was saved"
        for name in self._saved:
            self._components.call(name, "load", str(self._folder / name))

    def _check(self) -> None:
        self._components.check_health(self._workflow.names)

    def _resume(self, to: PlacedPlan) -> None:
        created = frozenset(self._anew) if self._released else frozenset()
        self._components.settle(to.plan, self._loaded | created)
        sync = self._workflow.weight_sync
        if sync is not None and {sync.source, sync.target} & {*self._anew, *self._resized}:
            self._components.sync_weights(sync, self._iteration - 1)
