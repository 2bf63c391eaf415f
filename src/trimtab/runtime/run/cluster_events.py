"""Cluster events for a run: nodes that join, drain or are lost, quota changes, and the tasks of its pool.

One thread listens to the controller and calls back; it decides nothing. While the controller is unreachable the run
goes on without updates.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.errors import InfeasibleError
from trimtab.machines.replan.events import ClusterChangeCause
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.pool import ENDED
from trimtab.model.workflow import ANY_KIND, Cluster, Node
from trimtab.runtime.client.connection import ControllerListener, KnownTasks
from trimtab.runtime.client.session import Session
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.procs.background import Background, RestartPolicy

LONG_POLL_S = 0.5  # long poll
POLL_PAUSE_S = 0.2  # between two polls: turns of components are updates too, many in a second
RETRY_S = 1.0  # after a failed poll


@dataclass(frozen=True)
class RunNodes:
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
            if self._is_new(view):
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

    def _is_new(self, view: NodeView) -> bool:
        known = view.node in self._known or view.node in self._ignored
        return not known and view.state is NodeState.ready and _gpus(view) > 0


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
            self._on_snapshot(task)
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

    def _on_snapshot(self, task: TaskSnapshot) -> None:
        key = task.state, task.attempt
        if self._tasks.get(task.id) == key:
            return
        if task.state in ENDED and task.id not in self._tasks:
            return  # ended before the run began
        self._on_task(task)
        self._tasks[task.id] = key


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
