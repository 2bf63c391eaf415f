"""Executes a run on a Ray cluster: components are tasks of a pool, and actions run side by side in wall time.

A group of the plan is one set of slots. Its first component is the task that holds them; the others share them and take
turns, so offload and onload go through the pool and show in its status. A component that brings its own workers holds
no GPUs if it does not share them: its workers do. The pool restarts no component by itself: the run resumes from its
last checkpoint with all components created anew. Calls may come from several threads, one at a time for each component.

One thread listens to the controller for nodes that join, drain or are lost, quota changes and the tasks of the pool; it
decides nothing. While the controller is unreachable the run goes on without updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.machines.replan.events import ClusterChangeCause, ClusterChanged
from trimtab.machines.replan.placed_plan import GpuSlot, PlacedPlan, gpu_slots
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.plan import Plan
from trimtab.model.pool import ENDED, TaskState
from trimtab.model.workflow import ANY_KIND, Cluster, Node
from trimtab.plan.placement.order import GpuTurn, PlanAction
from trimtab.runtime.client.connection import ControllerListener, KnownTasks
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.task import Task, TaskError, TaskTimeoutError
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.procs.background import Background, RestartPolicy
from trimtab.runtime.run.component import find_class
from trimtab.runtime.run.executor import (
    BegunCall,
    CallResult,
    CallSpan,
    ComponentLostError,
    ComponentStartSpec,
    ComponentWorker,
    Executor,
    Placements,
)
from trimtab.runtime.run.folder import EmitEvent
from trimtab.runtime.run.iteration import IterationRunner
from trimtab.runtime.run.job import RunJob
from trimtab.runtime.run.ray_call import CallLimits, RayCall

ACTIONS_END_S = 30.0  # for running actions to end when one of them has failed
POLL_S = 0.25  # between polls of updates while no action ends
CPU_EACH = 0.01  # slots of components that compute on GPUs ask for next to no CPU
SPARE_CPU = 1.0
FEW_NODES = 8  # up to which warm processes are kept on each, so that a migration need not wait for one
WARM_EACH = 2
LONG_POLL_S = 0.5  # long poll
POLL_PAUSE_S = 0.2  # between two polls: turns of components are updates too, many in a second
LATE_S = 0.1  # to wait for times of offloads and onloads, which are long over
RETRY_S = 1.0  # after a failed poll


class RunNodes(Frozen):
    """The current nodes of a run. `ids` are Ray's node ids by the names that plans use."""

    cluster: Cluster
    leaving: tuple[str, ...]
    deadline: float | None  # by the controller's clock
    ids: dict[str, str]


class NodeSelection:
    """Which nodes a run uses: the requested ones, and those that join later."""

    def __init__(self, requested: Cluster) -> None:
        self._requested = requested
        self._known: dict[str, Node] = {}  # by Ray's id: nodes that the run uses or has used
        self._ignored: set[str] = set()  # present at the start and not requested

    def first(self, views: Sequence[NodeView]) -> RunNodes:
        """The initial nodes. Raises InfeasibleError if the cluster has less than the job requests."""
        present = [view for view in views if view.state is NodeState.ready]
        left = list(present)
        for wanted in self._requested.nodes:
            fits = [view for view in left if _gpus(view) >= wanted.gpus and _kind_matches(view.facts.kind, wanted.gpu)]
            if not fits:
                have = ", ".join(f"{_gpus(view)}" for view in present) or "none"
                what = f"{wanted.gpus} GPUs{' of ' + wanted.gpu if wanted.gpu else ''}"
                raise InfeasibleError(
                    f"the job asks for {len(self._requested.nodes)} nodes, and no node is left that has {what}",
                    where="cluster",
                    hint=f"GPUs of its nodes: {have}; ask for less, or add nodes",
                )
            chosen = min(fits, key=lambda view: (view.facts.name != wanted.name, _gpus(view), view.node))
            left.remove(chosen)
            self._known[chosen.node] = replace(wanted, name=_name(chosen, self._known))
        self._ignored = {view.node for view in left}
        return self.now(views)

    def now(self, views: Sequence[NodeView], gpus: float | None = None) -> RunNodes:
        """The current nodes, limited to `gpus` GPUs."""
        template = self._requested.nodes[0] if self._requested.nodes else Node("", 0)
        present = []
        for view in views:
            usable = view.state in (NodeState.ready, NodeState.draining, NodeState.suspect)
            known = view.node in self._known or view.node in self._ignored
            if not known and view.state is NodeState.ready and _gpus(view) > 0:
                kind = view.facts.kind if view.facts.kind in self._requested.kinds else template.gpu
                name = _name(view, self._known)
                self._known[view.node] = replace(template, name=name, gpus=_gpus(view), gpu=kind)
            if view.node in self._known and usable:
                present.append(view)
        order = list(self._known)
        present.sort(key=lambda view: order.index(view.node))
        leaving = [view for view in present if view.state is NodeState.draining]
        deadlines = [view.deadline for view in leaving if view.deadline is not None]
        nodes, left = [], float("inf") if gpus is None else gpus
        for view in present:
            node = self._known[view.node]
            some = int(min(node.gpus, left))
            left -= some
            nodes.append(replace(node, gpus=some))
        return RunNodes(
            Cluster(tuple(nodes)),
            tuple(self._known[view.node].name for view in leaving),
            min(deadlines, default=None),
            {self._known[view.node].name: view.node for view in present},
        )


