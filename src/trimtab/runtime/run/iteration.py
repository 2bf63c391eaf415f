"""Does the acts of one plan with a crew, and keeps the books of them: what flows, what was measured, who has saved.

Calls of components are apart from the books. So whoever drives a run may perform acts one after another, or side by
side in threads; the order (`plan/placement/order.py`) sees to it that no component has two at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from trimtab.model.plan import Plan
from trimtab.model.workflow import Workflow
from trimtab.plan.placement.order import BatchStep, ExecutionOrder, GpuTurn, PlanAction, WeightSyncStep
from trimtab.runtime.run.checkpoints import Checkpointer
from trimtab.runtime.run.component import Batch
from trimtab.runtime.run.components import ComponentSet
from trimtab.runtime.run.measurements import RunMeasurements

Inputs = Callable[[int, int], Any]
_Key = tuple[str, int, int]  # component, iteration, batch


class IterationRunner:
    """Iterations `first` to `last` under one plan, begun at `now_s` of the run's timeline."""

    def __init__(
        self,
        crew: ComponentSet,
        workflow: Workflow,
        plan: Plan,
        saving: Checkpointer,
        *,
        first: int,
        last: int,
        now_s: float = 0.0,
        inputs: Inputs | None = None,
    ) -> None:
        self.crew = crew
        self.plan = plan
        self.order = ExecutionOrder(workflow, plan, first=first, last=last)
        self.measuring = RunMeasurements(workflow, plan, first, now_s)
        self.lock = threading.RLock()
        """Of all that is not a call of a component: order, measuring, and what is private here."""
        self._workflow = workflow
        self._saving = saving
        self._inputs = inputs
        self._takers = {
            c.name: sum(c.name in other.after for other in workflow.components) for c in workflow.components
        }
        self._flowing: dict[_Key, tuple[Any, int]] = {}  # outputs, each with how many have not taken it yet
        self._held: tuple[Any, int] | None = None  # weights that wait until their receiver is between two iterations

    def perform(self, act: PlanAction, now_s: float) -> float:
        """Do an act that begins now; gives the seconds that it takes on the timeline. Saving is not among them."""
        if isinstance(act, GpuTurn):
            took_s = self._turn(act)
        elif isinstance(act, WeightSyncStep):
            took_s = self._sync(act)
        else:
            took_s = self._step(act, now_s)
        with self.lock:
            self.measuring.add(act, now_s, took_s)
        if (
            isinstance(act, BatchStep)
            and act.batch == self._workflow.batches - 1
            and self._saving.is_due(act.iteration)
        ):
            self._saving.save(self.crew, act.component, act.iteration)
        return took_s

    def _step(self, act: BatchStep, now_s: float) -> float:
        with self.lock:
            data = self._data(act)
            held = self._held if act.batch == 0 and self._is_target(act.component) else None
            if held is not None:
                self._held = None
        held_s = self.crew.sync(act.component, *held) if held is not None else 0.0
        batch = Batch(act.iteration, act.batch, self._workflow.batches, data)
        result, took_s = self.crew.step(act.component, batch)
        with self.lock:
            if self._takers[act.component]:
                key = act.component, act.iteration, act.batch
                self._flowing[key] = result.data, self._takers[act.component]
            self.measuring.step(act, now_s + held_s, took_s, result.metrics)
        return held_s + took_s

    def _data(self, act: BatchStep) -> Any:
        """What a batch is made of; data that nobody else waits for are let go."""
        after = self._workflow.component(act.component).after
        if not after:
            return self._inputs(act.iteration, act.batch) if self._inputs is not None else None
        found = {}
        for parent in after:
            key = parent, act.iteration, act.batch
            found[parent], left = self._flowing[key]
            if left == 1:
                del self._flowing[key]
            else:
                self._flowing[key] = found[parent], left - 1
        return found if len(after) > 1 else found[after[0]]

    def _turn(self, act: GpuTurn) -> float:
        left = [(name, self.crew.offload(name)) for name in act.offload]
        onload_s = self.crew.onload(act.component)
        with self.lock:
            for name, offload_s in left:
                self.measuring.offloaded(name, act, offload_s)
            self.measuring.onloaded(act, onload_s)
        return sum(offload_s for _, offload_s in left) + onload_s

    def _sync(self, act: WeightSyncStep) -> float:
        """Weights go at once, or, where their receiver is in the midst of an iteration, when that is over."""
        weights, took_s = self.crew.weights(act.source)
        with self.lock:
            self._held = weights, act.iteration
            if not self.order.is_between(act.target):
                return took_s
            self._held = None
        return took_s + self.crew.sync(act.target, weights, act.iteration)

    def _is_target(self, name: str) -> bool:
        return self._workflow.weight_sync is not None and self._workflow.weight_sync.target == name
