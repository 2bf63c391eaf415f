"""A move, carried out stage by stage with a crew, and undone where one of them fails.

Between two iterations nobody works. Whoever has to go writes its state, ends, is made anew where the new plan has it,
and reads its state; whoever need not is not touched, and a component that can grow and shrink by itself does only that.
Until the last stage is done every component's state is on disk or in its process, so that the way back is always there.

What must never happen: a component that is ended before its state is written; two processes of one component.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.machines.replan.events import RollBackMigration
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.run import MigrationStage
from trimtab.model.workflow import Workflow
from trimtab.runtime.run.component import error_text
from trimtab.runtime.run.components import ComponentLostError, ComponentSet
from trimtab.runtime.run.replanner import Replanner


class MigrationExecutor:
    """From one plan to another, after `iteration` - 1. `loaded` are the components on their GPUs now."""

    def __init__(
        self,
        crew: ComponentSet,
        workflow: Workflow,
        before: PlacedPlan,
        after: PlacedPlan,
        touched: Sequence[str],
        iteration: int,
        loaded: frozenset[str],
        *,
        inside: Path | None,
        sync: Callable[[], None],
    ) -> None:
        """States are written `inside` a folder (None: where temporary files go); `sync` passes weights on."""
        self._crew, self._workflow = crew, workflow
        self._before, self._after = before, after
        self._iteration, self._loaded = iteration, loaded
        self._inside, self._sync = inside, sync
        self._folder: Path | None = None
        groups = [group.components for sited in (before, after) for group in sited.plan.groups]
        shares = {name for components in groups if len(components) > 1 for name in components}
        self._resized = tuple(n for n in touched if crew.has(n, "resize") and n not in shares)
        self._anew = tuple(n for n in touched if n not in self._resized)
        self._saved = tuple(n for n in self._anew if crew.has(n, "save") and crew.has(n, "load"))
        self._released = self._resizing = False

    def do(self, stage: MigrationStage) -> None:
        """Do a stage; raises where it fails."""
        doing: dict[MigrationStage, Callable[[], None]] = {
            MigrationStage.save: self._save,
            MigrationStage.release: self._release,
            MigrationStage.place: lambda: self._place(self._after),
            MigrationStage.load: self._load,
            MigrationStage.check: self._check,
            MigrationStage.resume: lambda: self._resume(self._after),
        }
        if stage in doing:  # draining was the run's doing
            doing[stage]()

    def undo(self) -> None:
        """Put the old plan in place again; raises where that fails."""
        if self._released:
            self._crew.drop(self._anew)
        if self._released or self._resizing:
            self._place(self._before)
            self._load()
            self._check()
        self._resume(self._before)

    def end(self) -> None:
        """Nothing of it is needed any more."""
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
            self._crew.save(name, folder)

    def _release(self) -> None:
        self._released = bool(self._anew)
        self._crew.drop(self._anew)

    def _place(self, to: PlacedPlan) -> None:
        # Whoever shrinks does so before others are placed, whoever grows after that: there is room for both then.
        plan, before = to.plan, (self._before if to is self._after else self._after).plan
        larger = [name for name in self._resized if len(plan.placed(name).gpus) > len(before.placed(name).gpus)]
        self._resizing = bool(self._resized)
        for name in self._resized:
            if name not in larger:
                self._crew.resize(self._workflow, plan, name)
        self._crew.place(self._workflow, to, self._anew, self._iteration)
        for name in larger:
            self._crew.resize(self._workflow, plan, name)

    def _load(self) -> None:
        assert self._folder is not None, "whoever loads has saved"
        for name in self._saved:
            self._crew.load(name, self._folder / name)

    def _check(self) -> None:
        self._crew.check_health(self._workflow.names)

    def _resume(self, to: PlacedPlan) -> None:
        made = frozenset(self._anew) if self._released else frozenset()
        self._crew.settle(to.plan, self._loaded | made)
        sync = self._workflow.weight_sync
        if sync is not None and {sync.source, sync.target} & {*self._anew, *self._resized}:
            self._sync()


def carry_out(loop: Replanner, moving: MigrationExecutor, now: Callable[[], float], passed: Callable[[], None]) -> bool:
    """Do what the loop says of the move that has begun, stage by stage; whether it arrived.

    Where it fails the old plan is in place again, or the loop has said that the run cannot go on. `passed` is told
    whenever time has gone by. Raises ComponentLostError where there is nobody left to go back with.
    """
    try:
        while loop.move is not None:
            todo, began = loop.todo, now()
            assert todo is not None
            if isinstance(todo, RollBackMigration):
                _undo(loop, moving, now, passed)
                return False
            try:
                moving.do(todo.stage)
            except (TrimtabError, OSError) as fault:
                passed()
                loop.stage_failed(todo.stage, _said_of(fault))
                continue
            passed()
            # The iteration that is drained would have run anyway: only what comes after it is standing still.
            loop.stage_done(todo.stage, 0.0 if todo.stage is MigrationStage.drain else now() - began)
            loop.look()
    finally:
        moving.end()
    return True


def _undo(loop: Replanner, moving: MigrationExecutor, now: Callable[[], float], passed: Callable[[], None]) -> None:
    began = now()
    try:
        moving.undo()
    except ComponentLostError:
        raise
    except (TrimtabError, OSError) as fault:
        passed()
        loop.roll_back_failed(_said_of(fault))
        return
    passed()
    loop.rolled_back(now() - began)


def _said_of(fault: TrimtabError | OSError) -> str:
    return fault.what if isinstance(fault, TrimtabError) else error_text(fault)