class ClusterListener:
    """Polls the controller for a pool and its cluster until closed; callbacks run in its thread."""

    def __init__(
        self,
        session: Session,
        pool: str,
        nodes: NodeSelection,
        first: RunNodes,
        on_cluster: Callable[[RunNodes, ClusterChangeCause], None],
        on_task: Callable[[TaskSnapshot], None],
    ) -> None:
        self._session = session
        self._pool = pool
        self._nodes = nodes
        self._seen = first
        self.own_gpus = float(first.cluster.gpus)  # the run's own quota: a lower one was set by others
        self._on_cluster = on_cluster
        self._on_task = on_task
        self._tasks: KnownTasks = {}
        self._pool_now: tuple[float | None, Sequence[TaskSnapshot]] = (None, ())
        self.background = Background(RestartPolicy(max_failures=None, backoff_s=RETRY_S))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        listener = ControllerListener("the cluster", self._poll, lambda: self._tasks, self._on_update, RETRY_S)
        self._thread = self.background.start_thread(
            "run-news", lambda: asyncio.run(listener.run(self.background.stopping.is_set))
        )

    def close(self) -> None:
        self.background.stop()
        if self._thread is not None:
            self._thread.join(timeout=LONG_POLL_S + 5.0)

    async def _poll(self, known: KnownTasks, version: int) -> ClientUpdate:
        """The next update; with it the pool's quota and tasks are read. Blocks: the thread does nothing else."""
        update: ClientUpdate = self._session.ask("news", known, version, LONG_POLL_S, timeout_s=LONG_POLL_S + 10.0)
        own = self.own_gpus  # read before the quota: the run raises its quota first and then this
        quota = self._session.ask("pool", self._pool).quota.floats().get("gpu", 0.0)
        self._pool_now = (None if quota >= own else quota), self._session.tasks(self._pool)
        return update

    async def _on_update(self, update: ClientUpdate, nodes_changed: bool) -> None:
        gpus, tasks = self._pool_now
        self._on_node_change(self._nodes.now(update.nodes, gpus))
        for task in tasks:
            key, before = (task.state, task.attempt), self._tasks.get(task.id)
            if key != before and (before is not None or task.state not in ENDED):  # else it ended before the run began
                self._on_task(task)
                self._tasks[task.id] = key
        await asyncio.sleep(POLL_PAUSE_S)

    def _on_node_change(self, seen: RunNodes) -> None:
        before = self._seen
        if (before.cluster, before.leaving, before.deadline) == (seen.cluster, seen.leaving, seen.deadline):
            self._seen = seen
            return
        names = {node.name for node in before.cluster.nodes}
        now = {node.name for node in seen.cluster.nodes}
        why = ClusterChangeCause.quota
        if names - now:
            why = ClusterChangeCause.lost
        elif set(seen.leaving) - set(before.leaving):
            why = ClusterChangeCause.draining
        elif now - names:
            why = ClusterChangeCause.joined
        self._on_cluster(seen, why)
        self._seen = seen


