"""The components of a run on a Ray cluster: tasks of a pool, on the slots that the plan gives them.

A group of the plan is one set of slots. Its first component is the task that holds them; the others share them and take
turns there, so that leaving and coming back to GPUs is the pool's doing and shows in its books. A component that brings
its own workers holds no GPUs itself where it has them alone: its workers do. Every call ends in a time or in an error
that says whose fault it is: a component's own (`ComponentError`), or that its process is gone (`ComponentLostError`):
nobody is started again behind the run's back, which goes on from its last state with everybody made anew. Calls may
come from several threads, one at a time for each component.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.machines.replan.placed_plan import GpuSlot, PlacedPlan, seats
from trimtab.model.plan import ComponentGroup, Plan
from trimtab.model.pool import TaskState
from trimtab.model.workflow import Workflow
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.task import Task, TaskError, TaskTimeoutError
from trimtab.runtime.run.component import Batch, ComponentError, Place, Result, find_class, said
from trimtab.runtime.run.component_worker import CallResult, ComponentStartSpec, ComponentWorker
from trimtab.runtime.run.components import ComponentLostError
from trimtab.runtime.run.emulated import emulated_settings
from trimtab.runtime.run.job import RunJob

PLACE_S = 120.0  # for a component to have its slots and its process
CLOSE_S = 30.0
LOOK_S = 0.5  # a call is waited for in stretches of this, between which it is seen whether its process is known lost
CPU_EACH = 0.01  # slots of components that compute on GPUs, or nowhere, ask for next to nothing


class ClusterComponents:
    """All components of a run, each a task of the run's pool."""

    def __init__(self, run: RunJob, session: Session, pool: Pool, folder: Path) -> None:
        self._seats: tuple[GpuSlot, ...] = ()  # of the cluster that a plan counts through, by rank
        self._run = run
        self._session = session
        self._pool = pool
        self._folder = folder
        self._tasks: dict[str, Task] = {}
        self._shared: dict[str, str] = {}  # component: who holds the slots that it takes turns in
        self._has: dict[str, frozenset[str]] = {}
        self._counts: dict[str, list[int]] = {}  # GPUs of its group on each node, of whoever holds the slots
        self._gone: dict[str, str] = {}  # task: why, as soon as somebody has heard of it
        self._alarm: str | None = None
        self._made = 0
        self._children = {
            name: tuple(c.name for c in run.job.workflow.components if name in c.after)
            for name in run.job.workflow.names
        }

    # ---- making and ending -----------------------------------------------------------------------------------------

    def make(self, workflow: Workflow, sited: PlacedPlan, iteration: int) -> None:
        """Make all components; those that share GPUs come back to them with their first turn."""
        self._place(workflow, sited, workflow.names, iteration, may_evict=True)

    def place(self, workflow: Workflow, sited: PlacedPlan, names: Sequence[str], iteration: int) -> None:
        """Make these anew amid a run: room is there as soon as whoever had it is gone, so nobody is evicted for it."""
        self._place(workflow, sited, names, iteration, may_evict=False)

    def _place(
        self, workflow: Workflow, sited: PlacedPlan, names: Sequence[str], iteration: int, *, may_evict: bool
    ) -> None:
        """Submit these components and wait until each is made. Large ones first: they find room then if any do."""
        self._made += 1
        if may_evict:
            self._alarm = None
        self._seats, plan = seats(sited.cluster), sited.plan
        order = {component.name: at for at, component in enumerate(workflow.in_order())}
        for name in sorted(names, key=lambda one: (-len(_group(plan, one).gpus), order[one])):
            self._submit(workflow, plan, name, iteration, may_evict)
        for name in sorted(names, key=lambda one: order[one]):
            self._await_made(name)

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

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        """Have a component that can go on with the GPUs that a plan gives it."""
        pace = self._emulated(workflow, plan, name) if self._run.parts[name].paced else None
        self._call(name, "resize", len(plan.placed(name).gpus), pace)

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        """Nothing: whoever takes its turn has the one before leave."""

    def close(self) -> None:
        """End all of it."""
        self.drop()

    def _submit(self, workflow: Workflow, plan: Plan, name: str, iteration: int, may_evict: bool) -> None:
        part, placed, group = self._run.parts[name], plan.placed(name), _group(plan, name)
        alone = len(group.components) <= 1
        on_slots = alone and bool(placed.gpus) and self._brings_workers(name)
        place = Place(
            component=name,
            devices=placed.gpus,
            gpus=len(placed.gpus),
            iteration=iteration,
            seed=self._run.seed,
            folder=self._folder,
            emulated=part.use is None,
            near=self._run.near,
            pool=self._pool.name,
            session=self._session.name,
            on_slots=on_slots,
        )
        settings, pace = part.settings, None
        if part.use is None:
            settings = self._emulated(workflow, plan, name)
        elif part.paced:
            pace = self._emulated(workflow, plan, name)
        order = ComponentStartSpec(place, part.use, settings, self._run.near, self._children[name], pace)
        self._counts.pop(name, None)
        holder = next((one for one in group.components if one in self._tasks), None)
        sharing: dict[str, Any] = {}
        if holder is not None:
            self._shared[name] = holder
            sharing = {"shares": self._tasks[holder].id}
        elif not alone:
            sharing = {"room": self._bundles(group.gpus, group.gpus)}
        if placed.gpus and holder is None and not on_slots:
            self._counts[name] = self._on_each(group.gpus, group.gpus)
        self._tasks[name] = self._pool.submit(
            ComponentWorker,
            (order,),
            resources=self._bundles((), ()) if on_slots else self._bundles(placed.gpus, group.gpus),
            id=f"{self._pool.name}.{name}.{self._made}",
            priority=self._run.priority,
            strategy="PACK",
            preemptible=False,
            may_evict=may_evict,
            saves=False,
            labels={"component": name},
            wait_s=PLACE_S,
            **sharing,
        )

    def _brings_workers(self, name: str) -> bool:
        use = self._run.parts[name].use
        return use is not None and bool(getattr(find_class(use, self._run.near, name), "brings_workers", False))

    def _emulated(self, workflow: Workflow, plan: Plan, name: str) -> dict[str, Any]:
        part = self._run.parts[name]
        return emulated_settings(workflow, plan, name, curve=part.curve, disturbance=part.disturbance)

    def _bundles(self, gpus: Sequence[int], group: Sequence[int]) -> list[dict[str, float]]:
        """One for each node that the group is on, with the GPUs that the component uses there."""
        counts = self._on_each(gpus, group) or [0]
        return [{"cpu": CPU_EACH, **({"gpu": float(count)} if count else {})} for count in counts]

    def _on_each(self, gpus: Sequence[int], group: Sequence[int]) -> list[int]:
        """How many of these GPUs are on each of the nodes that a group is on."""
        nodes = dict.fromkeys(self._seats[rank][0] for rank in group)
        return [sum(self._seats[rank][0] == node for rank in gpus) for node in nodes]

    def _await_made(self, name: str) -> None:
        try:
            if name in self._shared or self._waited(name) is TaskState.parked:
                self._take_turn(name)  # it is made when it has its first turn
        except TaskError as error:
            raise ComponentLostError(name, f"{name} could not be placed: {error.what}") from error
        told = self._call(name, "has")
        self._has[name] = frozenset(told[0].value)

    def _waited(self, name: str) -> TaskState:
        """Until a component has its process. A plan that was made for nodes which are gone is not waited for."""
        task, end = self._tasks[name], time.monotonic() + PLACE_S
        while True:
            try:
                return task.wait(("running", "parked"), timeout=min(1.0, max(0.0, end - time.monotonic())))
            except TaskTimeoutError:  # noqa: PERF203 -- once a second
                if self._alarm is not None:
                    raise ComponentLostError(name, f"{name} is not placed any more: {self._alarm}") from None
                if time.monotonic() >= end:
                    raise

    def where(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Where GPUs were given to the first component of each group that holds any: node (its id), how many there."""
        found = {}
        for name, counts in self._counts.items():
            if name in self._tasks and name not in self._shared:
                members = sorted(self._tasks[name].members, key=lambda member: member.rank)
                found[name] = tuple((member.node, counts[member.rank]) for member in members)
        return found

    # ---- what a run asks -------------------------------------------------------------------------------------------

    def has(self, name: str, method: str) -> bool:
        """Whether a component can do something that it need not be able to."""
        return method in self._has[name]

    def step(self, name: str, batch: Batch) -> tuple[Result, float]:
        """One batch; its data are references, and so is what it gives."""
        after = self._run.job.workflow.component(name).after
        inputs = [batch.data[parent] for parent in after] if len(after) > 1 else [batch.data] * len(after)
        plain = None if after else batch.data
        done, data = self._call_for_data(
            name, "step", batch.iteration, batch.index, batch.of, after, *inputs, plain=plain
        )
        return Result(data, done[0].metrics), max(one.took_s for one in done)

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
        done, weights = self._call_for_data(source, "weights")
        return weights, done[0].took_s

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

    def span(self, name: str, least: int, most: int) -> None:
        """Tell a component that brings its own workers how many GPUs are its own to use."""
        if self.has(name, "span"):
            self._call(name, "do", "span", least, most)

    def check_health(self, names: Sequence[str]) -> None:
        """Raise where one of these says that it is not well."""
        for name in names:
            if self.has(name, "health"):
                for done in self._call(name, "do", "health"):
                    if done.value is not True:
                        why = done.value if isinstance(done.value, str) else "it says so"
                        raise ComponentError(name, "unhealthy", f"{name} is not well: {why}")

    # ---- losses ----------------------------------------------------------------------------------------------------

    def alarm(self, why: str) -> None:
        """From any thread: nodes are lost, so whoever waits to be placed need not; until all are made anew."""
        self._alarm = why

    def gone(self, task: str, why: str) -> None:
        """From any thread: the process of a task is known to be gone; whoever waits for it hears of it."""
        self._gone[task] = why

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _take_turn(self, name: str) -> None:
        task = self._tasks[name]
        try:
            task.take_turn()
            task.wait("running", timeout=PLACE_S)
        except (InputError, TaskError) as error:
            raise ComponentLostError(name, f"{name} cannot have its turn: {error.what}") from error

    def _call(self, name: str, method: str, *arguments: Any) -> list[CallResult]:
        """What came of a call of every member."""
        return self._called(name, method, lambda: self._tasks[name].begin(method, *arguments, timeout=PLACE_S))

    def _call_for_data(self, name: str, method: str, *arguments: Any, **more: Any) -> tuple[list[CallResult], Any]:
        """The same of a method that gives data as well: a reference to those of the first member."""
        data: list[Any] = []

        def begun() -> list[Any]:
            both = self._tasks[name].begin(method, *arguments, timeout=PLACE_S, returns=2, **more)
            data.append(both[0][1])
            return [done for done, _ in both]

        return self._called(name, method, begun), data[0]

    def _called(self, name: str, method: str, begin: Callable[[], list[Any]]) -> list[CallResult]:
        from ray import exceptions

        limit_s, task = self._run.step_limit_s, self._tasks[name]
        try:
            done: list[CallResult] = self._got(name, task, method, begin(), limit_s)
        except TaskError as error:
            raise ComponentLostError(name, f"{name} was lost: {error.what}") from error
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise ComponentLostError(name, f"{name} was lost: {task.interrupted(method).what}") from error
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.ObjectLostError | exceptions.RayActorError):
                raise ComponentLostError(name, f"what {name} was to work on is gone with whoever made it") from error
            raise ComponentError(name, "raised", f"the {method} of {name} raised {said(error.cause)}") from error
        except exceptions.RayError as error:
            raise ComponentLostError(name, f"{name} cannot be reached: {said(error)}") from error
        for one in done:
            if one.fault is not None:
                raise ComponentError(name, one.fault.wrong, one.fault.what, where=one.fault.where)
        return done

    def _got(self, name: str, task: Task, method: str, references: list[Any], limit_s: float) -> list[CallResult]:
        """What the calls gave. Ray may take a quarter of a minute to miss a node: what others heard is seen sooner."""
        from ray.exceptions import GetTimeoutError

        ray, end = self._session._ray, time.monotonic() + limit_s
        while True:
            left_s = end - time.monotonic()
            with contextlib.suppress(GetTimeoutError):
                return list(ray.get(references, timeout=max(0.0, min(LOOK_S, left_s))))
            if task.id in self._gone:
                raise ComponentLostError(name, f"{name} was lost: {self._gone[task.id]}")
            if left_s <= 0:
                raise ComponentError(
                    name,
                    "hung",
                    f"the {method} of {name} was not over after {limit_s:g} s",
                    hint="raise run.step_limit_s if it needs longer",
                )


def _group(plan: Plan, name: str) -> ComponentGroup:
    """The group of a component; one of its own where it uses no GPUs."""
    return next((one for one in plan.groups if name in one.components), ComponentGroup((name,), ()))
