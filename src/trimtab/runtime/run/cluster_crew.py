"""The components of a run on a Ray cluster: tasks of a pool, on the slots that the plan gives them.

A group of the plan is one set of slots. Its first component is the task that holds them; the others share them and take
turns there, so that leaving and coming back to GPUs is the pool's doing and shows in its books. Every call ends in a
time or in an error that says whose fault it is: a component's own (`ComponentError`), or that its process is gone
(`SeatLostError`), after which the pool has it back by itself and the run goes on from its last state. Calls may come
from several threads, one at a time for each component.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.model.errors import InputError, TrimtabError, UnreachableError
from trimtab.model.plan import Plan
from trimtab.model.pool import State
from trimtab.model.workflow import Workflow
from trimtab.runtime.ray.client import Pool, Session
from trimtab.runtime.ray.task import Task
from trimtab.runtime.run.component import Batch, ComponentError, Place, Result
from trimtab.runtime.run.emulated import emulated_settings
from trimtab.runtime.run.job import RunJob
from trimtab.runtime.run.seat import ComponentSeat, Done, SeatOrder

PLACE_S = 120.0  # for a component to have its slots and its process
CLOSE_S = 30.0
LOOK_S = 0.02
CPU_EACH = 0.01  # slots of components that compute on GPUs, or nowhere, ask for next to nothing


class SeatLostError(UnreachableError):
    """A component's process is gone. The pool starts it again; what it had since it was saved is lost."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(what)
        self.component = component