def first_nodes(session: Session, within_s: float = 30.0) -> tuple[NodeView, ...]:
    """The nodes, once the controller has seen one that is ready."""
    end = time.monotonic() + within_s
    while True:
        update: ClientUpdate = session.ask("news", {}, -1, 0.0)
        if any(view.state is NodeState.ready for view in update.nodes) or time.monotonic() >= end:
            return update.nodes
        time.sleep(0.1)


def _gpus(view: NodeView) -> int:
    return int(view.facts.total.floats().get("gpu", 0.0))


def _kind_matches(present: str, wanted: str) -> bool:
    """A job that names no kind takes any; a node that reports no kind matches any."""
    return ANY_KIND in (present, wanted) or present == wanted


def _name(view: NodeView, known: dict[str, Node]) -> str:
    name = view.facts.name or view.node[:8]
    return name if all(node.name != name for node in known.values()) else f"{name}-{view.node[:6]}"


class RayExecutor(Executor):
    """Components on the cluster of a session, in a pool of their own that ends with the run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._began = time.perf_counter()
        self._listener: ClusterListener | None = None
        self._node_updates: queue.SimpleQueue[tuple[RunNodes, ClusterChangeCause]] = queue.SimpleQueue()
        self._pool: Pool | None = None
        self._gpu_slots: tuple[GpuSlot, ...] = ()  # of the plan's cluster, by rank
        self._tasks: dict[str, Task] = {}
        self._shared: dict[str, str] = {}  # component: the component that holds the slots it shares
        self._counts: dict[str, list[int]] = {}  # GPUs of its group on each node, by the component that holds the slots
        self._lost_tasks: dict[str, str] = {}  # task: reason, as soon as it is reported
        self._lost_nodes = False  # since all components were created
        self._made = 0
        self._beside: dict[str, list[RayCall]] = {}  # calls that may go on, by component
        self._lender = ""  # whose weights are read on its own GPU
        self._lends = True  # as far as is known
        self._turns: list[tuple[GpuTurn, str, float, float, Any]] = []  # from, to, reference to what was done in it

    @property
    def pool(self) -> Pool:
        """The run's pool, once it runs: others may submit to it."""
        if self._pool is None:
            raise UnreachableError("the run has no pool yet", hint="ask again when it has begun")
        return self._pool

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def nodes(self, requested: Cluster) -> Cluster:
        self._nodes = NodeSelection(requested)
        self._seen = self._nodes.first(first_nodes(self._session))
        self._names = {node: name for name, node in self._seen.ids.items()}  # of nodes, by Ray's id
        return self._seen.cluster

    def open(self, job: RunJob, folder: Path | None, emit: EmitEvent) -> None:
        assert folder is not None
        super().open(job, folder, emit)
        self._began = time.perf_counter()
        count, nodes = len(job.job.workflow.components), len(self._seen.cluster.nodes)
        name = f"run-{folder.name}-{uuid.uuid4().hex[:6]}"  # a killed run may hold its pool for a while
        # On one or two nodes each component may have a worker on every node.
        warm_each = count if nodes <= 2 else min(count, WARM_EACH)
        self._pool = self._session.pool(
            name,
            quota=self._quota(),
            warm_hosts=0 if nodes <= FEW_NODES else 2 * count,
            warm_each=warm_each if nodes <= FEW_NODES else 0,
            preload=(ComponentWorker.__module__,),
            ends_with_me=True,
            strategy="PACK",
        )
        self._listener = ClusterListener(self._session, name, self._nodes, self._seen, self._on_nodes, self._on_task)
        self._listener.start()

    def close(self) -> None:
        self.end()
        if self._listener is not None:
            self._listener.close()
        with contextlib.suppress(TrimtabError):
            self.pool.drop()

    def _quota(self) -> dict[str, float]:
        gpus = self._seen.cluster.gpus
        cpus = SPARE_CPU + CPU_EACH * (2 * len(self._job.job.workflow.components) + gpus)
        return {"gpu": float(gpus), "cpu": cpus}

    # ---- cluster events ------------------------------------------------------------------------------------------

    def _on_nodes(self, seen: RunNodes, why: ClusterChangeCause) -> None:
        """Nodes have changed; called in the listener's thread. If some are lost, waits for placement end."""
        self._node_updates.put((seen, why))
        if why is ClusterChangeCause.lost:
            self._lost_nodes = True

    def _on_task(self, task: TaskSnapshot) -> None:
        """A task of the run's pool changed its state; called in the listener's thread."""
        if "component" in dict(task.labels):
            if task.state in ENDED or task.state is TaskState.evicted:
                self._lost_tasks[task.id] = str(task.reason)  # calls to it end
            return
        what = "returned" if task.state is TaskState.running and task.evictions else task.state.value
        facts = {"code": task.reason.code.value, "reason": task.reason.sentence, "priority": task.priority}
        self._emit("task", task=task.id, pool=task.pool, what=what, **facts)

    def cluster_change(self) -> ClusterChanged | None:
        """The next change of the cluster. The quota of the pool grows with it."""
        try:
            seen, why = self._node_updates.get_nowait()
        except queue.Empty:
            return None
        self._seen = seen
        self._names.update({node: name for name, node in seen.ids.items()})
        if self._listener is not None and seen.cluster.gpus > self._listener.own_gpus:
            self.pool.set_quota(self._quota())
            self._listener.own_gpus = float(seen.cluster.gpus)
        deadline = None if seen.deadline is None else self.now() + seen.deadline - time.time()
        return ClusterChanged(seen.cluster, why, seen.leaving, deadline)

    def placements(self) -> Placements:
        """Nodes of the GPUs held by the first component of each group, which the pool decides."""
        found = {}
        for name, counts in self._counts.items():
            if name in self._tasks and name not in self._shared:
                members = sorted(self._tasks[name].members, key=lambda member: member.rank)
                found[name] = tuple((self._names.get(m.node, m.node), counts[m.rank]) for m in members)
        return found

    # ---- actions -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.perf_counter() - self._began

    def drive(
        self, runner: IterationRunner, poll: Callable[[], None], ended: Callable[[IterationRunner, float], None]
    ) -> None:
        """Begin all actions that are ready, each in a thread; continue with whichever ends first."""
        done: queue.SimpleQueue[tuple[PlanAction, float, BaseException | None]] = queue.SimpleQueue()
        under_way = 0

        def run_action(action: PlanAction) -> None:
            fault: BaseException | None = None
            try:
                runner.perform(action, self.now())
            except BaseException as error:
                fault = error
            done.put((action, self.now(), fault))

        while True:
            with runner.lock:
                for action in runner.order.ready():
                    runner.order.begin(action)
                    threading.Thread(target=run_action, args=(action,), name="trimtab-act", daemon=True).start()
                    under_way += 1
            if not under_way:
                return
            try:
                try:
                    action, now_s, fault = done.get(timeout=POLL_S)
                except queue.Empty:  # each action has a deadline of its own
                    now_s = self.now()
                else:
                    under_way -= 1
                    if fault is not None:
                        raise fault
                    with runner.lock:
                        runner.order.end(action)
                began_s = self.now()
                poll()
                ended(runner, now_s)
                runner.measurements.book("run", began_s, self.now())
            except BaseException:
                self.end()  # so that nothing waits in vain
                end = time.monotonic() + ACTIONS_END_S
                with contextlib.suppress(queue.Empty):
                    for _ in range(under_way):
                        done.get(timeout=max(0.0, end - time.monotonic()))
                raise

    # ---- placing -------------------------------------------------------------------------------------------------

    def create(
        self, specs: Sequence[ComponentStartSpec], to: PlacedPlan, *, initial: bool
    ) -> dict[str, frozenset[str]]:
        """Submit components, large ones first so that they fit, and wait until each is created.

        Only the first evict others: during a run the GPUs of the old ones are free.
        """
        self._made += 1
        if initial:
            self._lost_nodes = False
        self._gpu_slots, plan = gpu_slots(to.cluster), to.plan
        for spec in sorted(specs, key=lambda spec: -len(plan.group_of(spec.place.component).gpus)):
            self._submit(spec, plan, may_evict=initial)
        return {spec.place.component: self._await_made(spec.place.component) for spec in specs}

    def end(self, names: Sequence[str] | None = None) -> None:
        """End components, and wait until their processes are gone and their slots are free."""
        ending = list(self._tasks) if names is None else [name for name in names if name in self._tasks]
        # Sharers first: the holder of the slots leaves last.
        for name in sorted(ending, key=lambda component: component not in self._shared):
            with contextlib.suppress(TrimtabError):
                self._tasks[name].cancel(keep_slot=False)
        for name in ending:
            with contextlib.suppress(TrimtabError):
                self._tasks[name].wait("ended", timeout=self._job.close_limit_s)
            del self._tasks[name]
            self._shared.pop(name, None)
            self._beside.pop(name, None)

    def _submit(self, spec: ComponentStartSpec, plan: Plan, may_evict: bool) -> None:
        name = spec.place.component
        placed, group = plan.placed(name), plan.group_of(name)
        alone = len(group.components) <= 1
        on_slots = alone and bool(placed.gpus) and self._brings_workers(spec)
        place = replace(spec.place, pool=self.pool.name, session=self._session.name, on_slots=on_slots)
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
        self._tasks[name] = self.pool.submit(
            ComponentWorker,
            (replace(spec, place=place),),
            resources=self._bundles((), ()) if on_slots else self._bundles(placed.gpus, group.gpus),
            id=f"{self.pool.name}.{name}.{self._made}",
            priority=self._job.priority,
            strategy="PACK",
            preemptible=False,
            may_evict=may_evict,
            saves=False,
            labels={"component": name},
            wait_s=self._job.place_limit_s,
            **sharing,
        )

    def _brings_workers(self, spec: ComponentStartSpec) -> bool:
        place = spec.place
        return spec.use is not None and bool(
            getattr(find_class(spec.use, place.near, place.component), "brings_workers", False)
        )

    def _bundles(self, gpus: Sequence[int], group: Sequence[int]) -> list[dict[str, float]]:
        """One bundle for each node of the group, with the GPUs that the component uses there."""
        counts = self._on_each(gpus, group) or [0]
        return [{"cpu": CPU_EACH, **({"gpu": float(count)} if count else {})} for count in counts]

    def _on_each(self, gpus: Sequence[int], group: Sequence[int]) -> list[int]:
        """How many of these GPUs are on each node of a group."""
        nodes = dict.fromkeys(self._gpu_slots[rank][0] for rank in group)
        return [sum(self._gpu_slots[rank][0] == node for rank in gpus) for node in nodes]

    def _await_made(self, name: str) -> frozenset[str]:
        """Wait until a component is created; returns its optional methods."""
        try:
            if name in self._shared or self._wait_placed(name) is TaskState.parked:
                self._take_turn(name)  # it is created with its first turn
        except TaskError as error:
            raise ComponentLostError(name, f"{name} could not be placed: {error.what}") from error
        return frozenset(self.call(name, "has").value)

    def _wait_placed(self, name: str) -> TaskState:
        """Wait until a component has its process. Gives up early if nodes were lost, since the plan is void then."""
        task, end = self._tasks[name], time.monotonic() + self._job.place_limit_s
        while True:
            try:
                return task.wait(("running", "parked"), timeout=min(1.0, max(0.0, end - time.monotonic())))
            except TaskTimeoutError:  # noqa: PERF203 -- once a second
                if self._lost_nodes:
                    raise ComponentLostError(name, f"{name} is not placed any more: a node was lost") from None
                if time.monotonic() >= end:
                    raise

    # ---- calls ---------------------------------------------------------------------------------------------------

    def offload(self, name: str) -> CallResult:
        """Nothing to do: taking a turn parks the component before."""
        return CallResult()

    def onload(self, name: str) -> CallResult:
        """Take the turn on shared GPUs; the seconds include the offload of the component before."""
        if name not in self._shared and name not in self._shared.values():
            return CallResult()
        began = time.perf_counter()
        self._take_turn(name)
        return CallResult(time.perf_counter() - began)

    def turn(self, action: GpuTurn) -> tuple[float, list[tuple[str, CallSpan]]]:
        """What the components did in it is fetched beside the next action: `late_spans`."""
        began_s = self.now()
        for name in (*action.offload, action.component):
            for call in self._beside.pop(name, ()):  # none is saved or checked while it moves
                call.wait()
        self.onload(action.component)
        took_s = self.now() - began_s
        with contextlib.suppress(TrimtabError):
            for name, bucket in (*((name, "offload") for name in action.offload), (action.component, "onload")):
                reference = self._tasks[name].begin("turned", bucket, timeout=self._job.place_limit_s)[0]
                self._turns.append((action, name, began_s, began_s + took_s, reference))
        return took_s, []

    def late_spans(self) -> list[tuple[GpuTurn, str, CallSpan]]:
        found, self._turns = self._turns, []
        ready = {}
        if found:
            references = [reference for *_, reference in found]
            done, _ = self._session._ray.wait(references, num_returns=len(references), timeout=LATE_S)
            with contextlib.suppress(Exception):  # of a lost component
                ready = dict(zip(done, self._session._ray.get(done), strict=True))
        spans = []
        for action, name, began_s, ended_s, reference in found:
            for bucket, start, end in ready[reference].spans[1:] if reference in ready else ():
                start_s, end_s = start - self._began, end - self._began
                if start_s < began_s or end_s > ended_s:  # the clock of another machine
                    start_s, end_s = began_s, min(ended_s, began_s + end - start)
                spans.append((action, name, (bucket, start_s, end_s)))
        return spans

    def _take_turn(self, name: str) -> None:
        task = self._tasks[name]
        try:
            task.take_turn()
            task.wait("running", timeout=self._job.place_limit_s)
        except (InputError, TaskError) as error:
            raise ComponentLostError(name, f"{name} cannot have its turn: {error.what}") from error

    def weights(self, source: str, target: str | None = None) -> CallResult | None:
        """They stay on the GPU if the target shares it."""
        if not self.has(source, "weights"):
            return None
        holder = self._shared.get(source, source)
        near = self._lends and target is not None and self._shared.get(target, target) == holder
        self._lender = source
        return self.call(source, "weights", near and len(self._counts.get(holder, ())) == 1)

    def sync(self, target: str, weights: CallResult | None, version: int) -> CallResult | None:
        """Where the target cannot open memory of the source, weights go through the host from then on."""
        done = super().sync(target, weights, version)
        if done is None or not done.note:
            return done
        again = self.weights(self._lender) or CallResult()
        loaded = super().sync(target, again, version) or CallResult()
        spans, passed_s = list(done.spans), done.whole_s
        for call in (again, loaded):
            spans += [(bucket, passed_s + start, passed_s + end) for bucket, start, end in call.spans]
            passed_s += call.whole_s
        return replace(loaded, spans=tuple(spans))

    def begin(self, name: str, method: str, *arguments: Any) -> BegunCall:
        call = self._call(name, method, arguments)
        self._beside[name] = [*(other for other in self._beside.get(name, ()) if not other.is_over), call]
        return call

    def call(self, name: str, method: str, *arguments: Any) -> CallResult:
        """Call all workers of a component. Data is a reference to that of the first."""
        call = self._call(name, method, arguments)
        call.wait()
        result = call.poll()
        assert result is not None
        if result.note and self._lends:
            self._lends = False
            what = f"{name} cannot share that of its GPU ({result.note})"
            self._emit("told", reason=f"weights go through host memory: {what}")
        return result

    def _call(self, name: str, method: str, arguments: tuple[Any, ...]) -> RayCall:
        limits = CallLimits(self._job.place_limit_s, self._job.step_limit_s)
        return RayCall(self._session._ray, self._tasks[name], name, method, arguments, limits, self._lost_tasks)
