"""Runs a whole job on a Ray cluster: components on slots of a pool, in parallel as the plan has them.

The same as `local_run.py`, but actions run side by side, each in a thread that waits for its component, and time is
wall time. When a component's process or node is lost, all components are created anew under a plan that fits, and the
run resumes from the last checkpoint; later iterations are void: they are run again and counted once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.machines.replan import events as e
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import Plan
from trimtab.model.pool import ENDED, TaskState
from trimtab.model.run import STAGES, Iteration
from trimtab.plan.placement.order import PlanAction
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.controller.rpc import TaskSnapshot
from trimtab.runtime.run.cluster_events import ClusterListener, NodeSelection, RunNodes, first_nodes
from trimtab.runtime.run.component_worker import ComponentWorker
from trimtab.runtime.run.components import ComponentLostError, ComponentSet
from trimtab.runtime.run.iteration import Inputs, IterationRunner
from trimtab.runtime.run.job import RunJob
from trimtab.runtime.run.local_run import LocalRun
from trimtab.runtime.run.measurements import Metrics
from trimtab.runtime.run.ray_components import CPU_EACH, ClusterComponents
from trimtab.runtime.run.replanner import Replanner

MAX_LOSSES = 20  # in a row without an iteration in between, after which the run fails
ACTIONS_END_S = 30.0  # for running actions to end when one of them has failed
POLL_S = 0.25  # between polls of updates while no action ends
SPARE_CPU = 1.0
FEW_NODES = 8  # up to which warm processes are kept on each, so that a migration need not wait for one
WARM_EACH = 2


class ClusterRun(LocalRun):
    """Runs a job on the cluster of a session, in a pool of its own that ends with it."""

    def __init__(
        self,
        run: RunJob,
        folder: Path,
        session: Session,
        *,
        plan: Plan | None = None,
        resume: bool = False,
        on_iteration: Callable[[Iteration, Metrics], None] | None = None,
        inputs: Inputs | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(
            run, folder, plan=plan, resume=resume, on_iteration=on_iteration, inputs=inputs, on_event=on_event
        )
        self._session = session
        self._losses = 0
        self._began = time.perf_counter()
        self._nodes = NodeSelection(run.job.cluster)
        self._seen = self._nodes.first(first_nodes(session))
        self._cluster = self._seen.cluster
        self._names = {node: name for name, node in self._seen.ids.items()}  # of nodes, by Ray's id
        self._listener: ClusterListener | None = None
        self._node_updates: queue.SimpleQueue[tuple[RunNodes, e.ClusterChangeCause]] = queue.SimpleQueue()
        self._pool: Pool | None = None
        self._components: ClusterComponents | None = None

    @property
    def pool(self) -> Pool:
        """The run's pool, once it runs: others may submit to it."""
        if self._pool is None:
            raise UnreachableError("the run has no pool yet", hint="ask again when it has begun")
        return self._pool

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _make_components(self) -> ComponentSet:
        assert self._path is not None
        self._began = time.perf_counter() - self._time_s
        count = len(self._workflow.components)
        name = f"run-{self._path.name}-{uuid.uuid4().hex[:6]}"  # a killed run may hold its pool for a while
        few = len(self._cluster.nodes) <= FEW_NODES
        self._pool = self._session.pool(
            name,
            quota=self._quota(),
            warm_hosts=0 if few else 2 * count,
            warm_each=self._warm_each(count) if few else 0,
            preload=(ComponentWorker.__module__,),
            ends_with_me=True,
            strategy="PACK",
        )
        components = self._components = ClusterComponents(self._job, self._session, self._pool, self._path)
        self._listener = ClusterListener(
            self._session,
            name,
            self._nodes,
            self._seen,
            lambda seen, why: self._on_nodes(components, seen, why),
            lambda task: self._on_task(components, task),
        )
        self._listener.start()
        return components

    def _warm_each(self, count: int) -> int:
        """Warm processes per node: on one or two nodes each component may have a worker on every node."""
        return count if len(self._cluster.nodes) <= 2 else min(count, WARM_EACH)

    def _quota(self) -> dict[str, float]:
        cpus = SPARE_CPU + CPU_EACH * (2 * len(self._workflow.components) + self._cluster.gpus)
        return {"gpu": float(self._cluster.gpus), "cpu": cpus}

    def _finish(self, state: str, reason: Any, plan: Plan) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._pool is not None:
            with contextlib.suppress(TrimtabError):
                self._pool.drop()
        super()._finish(state, reason, plan)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _advance_clock(self) -> None:
        """Wall time passes by itself."""

    # ---- cluster events ------------------------------------------------------------------------------------------

    def _on_nodes(self, components: ClusterComponents, seen: RunNodes, why: e.ClusterChangeCause) -> None:
        """Nodes have changed; called in the listener's thread."""
        self._node_updates.put((seen, why))
        if why is e.ClusterChangeCause.lost:
            components.report_lost_nodes("a node was lost")

    def _on_task(self, components: ClusterComponents, task: TaskSnapshot) -> None:
        """A task of the run's pool changed its state; called in the listener's thread."""
        component = dict(task.labels).get("component")
        if component is not None:
            if task.state in ENDED or task.state is TaskState.evicted:
                components.report_lost_task(task.id, str(task.reason))
            return
        what = "returned" if task.state is TaskState.running and task.evictions else task.state.value
        facts = {"code": task.reason.code.value, "reason": task.reason.sentence, "priority": task.priority}
        self._emit("task", task=task.id, pool=task.pool, what=what, **facts)

    def _apply_node_updates(self) -> None:
        """Pass cluster changes to the replanner, in the thread of the run."""
        while self._replanner is not None:
            try:
                seen, why = self._node_updates.get_nowait()
            except queue.Empty:
                return
            self._set_nodes(seen)
            deadline = None if seen.deadline is None else self._now() + seen.deadline - time.time()
            self._replanner.cluster_changed(seen.cluster, why, seen.leaving, deadline)

    def _cluster_changed_early(self) -> bool:
        """Whether the cluster changed before there was a replanner; adopts the changes."""
        before = self._cluster
        while not self._node_updates.empty():
            self._set_nodes(self._node_updates.get()[0])
        return self._cluster != before

    def _set_nodes(self, seen: RunNodes) -> None:
        """Adopt these nodes; the quota of the pool grows with them."""
        self._seen, self._cluster = seen, seen.cluster
        self._names.update({node: name for name, node in seen.ids.items()})
        if self._pool is not None and self._listener is not None and seen.cluster.gpus > self._listener.own_gpus:
            self._pool.set_quota(self._quota())
            self._listener.own_gpus = float(seen.cluster.gpus)

    # ---- parallel actions ----------------------------------------------------------------------------------------

    def _drive(self, runner: IterationRunner) -> None:
        """Begin all actions that are ready; continue with whichever ends first."""
        ended: queue.SimpleQueue[tuple[PlanAction, float, BaseException | None]] = queue.SimpleQueue()
        under_way = 0

        def run_action(action: PlanAction) -> None:
            fault: BaseException | None = None
            try:
                runner.perform(action, self._now())
            except BaseException as error:
                fault = error
            ended.put((action, self._now(), fault))

        while True:
            with runner.lock:
                for action in runner.order.ready():
                    runner.order.begin(action)
                    threading.Thread(target=run_action, args=(action,), name="trimtab-act", daemon=True).start()
                    under_way += 1
            if not under_way:
                return
            try:
                action, now_s, fault = self._next_ended(runner, ended)
                under_way -= 1
                if fault is not None:
                    raise fault
                with runner.lock:
                    runner.order.end(action)
                self._action_ended(runner, now_s)
            except BaseException:
                runner.components.drop()  # end running components, so that nothing waits in vain
                self._wait_for_others(ended, under_way)
                raise

    def _next_ended(
        self, runner: IterationRunner, ended: queue.SimpleQueue[Any]
    ) -> tuple[PlanAction, float, BaseException | None]:
        """The next action that ends. Each has a deadline of its own; updates are applied meanwhile."""
        while True:
            try:
                item: tuple[PlanAction, float, BaseException | None] = ended.get(timeout=POLL_S)
            except queue.Empty:
                self._action_ended(runner, self._now())
                continue
            return item

    def _action_ended(self, runner: IterationRunner, now_s: float) -> None:
        self._apply_node_updates()
        if self._replanner is not None:
            self._replanner.poll()
        super()._action_ended(runner, now_s)

    def _wait_for_others(self, ended: queue.SimpleQueue[Any], under_way: int) -> None:
        end = time.monotonic() + ACTIONS_END_S
        while under_way and (left_s := end - time.monotonic()) > 0:
            try:
                ended.get(timeout=left_s)
            except queue.Empty:
                return
            under_way -= 1

    def _iteration_done(self, runner: IterationRunner, number: int, now_s: float) -> None:
        super()._iteration_done(runner, number, now_s)
        self._losses = 0

    # ---- replanning ----------------------------------------------------------------------------------------------

    def _make_replanner(self, plan: Plan, first: int) -> Replanner:
        replanner = self._replanner = super()._make_replanner(plan, first)
        self._report_placement()
        self._apply_node_updates()
        return replanner

    def _report_placement(self) -> None:
        """Tell the replanner on which nodes the components were placed, which the pool decides."""
        assert self._replanner is not None
        assert self._components is not None
        where = {
            name: tuple((self._names.get(node, node), count) for node, count in nodes)
            for name, nodes in self._components.gpu_nodes().items()
        }
        self._replanner.handle(e.PlanPlaced(tuple(where.items())))

    def _set_plan(self, components: ComponentSet, plan: Plan, first: int, why: str) -> None:
        if self._replanner is not None:
            self._report_placement()
            plan = self._replanner.machine.plan
        super()._set_plan(components, plan, first, why)

    # ---- losses --------------------------------------------------------------------------------------------------

    def _recover(self, components: ComponentSet, lost: ComponentLostError, plan: Plan) -> tuple[Plan, int]:
        """Create all components anew under a plan that fits, from the last checkpoint; returns plan and next
        iteration.
        """
        assert isinstance(components, ClusterComponents)
        while True:
            self._losses += 1
            if self._losses > MAX_LOSSES:
                raise lost
            saved = self._checkpointer.last_complete
            void = sum(iteration.number > saved for iteration in self._iterations)
            self._emit("lost", component=lost.component, why=lost.what, after=saved, void=void)
            self._iterations = [iteration for iteration in self._iterations if iteration.number <= saved]
            self._metrics = {number: figures for number, figures in self._metrics.items() if number <= saved}
            self._emit("resumed", after=saved, void=void)
            try:
                components.drop()
                placed_plan = self._fitting_plan(plan, saved, lost)
                if self._is_ending:
                    return plan, saved + 1
                return self._rebuild(components, placed_plan, saved), saved + 1
            except ComponentLostError as again:
                lost = again

    def _fitting_plan(self, plan: Plan, saved: int, lost: ComponentLostError) -> PlacedPlan:
        """The current plan if its GPUs are there; else what the replanner migrates to, once it finds one.

        A replanner in advise mode stops no run, so the wait here has a deadline.
        """
        replanner = self._replanner
        if replanner is None:
            return PlacedPlan(self._fresh_plan() if self._cluster_changed_early() else plan, self._cluster)
        replanner.began(saved, self._job.iterations - saved)
        end = self._now() + self._job.rules.wait_s + self._job.rules.rollback_limit_s
        while True:
            if self._now() > end:
                raise UnreachableError(f"{lost.what}; no plan fits the remaining nodes in time")
            self._apply_node_updates()
            replanner.poll()
            machine, to = replanner.machine, replanner.machine.moving_to
            if to is not None and not isinstance(replanner.next_step, e.RollBackMigration):
                return to
            if not machine.drift.must_migrate() or self._is_ending:
                return machine.placed_plan
            if to is not None:
                replanner.rolled_back(0.0)  # there is nothing to roll back to: it searches another plan
            elif replanner.advised is not None:  # advise mode, but the old plan is gone
                replanner.handle(e.AdviceTaken())
                replanner.advised = None
            else:
                time.sleep(POLL_S)

    def _rebuild(self, components: ClusterComponents, placed_plan: PlacedPlan, saved: int) -> Plan:
        """Create all components with the state of a checkpoint; a migration under way is complete then."""
        replanner, began, plan = self._replanner, self._now(), placed_plan.plan
        try:
            components.make(self._workflow, placed_plan, saved + 1)
            if saved:
                self._load_states(components, saved)
        except ComponentLostError:
            if (
                replanner is not None
                and replanner.move is not None
                and not isinstance(replanner.next_step, e.RollBackMigration)
            ):
                assert replanner.next_step is not None
                replanner.stage_failed(replanner.next_step.stage, "a component was lost again")
            raise
        took_s = self._now() - began
        if replanner is not None and replanner.move is not None:
            if isinstance(replanner.next_step, e.RollBackMigration):
                replanner.rolled_back(took_s)
            else:
                for stage in STAGES:
                    if replanner.move is not None:
                        replanner.stage_done(stage, took_s if stage.value == "place" else 0.0)
                plan = replanner.machine.plan
        self._set_plan(components, plan, saved + 1, "lost")
        return plan
