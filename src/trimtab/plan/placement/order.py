"""Execution order of a plan: which component may take which batch now, given what is done.

A small state machine without a clock. `ready()` lists the actions that may begin; `begin` and `end` record them. The
caller decides where an action runs and how long it takes: in a process, on a cluster, or nowhere (`play` with stated
times gives exactly the times of `plan/placement/simulate.py`).

What must never happen: a batch begun before its inputs, two components at work on the same GPUs, an iteration of the
weight target begun on weights older than `staleness` allows, or an iteration ended twice. `check()` asserts what can be
checked of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from trimtab.core.frozen import Frozen
from trimtab.model.plan import Plan
from trimtab.model.workflow import Component, Workflow
from trimtab.plan.placement.simulate import completed


class GpuTurn(Frozen):
    """The GPUs of a group go to one of its components; those in `offload` must leave them first."""

    component: str
    iteration: int
    offload: tuple[str, ...] = ()


class BatchStep(Frozen):
    """A component takes a batch."""

    component: str
    iteration: int
    batch: int


class WeightSyncStep(Frozen):
    """The weights of the source after an iteration go to the target."""

    source: str
    target: str
    iteration: int


PlanAction = GpuTurn | BatchStep | WeightSyncStep


@dataclass
class _ComponentProgress:
    """Place of a component in the plan, and its progress. Batches count from the first iteration."""

    name: str
    parents: tuple[str, ...]
    chunk: int  # batches it takes from its inputs at a time
    before: str | None  # the component before it on its GPUs in the same iteration
    last: str  # the last of its group; itself if alone
    shares: bool  # its GPUs with others
    same_engine: bool  # as the component before it on the GPUs: no offload needed
    begun: int = 0
    ended: int = 0
    turns: int = 0  # iterations for which it has had its GPUs
    turning: bool = False
    loaded: bool = True  # always true where it does not share


class ExecutionOrder:
    """Runs iterations `first` to `last` (`None`: until `stop_after`) of a workflow under one plan.

    Components that share GPUs must be offloaded at the beginning, all others loaded. Everything before `first` counts
    as done, including the weight sync.

    With staleness a component without inputs that receives no weights could run ahead without limit, so at most
    `max_open_iterations` iterations are open. The default, one more than there are components, costs no time: a cycle
    of waits through that limit contains each component's time at most once, and the period is at least each of these.
    """

    def __init__(
        self,
        workflow: Workflow,
        plan: Plan,
        *,
        first: int = 1,
        last: int | None = None,
        max_open_iterations: int | None = None,
    ) -> None:
        self.batches = workflow.batches
        self.first = first
        self.last = last
        enough = max(len(workflow.components), workflow.staleness) + 1
        self.max_open_iterations = enough if max_open_iterations is None else max_open_iterations
        self._staleness = workflow.staleness
        self._progress = _progress(workflow, plan)
        self._members = {name: group.components for group in plan.groups for name in group.components}
        sync = workflow.weight_sync
        self._source = sync.source if sync else None
        self._target = sync.target if sync else None
        self._synced = 0  # iterations whose weights have arrived
        self._syncing = False

    @property
    def finished(self) -> int:
        """The last completed iteration, including its sync; `first` - 1 before any is."""
        done = min(progress.ended for progress in self._progress.values()) // self.batches
        return self.first - 1 + (done if self._source is None else min(done, self._synced))

    @property
    def idle(self) -> bool:
        return not self._syncing and not any(r.turning or r.begun > r.ended for r in self._progress.values())

    @property
    def over(self) -> bool:
        return self.last is not None and self.finished >= self.last and self.idle

    @property
    def loaded(self) -> frozenset[str]:
        return frozenset(progress.name for progress in self._progress.values() if progress.loaded)

    def ended_by(self, component: str) -> int:
        """The last iteration of which a component has ended all batches."""
        return self.first - 1 + self._progress[component].ended // self.batches

    def is_idle(self, component: str) -> bool:
        progress = self._progress[component]
        syncs = self._syncing and component in (self._source, self._target)
        return progress.begun == progress.ended and not progress.turning and not syncs

    def is_between(self, component: str) -> bool:
        """Whether the next batch of the component is the first of an iteration."""
        progress = self._progress[component]
        return progress.begun == progress.ended and progress.begun % self.batches == 0

    def stop_after(self, iteration: int) -> int:
        """Begin no iteration after this one, or after those already begun; returns the last one.

        Every component reaches the same iteration, so that a plan can change, or a run end, with nothing half done.
        """
        furthest = max(-(-r.begun // self.batches) for r in self._progress.values()) + self.first - 1
        last = max(iteration, furthest)
        self.last = last if self.last is None else min(self.last, last)
        return self.last

    def ready(self) -> tuple[PlanAction, ...]:
        """Actions that may begin now, deterministic, components in workflow order."""
        actions: list[PlanAction] = []
        for progress in self._progress.values():
            action = self._next(progress)
            if action is not None:
                actions.append(action)
        if self._source is not None and self._target is not None and not self._syncing and self._may_sync():
            actions.append(WeightSyncStep(self._source, self._target, self.first + self._synced))
        return tuple(actions)

    def begin(self, action: PlanAction) -> None:
        """Raises ValueError where the action may not begin."""
        if action not in self.ready():
            raise ValueError(f"{action} may not begin now")
        if isinstance(action, WeightSyncStep):
            self._syncing = True
        elif isinstance(action, GpuTurn):
            self._progress[action.component].turning = True
            for name in action.offload:
                self._progress[name].loaded = False
        else:
            self._progress[action.component].begun += 1

    def end(self, action: PlanAction) -> None:
        """Raises ValueError where the action had not begun."""
        if isinstance(action, WeightSyncStep):
            if not self._syncing or action.iteration != self.first + self._synced:
                raise ValueError(f"{action} had not begun")
            self._synced += 1
            self._syncing = False
            return
        progress = self._progress[action.component]
        if isinstance(action, GpuTurn):
            if not progress.turning or action.iteration != self.first + progress.turns:
                raise ValueError(f"{action} had not begun")
            progress.turns += 1
            progress.turning = False
            progress.loaded = True
            return
        number = (action.iteration - self.first) * self.batches + action.batch
        if progress.begun != number + 1 or progress.ended != number:
            raise ValueError(f"{action} had not begun")
        progress.ended += 1

    def check(self) -> None:
        """Raises AssertionError where an invariant is violated."""
        for progress in self._progress.values():
            assert progress.ended <= progress.begun <= progress.ended + 1, f"{progress.name} does two batches at once"
            assert progress.loaded or progress.begun == progress.ended, f"{progress.name} works without its GPUs"
            for parent in progress.parents:
                assert progress.begun <= self._progress[parent].ended, (
                    f"{progress.name} took what {parent} has not made"
                )
        for members in set(self._members.values()):
            at_work = [
                n for n in members if self._progress[n].turning or self._progress[n].begun > self._progress[n].ended
            ]
            assert len(at_work) <= 1, f"{' and '.join(at_work)} are at work on the same GPUs"
        if self._target is not None:
            begun = -(-self._progress[self._target].begun // self.batches)
            assert begun <= self._synced + 1 + self._staleness, f"{self._target} works with weights that are too old"

    def _next(self, progress: _ComponentProgress) -> PlanAction | None:
        if progress.turning or progress.begun > progress.ended:
            return None
        at, batch = divmod(progress.begun, self.batches)
        iteration = self.first + at
        if batch == 0:
            if (self.last is not None and iteration > self.last) or not self._open(progress, at):
                return None
            must_turn = not progress.loaded or not progress.same_engine
            if progress.shares and progress.turns == at and must_turn:
                return GpuTurn(progress.name, iteration, self._to_offload(progress))
            if not self._weights_allow(progress, at):
                return None
        needed = at * self.batches + min((batch // progress.chunk + 1) * progress.chunk, self.batches)
        if any(self._progress[parent].ended < needed for parent in progress.parents):
            return None
        return BatchStep(progress.name, iteration, batch)

    def _open(self, progress: _ComponentProgress, at: int) -> bool:
        """Whether earlier iterations, and the component before it on its GPUs, let it begin."""
        allowed = self.max_open_iterations if self._staleness else 1
        if at - (self.finished - self.first + 1) >= allowed:
            return False
        if progress.before is not None:
            return self._progress[progress.before].ended >= (at + 1) * self.batches
        return self._progress[progress.last].ended >= at * self.batches

    def _weights_allow(self, progress: _ComponentProgress, at: int) -> bool:
        if progress.name == self._source and self._synced < at:
            return False
        return progress.name != self._target or self._synced >= at - self._staleness

    def _to_offload(self, progress: _ComponentProgress) -> tuple[str, ...]:
        if progress.same_engine:
            return ()
        others = (name for name in self._members[progress.name] if name != progress.name)
        return tuple(name for name in others if self._progress[name].loaded)

    def _may_sync(self) -> bool:
        """On-policy the sync runs after the whole iteration, else after the source."""
        assert self._source is not None
        wanted = (self._synced + 1) * self.batches
        if self._staleness:
            return self._progress[self._source].ended >= wanted
        return all(progress.ended >= wanted for progress in self._progress.values())


def _progress(workflow: Workflow, plan: Plan) -> dict[str, _ComponentProgress]:
    members = {name: group.components for group in plan.groups for name in group.components}
    progress_by_name = {}
    for component in workflow.in_order():
        group = members.get(component.name, (component.name,))
        at = group.index(component.name)
        previous = workflow.component(group[at - 1])
        progress_by_name[component.name] = _ComponentProgress(
            name=component.name,
            parents=component.after,
            chunk=min(component.granularity or workflow.batches, workflow.batches),
            before=group[at - 1] if at else None,
            last=group[-1],
            shares=len(group) > 1,
            same_engine=component.engine is not None and component.engine == previous.engine,
            loaded=len(group) == 1,
        )
    return progress_by_name


class PlayedAction(Frozen):
    """A completed action, with its times."""

    action: PlanAction
    start_s: float
    end_s: float


def play(
    order: ExecutionOrder, perform: Callable[[PlanAction, float], float], start_s: float = 0.0
) -> Iterator[PlayedAction]:
    """Execute all actions of an order in simulated parallel time; yields each when it ends.

    `perform` executes an action that begins at a time and returns its seconds. Actions are performed in the order in
    which they begin, so their inputs exist.
    """
    now = start_s
    numbers = count()
    running: list[tuple[float, int, float, PlanAction]] = []
    while True:
        while actions := order.ready():
            for action in actions:
                order.begin(action)
                heapq.heappush(running, (now + perform(action, now), next(numbers), now, action))
        if not running:
            return
        now = running[0][0]
        while running and running[0][0] <= now:
            end_s, _, began_s, action = heapq.heappop(running)
            order.end(action)
            yield PlayedAction(action, began_s, end_s)


def batch_seconds(component: Component, batches: int, seconds: float) -> tuple[float, ...]:
    """Seconds of each batch of a component, from the seconds of all."""
    shares = completed(component.completion, np.arange(batches + 1) / batches)
    return tuple(float(share) for share in np.diff(shares) * seconds)
