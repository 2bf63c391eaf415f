"""A whole job on a Ray cluster: its components on slots of a pool, side by side as the plan has them.

The same run as in one process (`local.py`), only that acts are carried out beside each other, each in a thread that
waits for its component, and time is the wall's. A component whose process or node is lost comes back by the pool's
doing; the run then goes on from the last state that everybody has saved, and iterations after that are void: they are
run again, and counted once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trimtab.model.errors import UnreachableError
from trimtab.model.plan import Plan
from trimtab.model.run import Iteration
from trimtab.plan.order import Act
from trimtab.runtime.ray.client import Session
from trimtab.runtime.run.acting import Acting, Inputs
from trimtab.runtime.run.cluster_crew import ClusterCrew, SeatLostError
from trimtab.runtime.run.crew import CrewLike
from trimtab.runtime.run.job import RunJob
from trimtab.runtime.run.local import LocalRun

BACK_S = 180.0  # for a component that was lost to have a process again
LOSSES = 20  # in a row without an iteration in between, after which the run gives up
ENDS_S = 30.0  # for acts that are under way when one of them has failed


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
        told: Callable[[Iteration, dict[str, dict[str, float | None]]], None] | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__(run, folder, plan=plan, resume=resume, told=told, inputs=inputs)
        self._session = session
        self._losses = 0

    def _make_crew(self) -> CrewLike:
        assert self._path is not None
        cluster = self._job.job.cluster
        gpus = [node.gpus for node in cluster.nodes]
        quota = {"gpu": float(sum(gpus)), "cpu": 1.0}
        count = len(self._workflow.components)
        pool = self._session.pool(f"run-{self._path.name}", quota=quota, warm_hosts=count, ends_with_me=True)
        return ClusterCrew(self._job, self._session, pool, gpus, self._path)

    # ---- acts beside each other ------------------------------------------------------------------------------------

    def _iterate(self, crew: CrewLike, plan: Plan, first: int, last: int) -> frozenset[str]:
        while True:
            try:
                return super()._iterate(crew, plan, first, last)
            except SeatLostError as lost:  # noqa: PERF203
                first = self._recovered(crew, lost, plan)

    def _drive(self, acting: Acting) -> None:
        """Begin whatever may begin; go on with whatever has ended first."""
        ended: queue.SimpleQueue[tuple[Act, float, BaseException | None]] = queue.SimpleQueue()
        began = time.perf_counter() - self._time_s
        under_way = 0

        def act_in_thread(act: Act) -> None:
            fault: BaseException | None = None
            try:
                acting.perform(act, time.perf_counter() - began)
            except BaseException as error:
                fault = error
            ended.put((act, time.perf_counter() - began, fault))

        with ThreadPoolExecutor(2 * len(self._workflow.components) + 1, thread_name_prefix="trimtab-run") as threads:
            while True:
                with acting.lock:
                    for act in acting.order.ready():
                        acting.order.begin(act)
                        threads.submit(act_in_thread, act)
                        under_way += 1
                if not under_way:
                    return
                act, now_s, fault = self._next(ended)
                under_way -= 1
                if fault is not None:
                    self._wait_for_others(ended, under_way)
                    raise fault
                with acting.lock:
                    acting.order.end(act)
                    self._act_ended(acting, now_s)

    def _next(self, ended: queue.SimpleQueue[Any]) -> tuple[Act, float, BaseException | None]:
        """Each act has a deadline of its own, so this one is only there in case that fails."""
        limit_s = self._job.step_limit_s + BACK_S
        try:
            told: tuple[Act, float, BaseException | None] = ended.get(timeout=limit_s)
        except queue.Empty:
            raise UnreachableError(f"nothing has ended in {limit_s:g} s") from None
        return told

    def _wait_for_others(self, ended: queue.SimpleQueue[Any], under_way: int) -> None:
        end = time.monotonic() + ENDS_S
        while under_way and (left_s := end - time.monotonic()) > 0:
            try:
                ended.get(timeout=left_s)
            except queue.Empty:
                return
            under_way -= 1

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _recovered(self, crew: CrewLike, lost: SeatLostError, plan: Plan) -> int:
        """Bring everybody back to the last state; gives the iteration to go on with."""
        assert isinstance(crew, ClusterCrew)
        self._losses += 1
        if self._losses > LOSSES:
            raise lost
        saved = self._saving.whole
        void = sum(one.number > saved for one in self._iterations)
        self._tell("lost", component=lost.component, why=lost.what, after=saved, void=void)
        while True:
            try:
                if saved:
                    crew.await_back(BACK_S)
                else:  # nothing to go back to but the beginning: whoever lives has seen iterations that do not count
                    crew.drop()
                    crew.make(self._workflow, plan, 1)
                self._iterations = [one for one in self._iterations if one.number <= saved]
                self._metrics = {number: one for number, one in self._metrics.items() if number <= saved}
                self._tell("resumed", after=saved, void=void)
                self._load_states(crew, saved)
                return saved + 1
            except SeatLostError as again:  # noqa: PERF203
                self._losses += 1
                if self._losses > LOSSES:
                    raise again from None

    def _iteration_done(self, acting: Acting, number: int, now_s: float) -> None:
        super()._iteration_done(acting, number, now_s)
        self._losses = 0
