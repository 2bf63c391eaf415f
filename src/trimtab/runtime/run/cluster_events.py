"""What a run hears of its cluster while it trains: nodes that join, drain or are lost, its quota, and its pool's tasks.

One thread asks the controller, again and again with deadlines, and tells whoever runs the job; it decides nothing. A
controller that cannot be reached for a while is asked again: the run goes on without news until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.errors import InfeasibleError, UnreachableError
from trimtab.machines.replan.events import ClusterChangeCause
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.pool import ENDED, TaskState
from trimtab.model.workflow import ANY_KIND, Cluster, Node
from trimtab.runtime.client.session import Session
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.procs.background import Background, RestartPolicy

log = logging.getLogger("trimtab")

ASK_S = 0.5  # a question waits so long for news
PAUSE_S = 0.2  # between two questions: turns of components are news as well, many in a second
AGAIN_S = 1.0  # after one that was not answered


@dataclass(frozen=True)
class RunNodes:
    """The nodes of a run now. `ids` are Ray's, by the names that plans use."""

    cluster: Cluster
    leaving: tuple[str, ...]
    deadline: float | None  # in the seconds of the controller's clock
    ids: dict[str, str]


class NodeSelection:
    """Which nodes a run uses: those that it asked for, and with `grow` those that join later."""

    def __init__(self, asked: Cluster, grow: bool = True) -> None:
        self._asked = asked
        self._grow = grow
        self._known: dict[str, Node] = {}  # by Ray's id, those that the run uses or has used
        self._ignored: set[str] = set()  # there from the beginning, and more than was asked for

    def first(self, views: Sequence[NodeView]) -> RunNodes:
        """The nodes to begin with. Raises InfeasibleError where there is less than the job asks for."""
        there = [view for view in views if view.state is NodeState.ready]
        left = list(there)
        for wanted in self._asked.nodes:
            fits = [view for view in left if _gpus(view) >= wanted.gpus and _alike(view.facts.kind, wanted.gpu)]
            if not fits:
                have = ", ".join(f"{_gpus(view)}" for view in there) or "none"
                what = f"{wanted.gpus} GPUs{' of ' + wanted.gpu if wanted.gpu else ''}"
                raise InfeasibleError(
                    f"the job asks for {len(self._asked.nodes)} nodes, and no node is left that has {what}",
                    where="cluster",
                    hint=f"GPUs of its nodes: {have}; ask for less, or add nodes",
                )
            chosen = min(fits, key=lambda view: (view.facts.name != wanted.name, _gpus(view), view.node))
            left.remove(chosen)
            self._known[chosen.node] = replace(wanted, name=_name(chosen, self._known))
        self._ignored = {view.node for view in left}
        return self.now(views)

    def now(self, views: Sequence[NodeView], gpus: float | None = None) -> RunNodes:
        """The nodes there are now, of `gpus` GPUs at most."""
        alike = self._asked.nodes[0] if self._asked.nodes else Node("", 0)
        there = []
        for view in views:
            usable = view.state in (NodeState.ready, NodeState.draining, NodeState.suspect)
            if self._is_new(view):
                kind = view.facts.kind if view.facts.kind in self._asked.kinds else alike.gpu
                name = _name(view, self._known)
                self._known[view.node] = replace(alike, name=name, gpus=_gpus(view), gpu=kind)
            if view.node in self._known and usable:
                there.append(view)
        order = list(self._known)
        there.sort(key=lambda view: order.index(view.node))
        leaving = [view for view in there if view.state is NodeState.draining]
        deadlines = [view.deadline for view in leaving if view.deadline is not None]
        nodes, left = [], float("inf") if gpus is None else gpus
        for view in there:
            node = self._known[view.node]
            some = int(min(node.gpus, left))
            left -= some
            nodes.append(replace(node, gpus=some))
        return RunNodes(
            Cluster(tuple(nodes)),
            tuple(self._known[view.node].name for view in leaving),
            min(deadlines, default=None),
            {self._known[view.node].name: view.node for view in there},
        )

    def _is_new(self, view: NodeView) -> bool:
        mine = view.node in self._known or view.node in self._ignored
        return self._grow and not mine and view.state is NodeState.ready and _gpus(view) > 0


class ClusterListener:
    """Asks the controller for news of a pool and its cluster until closed; whoever is told is told in its thread."""

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
        self.own_gpus = float(first.cluster.gpus)
        """What the run let its pool use: less than that is somebody else's doing."""
        self._on_cluster = on_cluster
        self._on_task = on_task
        self._tasks: dict[str, tuple[TaskState, int]] = {}
        self.background = Background(RestartPolicy(max_failures=None, backoff_s=AGAIN_S))
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """From now on."""
        self._thread = self.background.start_thread("run-news", self._listen)

    def close(self) -> None:
        """No more."""
        self.background.stop()
        if self._thread is not None:
            self._thread.join(timeout=ASK_S + 5.0)

    def _listen(self) -> None:
        """Ask until closed. What is not told to its end, since something raised, is told again."""
        closed, version, unheard = self.background.stopping, -1, ""
        while not closed.is_set():
            try:
                told: ClientUpdate = self._session.ask("news", self._tasks, version, ASK_S, timeout_s=ASK_S + 10.0)
                own = self.own_gpus  # read before it is asked: the run raises its quota first, and then says so
                quota = self._session.ask("pool", self._pool).quota.floats().get("gpu", 0.0)
                tasks = self._session.tasks(self._pool)
            except UnreachableError as fault:  # the controller starts again, or Ray was shut down under us
                if fault.what != unheard:
                    unheard = fault.what
                    log.warning("no news of the cluster: %s; asking again", unheard)
                closed.wait(AGAIN_S)
                continue
            if unheard:
                log.info("news of the cluster again")
            version, unheard = told.version, ""
            self._take(self._nodes.now(told.nodes, None if quota >= own else quota))
            for task in tasks:
                self._heard(task)
            closed.wait(PAUSE_S)

    def _take(self, seen: RunNodes) -> None:
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

    def _heard(self, task: TaskSnapshot) -> None:
        stand = task.state, task.attempt
        if self._tasks.get(task.id) == stand:
            return
        if task.state in ENDED and task.id not in self._tasks:
            return  # of before our time
        self._on_task(task)
        self._tasks[task.id] = stand


def first_nodes(session: Session, within_s: float = 30.0) -> tuple[NodeView, ...]:
    """The nodes that are there, once the controller has seen them."""
    end = time.monotonic() + within_s
    while True:
        told: ClientUpdate = session.ask("news", {}, -1, 0.0)
        if any(view.state is NodeState.ready for view in told.nodes) or time.monotonic() >= end:
            return told.nodes
        time.sleep(0.1)


def _gpus(view: NodeView) -> int:
    return int(view.facts.total.floats().get("gpu", 0.0))


def _alike(there: str, wanted: str) -> bool:
    """A job that names no kind takes any, and a node that does not say what it has may be it."""
    return ANY_KIND in (there, wanted) or there == wanted


def _name(view: NodeView, known: dict[str, Node]) -> str:
    name = view.facts.name or view.node[:8]
    return name if all(node.name != name for node in known.values()) else f"{name}-{view.node[:6]}"