class ClusterCrew:
    """All components of a run, each a task of the run's pool."""

    def __init__(self, run: RunJob, session: Session, pool: Pool, gpus_of_nodes: Sequence[int], folder: Path) -> None:
        self._run = run
        self._session = session
        self._pool = pool
        self._gpus_each = max(gpus_of_nodes, default=0)
        self._folder = folder
        self._tasks: dict[str, Task] = {}
        self._shared: dict[str, str] = {}  # component: who holds the slots that it takes turns in
        self._has: dict[str, frozenset[str]] = {}
        self._made = 0
        self._children = {
            name: tuple(c.name for c in run.job.workflow.components if name in c.after)
            for name in run.job.workflow.names
        }

    # ---- making --------------------------------------------------------------------------------------------------

    def make(self, workflow: Workflow, plan: Plan, iteration: int) -> None:
        """Submit all components and wait until each is made."""
        self._made += 1
        for component in workflow.in_order():
            self._submit(workflow, plan, component.name, iteration)
        for name in workflow.names:
            self._await_made(name)

    def change(self, workflow: Workflow, before: Plan, after: Plan, iteration: int, loaded: frozenset[str]) -> None:
        """Another plan, between two iterations: who gets other GPUs or other company is made anew with its state."""
        touched = [name for name in workflow.names if _seat(before, name) != _seat(after, name)]
        with tempfile.TemporaryDirectory(prefix="move-", dir=self._folder) as folder:
            saved = [name for name in touched if self.has(name, "save") and self.has(name, "load")]
            for name in saved:
                self.save(name, Path(folder) / name)
            self.drop(touched)
            self._made += 1
            for component in workflow.in_order():
                if component.name in touched:
                    self._submit(workflow, after, component.name, iteration)
            for name in touched:
                self._await_made(name)
            for name in saved:
                self.load(name, Path(folder) / name)

    def drop(self, names: Sequence[str] | None = None) -> None:
        """End these components, or all, and see their processes gone and their slots given back."""
        gone = list(self._tasks) if names is None else [name for name in names if name in self._tasks]
        # Sharers first: whoever holds the slots leaves last.
        for name in sorted(gone, key=lambda one: one not in self._shared):
            with contextlib.suppress(TrimtabError):
                self._tasks[name].cancel(keep_slot=False)
        for name in gone:
            with contextlib.suppress(TrimtabError):
                self._tasks[name].wait("ended", timeout=CLOSE_S)
            del self._tasks[name]
            self._shared.pop(name, None)
            self._has.pop(name, None)

    def _submit(self, workflow: Workflow, plan: Plan, name: str, iteration: int) -> None:
        part, gpus = self._run.parts[name], plan.placed(name).gpus
        place = Place(
            component=name,
            devices=gpus,
            gpus=len(gpus),
            iteration=iteration,
            seed=self._run.seed,
            folder=self._folder,
            emulated=part.use is None,
        )
        settings = part.settings
        if part.use is None:
            settings = emulated_settings(workflow, plan, name, curve=part.curve, disturbance=part.disturbance)
        order = SeatOrder(place, part.use, settings, self._run.near, self._children[name])
        group = next((one.components for one in plan.groups if name in one.components), (name,))
        holder = next((one for one in group if one in self._tasks), None)
        bundles = self._bundles(len(gpus))
        sharing: dict[str, Any] = {"room": bundles} if len(group) > 1 else {}
        if holder is not None:
            self._shared[name] = holder
            sharing = {"shares": self._tasks[holder].id}
        self._tasks[name] = self._pool.submit(
            ComponentSeat,
            (order,),
            resources=bundles,
            id=f"{self._pool.name}.{name}.{self._made}",
            priority=8.0,
            preemptible=False,
            saves=False,
            restarts=-1,
            labels={"component": name},
            wait_s=PLACE_S,
            **sharing,
        )

    def _bundles(self, gpus: int) -> list[dict[str, float]]:
        """As few as the nodes allow: a member for each node that it needs."""
        if not gpus or not self._gpus_each:
            return [{"cpu": CPU_EACH}]
        whole, rest = divmod(gpus, self._gpus_each)
        return [
            {"gpu": float(count), "cpu": CPU_EACH} for count in (*([self._gpus_each] * whole), *([rest] * (rest > 0)))
        ]

    def _await_made(self, name: str) -> None:
        task = self._tasks[name]
        if name in self._shared or task.wait(("running", "parked"), timeout=PLACE_S) is State.parked:
            self._take_turn(name, patience_s=PLACE_S)  # it is made when it has its first turn
        told = self._call(name, "has")
        self._has[name] = frozenset(told[0].value)

    # ---- what a run asks -----------------------------------------------------------------------------------------

    def has(self, name: str, method: str) -> bool:
        """Whether a component can do something that it need not be able to."""
        return method in self._has[name]

    def step(self, name: str, batch: Batch) -> tuple[Result, float]:
        """One batch; its data are references, and so is what it gives."""
        after = self._run.job.workflow.component(name).after
        inputs: list[tuple[str, Any]] = []
        if after:
            data = batch.data if len(after) > 1 else {after[0]: batch.data}
            inputs = [(parent, data[parent]) for parent in after]
        plain = None if after else batch.data
        done = self._call(name, "step", batch.iteration, batch.index, batch.of, inputs, plain)
        return Result(done[0].value, done[0].metrics), max(one.took_s for one in done)

    def offload(self, name: str) -> float:
        """Nothing: whoever takes its turn has the one before parked."""
        return 0.0

    def onload(self, name: str) -> float:
        """Its turn on the GPUs that it shares; gives the seconds, the other's leaving included."""
        began = time.perf_counter()
        self._take_turn(name)
        return time.perf_counter() - began

    def weights(self, source: str) -> tuple[Any, float]:
        """A reference to the weights that a component has now."""
        if not self.has(source, "weights"):
            return None, 0.0
        done = self._call(source, "weights")
        return done[0].value, done[0].took_s

    def sync(self, target: str, weights: Any, version: int) -> float:
        """Give weights to a component; gives the seconds."""
        if weights is None or not self.has(target, "sync"):
            return 0.0
        began = time.perf_counter()
        self._call(target, "sync", weights, version)
        return time.perf_counter() - began

    def save(self, name: str, folder: Path) -> float:
        """Have a component write its state."""
        return max(one.took_s for one in self._call(name, "save_to", str(folder)))

    def load(self, name: str, folder: Path) -> None:
        """Have a component read its state."""
        self._call(name, "load_from", str(folder))

    def check_health(self) -> None:
        """Raise where a component says that it is not well."""
        for name in self._tasks:
            if self.has(name, "health"):
                for done in self._call(name, "do", "health"):
                    if done.value is not True:
                        why = done.value if isinstance(done.value, str) else "it says so"
                        raise ComponentError(name, "unhealthy", f"{name} is not well: {why}")

    def await_back(self, within_s: float) -> None:
        """After a loss: until every component has a process again, made anew where it was lost."""
        end = time.monotonic() + within_s
        for name, task in self._tasks.items():
            if name not in self._shared:
                task.wait(("running", "parked"), timeout=max(0.1, end - time.monotonic()))
        for name in self._tasks:
            self._await_made(name)

    def close(self) -> None:
        """End all of it."""
        self.drop()

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _take_turn(self, name: str, patience_s: float = 0.0) -> None:
        task, end = self._tasks[name], time.monotonic() + patience_s
        while True:
            try:
                task.take_turn()
                task.wait("running", timeout=PLACE_S)
                return
            except InputError as error:  # it is not on its slots: being started again, most likely
                if time.monotonic() >= end:
                    raise SeatLostError(name, f"{name} cannot have its turn: {error.what}") from error
            time.sleep(LOOK_S)

    def _call(self, name: str, method: str, *arguments: Any) -> list[Done]:
        from ray import exceptions

        limit_s, task = self._run.step_limit_s, self._tasks[name]
        try:
            references = task.begin(method, *arguments, timeout=PLACE_S)
            done: list[Done] = self._session._ray.get(references, timeout=limit_s)
        except exceptions.GetTimeoutError:
            raise ComponentError(
                name,
                "hung",
                f"the {method} of {name} was not over after {limit_s:g} s",
                hint="raise run.step_limit_s if it needs longer",
            ) from None
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise SeatLostError(name, f"{name} was lost: {task.interrupted(method).what}") from error
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.ObjectLostError | exceptions.RayActorError):
                raise SeatLostError(name, f"what {name} was to work on is gone with whoever made it") from error
            raise
        for one in done:
            if one.fault is not None:
                raise ComponentError(name, one.fault.wrong, one.fault.what, where=one.fault.where)
        return done


def _seat(plan: Plan, name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What makes a component's place another one: its GPUs, and who shares them."""
    company = next((group.components for group in plan.groups if name in group.components), (name,))
    return plan.placed(name).gpus, company
