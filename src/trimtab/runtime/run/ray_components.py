"""The components of a run on a Ray cluster: tasks of a pool, on the slots that the plan gives them.

A group of the plan is one set of slots. Its first component is the task that holds them; the others share them and take
turns, so offload and onload go through the pool and show in its status. A component that brings its own workers holds
no GPUs if it does not share them: its workers do. Every call ends in a time, a `ComponentError` (the component failed)
or a `ComponentLostError` (its process is gone). The pool restarts no component by itself: the run resumes from its last
checkpoint with all components created anew. Calls may come from several threads, one at a time for each component.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.machines.replan.placed_plan import GpuSlot, PlacedPlan, gpu_slots
from trimtab.model.plan import ComponentGroup, Plan
from trimtab.model.pool import TaskState
from trimtab.model.workflow import Workflow
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.task import Task, TaskError, TaskTimeoutError
from trimtab.runtime.run.component import Batch, ComponentError, Place, Result, error_text, find_class
from trimtab.runtime.run.component_worker import CallResult, ComponentStartSpec, ComponentWorker
from trimtab.runtime.run.components import ComponentLostError
from trimtab.runtime.run.emulated import emulated_settings
from trimtab.runtime.run.job import RunJob

PLACE_S = 120.0  # for a component to get its slots and its process
CLOSE_S = 30.0
POLL_S = 0.5  # calls are awaited in intervals, between which lost processes are checked
CPU_EACH = 0.01  # slots of components that compute on GPUs ask for next to no CPU


class ClusterComponents:
    """All components of a run, each a task of the run's pool."""

    def __init__(self, run: RunJob, session: Session, pool: Pool, folder: Path) -> None:
        self._gpu_slots: tuple[GpuSlot, ...] = ()  # of the plan's cluster, by rank
        self._run = run
        self._session = session
        self._pool = pool
        self._folder = folder
        self._tasks: dict[str, Task] = {}
        self._shared: dict[str, str] = {}  # component: the component that holds the slots it shares
        self._has: dict[str, frozenset[str]] = {}
        self._counts: dict[str, list[int]] = {}  # GPUs of its group on each node, by the component that holds the slots
        self._lost_tasks: dict[str, str] = {}  # task: reason, as soon as it is reported
        self._lost_nodes: str | None = None
        self._made = 0
        self._consumers = {
            name: tuple(c.name for c in run.job.workflow.components if name in c.after)
            for name in run.job.workflow.names
        }

    # ---- making and ending ---------------------------------------------------------------------------------------

    def make(self, workflow: Workflow, placed_plan: PlacedPlan, iteration: int) -> None:
        """Create all components; those that share GPUs are onloaded with their first turn."""
        self._place(workflow, placed_plan, workflow.names, iteration, may_evict=True)

    def place(self, workflow: Workflow, placed_plan: PlacedPlan, names: Sequence[str], iteration: int) -> None:
        """Create these components during a run. The GPUs of the old ones are free then, so nothing is evicted for
        them.
        """
        self._place(workflow, placed_plan, names, iteration, may_evict=False)

    def _place(
        self, workflow: Workflow, placed_plan: PlacedPlan, names: Sequence[str], iteration: int, *, may_evict: bool
    ) -> None:
        """Submit these components, large ones first so that they fit, and wait until each is created."""
        self._made += 1
        if may_evict:
            self._lost_nodes = None
        self._gpu_slots, plan = gpu_slots(placed_plan.cluster), placed_plan.plan
        order = {component.name: at for at, component in enumerate(workflow.in_order())}
        for name in sorted(names, key=lambda component: (-len(_group(plan, component).gpus), order[component])):
            self._submit(workflow, plan, name, iteration, may_evict)
        for name in sorted(names, key=lambda component: order[component]):
            self._await_made(name)

    def drop(self, names: Sequence[str] | None = None) -> None:
        """End these components, or all, and wait until their processes are gone and their slots are free."""
        ending = list(self._tasks) if names is None else [name for name in names if name in self._tasks]
        # Sharers first: the holder of the slots leaves last.
        for name in sorted(ending, key=lambda component: component not in self._shared):
            with contextlib.suppress(TrimtabError):
                self._tasks[name].cancel(keep_slot=False)
        for name in ending:
            with contextlib.suppress(TrimtabError):
                self._tasks[name].wait("ended", timeout=CLOSE_S)
            del self._tasks[name]
            self._shared.pop(name, None)
            self._has.pop(name, None)

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        pace = self._emulated(workflow, plan, name) if self._run.parts[name].paced else None
        self._call(name, "resize", len(plan.placed(name).gpus), pace)

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        """Nothing to do: taking a turn offloads the component before."""

    def close(self) -> None:
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
        order = ComponentStartSpec(place, part.use, settings, self._run.near, self._consumers[name], pace)
        self._counts.pop(name, None)
        holder = next((component for component in group.components if component in self._tasks), None)
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
        """One bundle for each node of the group, with the GPUs that the component uses there."""
        counts = self._on_each(gpus, group) or [0]
        return [{"cpu": CPU_EACH, **({"gpu": float(count)} if count else {})} for count in counts]

    def _on_each(self, gpus: Sequence[int], group: Sequence[int]) -> list[int]:
        """How many of these GPUs are on each node of a group."""
        nodes = dict.fromkeys(self._gpu_slots[rank][0] for rank in group)
        return [sum(self._gpu_slots[rank][0] == node for rank in gpus) for node in nodes]

    def _await_made(self, name: str) -> None:
        try:
            if name in self._shared or self._wait_placed(name) is TaskState.parked:
                self._take_turn(name)  # it is created with its first turn
        except TaskError as error:
            raise ComponentLostError(name, f"{name} could not be placed: {error.what}") from error
        results = self._call(name, "has")
        self._has[name] = frozenset(results[0].value)

    def _wait_placed(self, name: str) -> TaskState:
        """Wait until a component has its process. Gives up early if nodes were lost, since the plan is void then."""
        task, end = self._tasks[name], time.monotonic() + PLACE_S
        while True:
            try:
                return task.wait(("running", "parked"), timeout=min(1.0, max(0.0, end - time.monotonic())))
            except TaskTimeoutError:  # noqa: PERF203 -- once a second
                if self._lost_nodes is not None:
                    raise ComponentLostError(name, f"{name} is not placed any more: {self._lost_nodes}") from None
                if time.monotonic() >= end:
                    raise

    def gpu_nodes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Nodes of the GPUs held by the first component of each group: node id and count."""
        found = {}
        for name, counts in self._counts.items():
            if name in self._tasks and name not in self._shared:
                members = sorted(self._tasks[name].members, key=lambda member: member.rank)
                found[name] = tuple((member.node, counts[member.rank]) for member in members)
        return found

    # ---- ComponentSet --------------------------------------------------------------------------------------------

    def has(self, name: str, method: str) -> bool:
        return method in self._has[name]

    def step(self, name: str, batch: Batch) -> tuple[Result, float]:
        """Run a batch; its data and its output are references."""
        after = self._run.job.workflow.component(name).after
        inputs = [batch.data[parent] for parent in after] if len(after) > 1 else [batch.data] * len(after)
        plain = None if after else batch.data
        done, data = self._call_for_data(
            name, "step", batch.iteration, batch.index, batch.of, after, *inputs, plain=plain
        )
        return Result(data, done[0].metrics), max(result.took_s for result in done)

    def offload(self, name: str) -> float:
        """Nothing to do: taking a turn parks the component before."""
        return 0.0

    def onload(self, name: str) -> float:
        """Take the turn on shared GPUs; the seconds include the offload of the component before."""
        began = time.perf_counter()
        self._take_turn(name)
        return time.perf_counter() - began

    def weights(self, source: str) -> tuple[Any, float]:
        """A reference to the current weights of a component."""
        if not self.has(source, "weights"):
            return None, 0.0
        done, weights = self._call_for_data(source, "weights")
        return weights, done[0].took_s

    def sync(self, target: str, weights: Any, version: int) -> float:
        if weights is None or not self.has(target, "sync"):
            return 0.0
        began = time.perf_counter()
        self._call(target, "sync", weights, version)
        return time.perf_counter() - began

    def save(self, name: str, folder: Path) -> float:
        return max(result.took_s for result in self._call(name, "save_to", str(folder)))

    def load(self, name: str, folder: Path) -> None:
        self._call(name, "load_from", str(folder))

    def span(self, name: str, min_gpus: int, max_gpus: int) -> None:
        if self.has(name, "span"):
            self._call(name, "do", "span", min_gpus, max_gpus)

    def check_health(self, names: Sequence[str]) -> None:
        for name in names:
            if self.has(name, "health"):
                for done in self._call(name, "do", "health"):
                    if done.value is not True:
                        why = done.value if isinstance(done.value, str) else "health() did not return True"
                        raise ComponentError(name, "unhealthy", f"{name} is unhealthy: {why}")

    # ---- losses --------------------------------------------------------------------------------------------------

    def report_lost_nodes(self, why: str) -> None:
        """From any thread: nodes are lost, so waits for placement end; until all components are created anew."""
        self._lost_nodes = why

    def report_lost_task(self, task: str, why: str) -> None:
        """From any thread: the process of a task is gone, so calls to it end."""
        self._lost_tasks[task] = why

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _take_turn(self, name: str) -> None:
        task = self._tasks[name]
        try:
            task.take_turn()
            task.wait("running", timeout=PLACE_S)
        except (InputError, TaskError) as error:
            raise ComponentLostError(name, f"{name} cannot have its turn: {error.what}") from error

    def _call(self, name: str, method: str, *arguments: Any) -> list[CallResult]:
        """Call all workers of a component."""
        return self._called(name, method, lambda: self._tasks[name].begin(method, *arguments, timeout=PLACE_S))

    def _call_for_data(self, name: str, method: str, *arguments: Any, **more: Any) -> tuple[list[CallResult], Any]:
        """The same for a method that returns data too: a reference to that of the first worker."""
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
            done: list[CallResult] = self._fetch(name, task, method, begin(), limit_s)
        except TaskError as error:
            raise ComponentLostError(name, f"{name} was lost: {error.what}") from error
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise ComponentLostError(name, f"{name} was lost: {task.interrupted(method).what}") from error
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.ObjectLostError | exceptions.RayActorError):
                raise ComponentLostError(name, f"the input of {name} was lost with the process that made it") from error
            raise ComponentError(name, "raised", f"the {method} of {name} raised {error_text(error.cause)}") from error
        except exceptions.RayError as error:
            raise ComponentLostError(name, f"{name} cannot be reached: {error_text(error)}") from error
        for result in done:
            if result.fault is not None:
                raise ComponentError(name, result.fault.fault_kind, result.fault.what, where=result.fault.where)
        return done

    def _fetch(self, name: str, task: Task, method: str, references: list[Any], limit_s: float) -> list[CallResult]:
        """Results of the calls. Ray needs up to 15 s to notice a lost node; reported losses are seen sooner."""
        from ray.exceptions import GetTimeoutError

        ray, end = self._session._ray, time.monotonic() + limit_s
        while True:
            left_s = end - time.monotonic()
            with contextlib.suppress(GetTimeoutError):
                return list(ray.get(references, timeout=max(0.0, min(POLL_S, left_s))))
            if task.id in self._lost_tasks:
                raise ComponentLostError(name, f"{name} was lost: {self._lost_tasks[task.id]}")
            if left_s <= 0:
                raise ComponentError(
                    name,
                    "hung",
                    f"the {method} of {name} was not over after {limit_s:g} s",
                    hint="raise run.step_limit_s if it needs longer",
                )


def _group(plan: Plan, name: str) -> ComponentGroup:
    """The group of a component; one of its own if it uses no GPUs."""
    return next((group for group in plan.groups if name in group.components), ComponentGroup((name,), ()))
