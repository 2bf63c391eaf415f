"""A whole job on a Ray cluster: its components on slots of a pool, side by side as the plan has them.

The same run as in one process (`local.py`), only that acts are carried out beside each other, each in a thread that
waits for its component, and time is the wall's. When a component's process or node is lost, everybody is made anew
under a plan that fits, and the run goes on from the last state that all have saved; iterations after that are void:
they are run again, and counted once.
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

LOSSES = 20  # in a row without an iteration in between, after which the run gives up
ENDS_S = 30.0  # for acts that are under way when one of them has failed
LOOK_S = 0.25  # between looks at what was posted, while nothing ends
SPARE_CPU = 1.0
FEW_NODES = 8  # up to which each has processes ready, so that a move need not wait for one
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
        super().__init__(run, folder, plan=plan, resume=resume, on_iteration=on_iteration, inputs=inputs, on_event=on_event)
        self._session = session
        self._losses = 0
        self._began = time.perf_counter()
        self._nodes = NodeSelection(run.job.cluster)
        self._seen = self._nodes.first(first_nodes(session))
        self._cluster = self._seen.cluster
        self._names = {node: name for name, node in self._seen.ids.items()}  # of nodes, by Ray's id
        self._listening: ClusterListener | None = None
        self._news: queue.SimpleQueue[tuple[RunNodes, e.ClusterChangeCause]] = queue.SimpleQueue()
        self._pool: Pool | None = None
        self._crew: ClusterComponents | None = None

    @property
    def pool(self) -> Pool:
        """The run's pool, once it runs: others may submit to it."""
        if self._pool is None:
            raise UnreachableError("the run has no pool yet", hint="ask again when it has begun")
        return self._pool

    # ---- beginning and ending ----------------------------------------------------------------------------------------

    def _make_crew(self) -> ComponentSet:
        assert self._path is not None
        self._began = time.perf_counter() - self._time_s
        count = len(self._workflow.components)
        name = f"run-{self._path.name}-{uuid.uuid4().hex[:6]}"  # one that was killed may hold its own for a while
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
        crew = self._crew = ClusterComponents(self._job, self._session, self._pool, self._path)
        self._listening = ClusterListener(
            self._session,
            name,
            self._nodes,
            self._seen,
            lambda seen, why: self._heard_of_nodes(crew, seen, why),
            lambda task: self._heard(crew, task),
        )
        self._listening.begin()
        return crew

    def _warm_each(self, count: int) -> int:
        """Processes ready on every node: on one or two of them each component may have a member at once."""
        return count if len(self._cluster.nodes) <= 2 else min(count, WARM_EACH)

    def _quota(self) -> dict[str, float]:
        cpus = SPARE_CPU + CPU_EACH * (2 * len(self._workflow.components) + self._cluster.gpus)
        return {"gpu": float(self._cluster.gpus), "cpu": cpus}

    def _finish(self, state: str, reason: Any, plan: Plan) -> None:
        if self._listening is not None:
            self._listening.close()
        if self._pool is not None:
            with contextlib.suppress(TrimtabError):
                self._pool.drop()
        super()._finish(state, reason, plan)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _passed(self) -> None:
        """The wall's time passes by itself."""

    # ---- news --------------------------------------------------------------------------------------------------------

    def _heard_of_nodes(self, crew: ClusterComponents, seen: RunNodes, why: e.ClusterChangeCause) -> None:
        """Nodes have changed; in the thread that listens."""
        self._news.put((seen, why))
        if why is e.ClusterChangeCause.lost:
            crew.alarm("a node was lost")

    def _heard(self, crew: ClusterComponents, task: TaskSnapshot) -> None:
        """A task of the run's pool is in another state; in the thread that listens."""
        component = dict(task.labels).get("component")
        if component is not None:
            if task.state in ENDED or task.state is TaskState.evicted:
                crew.gone(task.id, str(task.reason))
            return
        what = "returned" if task.state is TaskState.running and task.evictions else task.state.value
        facts = {"code": task.reason.code.value, "reason": task.reason.sentence, "priority": task.priority}
        self._tell("task", task=task.id, pool=task.pool, what=what, **facts)

    def _take_news(self) -> None:
        """Hand over what was heard of the cluster, in the thread of the run."""
        while self._loop is not None:
            try:
                seen, why = self._news.get_nowait()
            except queue.Empty:
                return
            self._know(seen)
            deadline = None if seen.deadline is None else self._now() + seen.deadline - time.time()
            self._loop.changed(seen.cluster, why, seen.leaving, deadline)

    def _changed_unseen(self) -> bool:
        """Whether the cluster has changed while there was no loop yet to be told; it is known from now on."""
        before = self._cluster
        while not self._news.empty():
            self._know(self._news.get()[0])
        return self._cluster != before

    def _know(self, seen: RunNodes) -> None:
        """These are the nodes from now on; what the pool may use grows with them."""
        self._seen, self._cluster = seen, seen.cluster
        self._names.update({node: name for name, node in seen.ids.items()})
        if self._pool is not None and self._listening is not None and seen.cluster.gpus > self._listening.own_gpus:
            self._pool.set_quota(self._quota())
            self._listening.own_gpus = float(seen.cluster.gpus)

    # ---- acts beside each other --------------------------------------------------------------------------------------

    def _drive(self, acting: IterationRunner) -> None:
        """Begin whatever may begin; go on with whatever has ended first."""
        ended: queue.SimpleQueue[tuple[PlanAction, float, BaseException | None]] = queue.SimpleQueue()
        under_way = 0

        def act_in_thread(act: PlanAction) -> None:
            fault: BaseException | None = None
            try:
                acting.perform(act, self._now())
            except BaseException as error:
                fault = error
            ended.put((act, self._now(), fault))

        while True:
            with acting.lock:
                for act in acting.order.ready():
                    acting.order.begin(act)
                    threading.Thread(target=act_in_thread, args=(act,), name="trimtab-act", daemon=True).start()
                    under_way += 1
            if not under_way:
                return
            try:
                act, now_s, fault = self._next(acting, ended)
                under_way -= 1
                if fault is not None:
                    raise fault
                with acting.lock:
                    acting.order.end(act)
                self._act_ended(acting, now_s)
            except BaseException:
                acting.crew.drop()  # whoever still works is ended, so that nobody is waited for in vain
                self._wait_for_others(ended, under_way)
                raise

    def _next(
        self, acting: IterationRunner, ended: queue.SimpleQueue[Any]
    ) -> tuple[PlanAction, float, BaseException | None]:
        """What ends next. Each act has a deadline of its own; meanwhile news are heard."""
        while True:
            try:
                on_iteration: tuple[PlanAction, float, BaseException | None] = ended.get(timeout=LOOK_S)
            except queue.Empty:
                self._act_ended(acting, self._now())
                continue
            return on_iteration

    def _act_ended(self, acting: IterationRunner, now_s: float) -> None:
        self._take_news()
        if self._loop is not None:
            self._loop.look()
        super()._act_ended(acting, now_s)

    def _wait_for_others(self, ended: queue.SimpleQueue[Any], under_way: int) -> None:
        end = time.monotonic() + ENDS_S
        while under_way and (left_s := end - time.monotonic()) > 0:
            try:
                ended.get(timeout=left_s)
            except queue.Empty:
                return
            under_way -= 1

    def _iteration_done(self, acting: IterationRunner, number: int, now_s: float) -> None:
        super()._iteration_done(acting, number, now_s)
        self._losses = 0

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _make_loop(self, plan: Plan, first: int) -> Replanner:
        loop = self._loop = super()._make_loop(plan, first)
        self._take_seats()
        self._take_news()
        return loop

    def _take_seats(self) -> None:
        """Tell the loop on which nodes the components were put: whoever hands out slots decides that."""
        assert self._loop is not None
        assert self._crew is not None
        where = {
            name: tuple((self._names.get(node, node), count) for node, count in nodes)
            for name, nodes in self._crew.where().items()
        }
        self._loop.handle(e.PlanPlaced(tuple(where.items())))

    def _settled(self, crew: ComponentSet, plan: Plan, first: int, why: str) -> None:
        if self._loop is not None:
            self._take_seats()
            plan = self._loop.machine.plan
        super()._settled(crew, plan, first, why)

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _recovered(self, crew: ComponentSet, lost: ComponentLostError, plan: Plan) -> tuple[Plan, int]:
        """Make everybody anew under a plan that fits, from the last state; gives plan and iteration to go on with."""
        assert isinstance(crew, ClusterComponents)
        while True:
            self._losses += 1
            if self._losses > LOSSES:
                raise lost
            saved = self._saving.whole
            void = sum(one.number > saved for one in self._iterations)
            self._tell("lost", component=lost.component, why=lost.what, after=saved, void=void)
            self._iterations = [one for one in self._iterations if one.number <= saved]
            self._metrics = {number: one for number, one in self._metrics.items() if number <= saved}
            self._tell("resumed", after=saved, void=void)
            try:
                crew.drop()
                sited = self._plan_that_fits(plan, saved, lost)
                if self._ends:
                    return plan, saved + 1
                return self._rebuilt(crew, sited, saved), saved + 1
            except ComponentLostError as again:
                lost = again

    def _plan_that_fits(self, plan: Plan, saved: int, lost: ComponentLostError) -> PlacedPlan:
        """The plan as it is where its GPUs are there; else what the loop moves to, once it finds something.

        A loop that only advises stops no run, so here it is seen to that nobody waits for ever.
        """
        loop = self._loop
        if loop is None:
            return PlacedPlan(self._fresh_plan() if self._changed_unseen() else plan, self._cluster)
        loop.began(saved, self._job.iterations - saved)
        end = self._now() + self._job.rules.wait_s + self._job.rules.rollback_limit_s
        while True:
            if self._now() > end:
                raise UnreachableError(f"{lost.what}; nothing that fits what is left came in time")
            self._take_news()
            loop.look()
            machine, to = loop.machine, loop.machine.moving_to
            if to is not None and not isinstance(loop.todo, e.RollBackMigration):
                return to
            if not machine.watch.must_go() or self._ends:
                return machine.sited
            if to is not None:
                loop.rolled_back(0.0)  # there is nothing to go back to: it looks for another plan
            elif loop.advised is not None:  # nobody else could carry it out, and the plan that was is gone
                loop.handle(e.AdviceTaken())
                loop.advised = None
            else:
                time.sleep(LOOK_S)

    def _rebuilt(self, crew: ClusterComponents, sited: PlacedPlan, saved: int) -> Plan:
        """Everybody made anew, with the state after an iteration; a move that was under way has arrived then."""
        loop, began, plan = self._loop, self._now(), sited.plan
        try:
            crew.make(self._workflow, sited, saved + 1)
            if saved:
                self._load_states(crew, saved)
        except ComponentLostError:
            if loop is not None and loop.move is not None and not isinstance(loop.todo, e.RollBackMigration):
                assert loop.todo is not None
                loop.stage_failed(loop.todo.stage, "a component was lost again")
            raise
        took_s = self._now() - began
        if loop is not None and loop.move is not None:
            if isinstance(loop.todo, e.RollBackMigration):
                loop.rolled_back(took_s)
            else:
                for stage in STAGES:
                    if loop.move is not None:
                        loop.stage_done(stage, took_s if stage.value == "place" else 0.0)
                plan = loop.machine.plan
        self._settled(crew, plan, saved + 1, "lost")
        return plan
