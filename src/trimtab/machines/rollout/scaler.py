"""Applies a worker count: which workers are called back from draining, woken, started or drained.

The count comes from the policy (`trimtab.machines.rollout.policies.policy`) unless it was set by hand. What must never
happen: fewer ACTIVE workers than the minimum by trimtab's own action, more than the maximum, a worker drained while a
refit includes it, a change without a Reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.policy import LoadSample, PolicyState, SleepCosts
from trimtab.machines.rollout.records import RolloutWorker
from trimtab.machines.rollout.state import RolloutState
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.rollout import ScaleStep, WorkerState

S = WorkerState
STEPS_KEPT = 100


class Scaler:
    """Evaluates the policy and applies its decisions."""

    def __init__(self, state: RolloutState, workers: WorkerTransitions, policy_state: PolicyState) -> None:
        self.state = state
        self.workers = workers
        self.policy_state = policy_state
        self.last: scaling.Decision | None = None  # also when it changed nothing

    # ---- sample ---------------------------------------------------------------------------------------------

    def sample(self) -> LoadSample:
        state, counters = self.state, self.state.counters
        active, coming, ready, back = 0, 0, 0, 0
        running, draining, drains, idle = 0, 0, 0, 0
        for worker in state.workers.values():
            if worker.state is S.active:
                load = self._load(worker)
                active += 1
                running += load
                idle += load == 0
            elif worker.state is S.draining:
                drains += 1
                draining += self._load(worker)
                back += self._can_cancel_drain(worker)
            elif state.will_serve(worker):
                coming += 1
                running += self._load(worker)
            else:
                running += self._load(worker)
                ready += self.workers.available(worker)
        most = max(min(counters.max_workers, active + coming + back + ready), 0)
        return LoadSample(
            counters.now,
            state.router.queued + len(state.parked),
            running,
            draining,
            active,
            coming,
            drains,
            ready,
            state.rules.capacity,
            min(self.floor(), most),
            most,
            state.takers,
            SleepCosts(counters.sleep_s.value, counters.wake_s.value, counters.drain_s.value),
            fresh=all(
                worker.load_fresh_until is not None or not worker.reports_load
                for worker in state.workers_in(S.active, S.draining, S.suspect)
            ),
            idle=idle,
            service_s=counters.service_s.value,
        )

    def _load(self, worker: RolloutWorker) -> int:
        """Requests there: own ones, and those of other clients while its figures are fresh."""
        return len(worker.held) + (worker.outside if worker.load_fresh_until is not None else 0)

    def floor(self) -> int:
        """The minimum now: by plan, or by holds."""
        counters = self.state.counters
        return min(
            max([counters.min_workers, *(workers for workers, _ in counters.holds.values())]), counters.max_workers
        )

    def _can_cancel_drain(self, worker: RolloutWorker) -> bool:
        return worker.action is None and not (worker.leaving or worker.reclaimed or worker.paused)

    # ---- manual settings -------------------------------------------------------------------------------------------

    def scale_requested(self, event: e.ScaleRequested) -> None:
        counters = self.state.counters
        if not counters.min_workers <= event.workers <= counters.max_workers:
            raise InputError(
                f"{event.workers} workers",
                hint=f"the plan's range is {counters.min_workers} to {counters.max_workers}; change that first",
            )
        counters.manual_workers, counters.manual_until = event.workers, event.until
        counters.manual_why = event.why or "set by hand"
        self.evaluate()

    def scale_released(self, event: e.ScaleReleased) -> None:
        self.state.counters.manual_workers = self.state.counters.manual_until = None
        self.evaluate()

    def hold_requested(self, event: e.HoldRequested) -> None:
        if event.workers < 0:
            raise InputError(f"hold {event.name}: {event.workers} workers", hint="0 or more")
        self.state.counters.holds[event.name] = (event.workers, event.until)
        self.evaluate()

    def hold_released(self, event: e.HoldReleased) -> None:
        """The policy may drain these workers when it decides to."""
        self.state.counters.holds.pop(event.name, None)
        self.state.touch("", "")

    def range_set(self, event: e.WorkerRangeSet) -> None:
        counters = self.state.counters
        if not 0 <= event.min_workers <= event.max_workers:
            raise InputError(f"min {event.min_workers}, max {event.max_workers} workers", hint="0 <= min <= max")
        counters.min_workers, counters.max_workers = event.min_workers, event.max_workers
        if counters.manual_workers is not None:
            counters.manual_workers = min(max(counters.manual_workers, counters.min_workers), counters.max_workers)
        self.evaluate()

    def status(self) -> dict[str, Any]:
        """Manual settings and the policy's last decision, as plain data."""
        counters, last = self.state.counters, self.last
        by_hand = (
            None
            if counters.manual_workers is None
            else {"workers": counters.manual_workers, "why": counters.manual_why}
        )
        if by_hand is not None and counters.manual_until is not None:
            by_hand["left_s"] = counters.manual_until - counters.now
        return {
            "by_hand": by_hand,
            "holds": {name: workers for name, (workers, _) in counters.holds.items()},
            "decision": None
            if last is None
            else {
                "workers": last.workers,
                "reason": {"code": last.reason.code.value, "sentence": last.reason.sentence},
                "expects": last.expects,
            },
        }

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When the next evaluation or expiry is due."""
        counters = self.state.counters
        dues = [counters.next_evaluation, counters.manual_until, *(until for _, until in counters.holds.values())]
        return min((due for due in dues if due is not None), default=None)

    def evaluate(self) -> None:
        state, counters = self.state, self.state.counters
        now = counters.now
        if counters.manual_until is not None and counters.manual_until <= now:
            counters.manual_workers = counters.manual_until = None
        counters.holds = {name: hold for name, hold in counters.holds.items() if hold[1] is None or hold[1] > now}
        counters.next_evaluation = now + state.rules.monitor_s if state.workers else None
        state.touch("", "")
        if not state.workers:
            return
        sample = self.sample()
        self.policy_state, decision = scaling.consult(self.policy_state, sample)
        self.last = decision
        self._check_outcome(decision.came_true, sample)
        if decision.reason.code is ReasonCode.policy_fault:
            state.instructions.append(e.Warn(decision.reason))
        wanted, reason, expects = decision.workers, decision.reason, decision.expects
        floor = sample.min_workers
        if counters.manual_workers is not None:
            wanted = min(max(counters.manual_workers, floor), sample.max_workers)
            reason = Reason(ReasonCode.by_hand, f"{counters.manual_why}: {counters.manual_workers} workers")
            expects = f"{wanted} workers serve"
        elif wanted < floor or (wanted == floor > sample.serving and floor > counters.min_workers):
            wanted = floor
            reason = Reason(ReasonCode.held, f"{floor} workers are held ready: {', '.join(counters.holds)}")
            expects = f"{floor} workers serve"
        self._apply(wanted, reason, expects, sample)

    def _check_outcome(self, came_true: bool | None, sample: LoadSample) -> None:
        """Whether the last step came true: by the policy's own check, or by count for manual steps and holds."""
        steps = self.state.steps
        if not steps or steps[-1].came_true is not None:
            return
        last = steps[-1]
        if last.reason.code in (ReasonCode.by_hand, ReasonCode.held):
            under_way = sample.starting or sample.draining_workers
            came_true = None if under_way else sample.active == last.workers
        if came_true is not None:
            steps[-1] = replace(last, came_true=came_true)

    def _apply(self, wanted: int, reason: Reason, expects: str, sample: LoadSample) -> None:
        before = sample.serving
        changed: list[str] = []
        if wanted > before:
            changed = self._scale_up(wanted - before, reason)
        elif wanted < before and self.state.refit is None:
            changed = self._scale_down(before - wanted, reason)
        if changed:
            step = ScaleStep(self.state.now, before, wanted, reason, expects, tuple(changed))
            self.state.steps.append(step)
            del self.state.steps[:-STEPS_KEPT]
            self.state.instructions.append(e.AnnounceScaleStep(step))

    def _scale_up(self, count: int, reason: Reason) -> list[str]:
        """Draining workers first, since they are warm; then asleep, then stopped, lost ones last."""
        changed: list[str] = []
        for worker in sorted(self.state.workers_in(S.draining), key=lambda worker: (-len(worker.held), worker.number)):
            if len(changed) < count and self.workers.cancel_drain(worker, reason):
                changed.append(worker.id)
        rank = {S.inactive: 0, S.lost: 1}
        ready = [worker for worker in self.state.workers_in(S.inactive, S.lost) if self.workers.available(worker)]
        ready.sort(key=lambda worker: (rank[worker.state], not worker.started, worker.asleep, worker.number))
        for worker in ready[: count - len(changed)]:
            self.workers.bring_up(worker, reason)
            changed.append(worker.id)
        return changed

    def _scale_down(self, count: int, reason: Reason) -> list[str]:
        """Workers that wait for weights, then the least loaded; never below the floor."""
        load = self.state.load_of
        waiting = [worker for worker in self.state.workers_in(S.stale, S.empty) if self.state.will_serve(worker)]
        active = sorted(self.state.workers_in(S.active), key=lambda worker: (load(worker), -worker.number))
        to_drain = sorted(waiting, key=lambda worker: -worker.number)[:count]
        to_drain += active[: max(0, min(count - len(to_drain), len(active) - self.floor()))]
        for worker in to_drain:
            self.workers.drain(worker, reason)
        return [worker.id for worker in to_drain]
