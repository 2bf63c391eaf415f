"""Applies a worker count: which workers are called back from draining, woken, started or drained.

The count comes from the policy (`trimtab.machines.rollout.policies.policy`) unless it was set by hand. What must never
happen: fewer ACTIVE workers than the minimum by trimtab's own action, more than the maximum, a worker drained while a
refit includes it, a change without a Reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import LoadSample, PolicyState, SleepCosts
from trimtab.machines.rollout.state import RolloutState
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import ScaleStep, WorkerState

S = WorkerState
STEPS_KEPT = 100


class Scaler:
    """Evaluates the policy and applies its decisions."""

    def __init__(self, state: RolloutState, workers: WorkerTransitions, config: ElasticConfig) -> None:
        scaling.policy_of(config)
        self.state = state
        self.workers = workers
        self.config = config

    # ---- sample ---------------------------------------------------------------------------------------------

    def sample(self) -> LoadSample:
        state = self.state
        active, coming, ready, back = 0, 0, 0, 0
        running, draining, drains, idle = 0, 0, 0, 0
        for worker in state.workers.values():
            load = len(worker.held) + worker.known_outside
            if worker.state is S.active:
                active += 1
                running += load
                idle += load == 0
            elif worker.state is S.draining:
                drains += 1
                draining += load
                back += worker.action is None and not (worker.leaving or worker.reclaimed or worker.paused)
            elif state.will_serve(worker):
                coming += 1
                running += load
            else:
                running += load
                ready += self.workers.available(worker)
        most = max(min(state.max_workers, active + coming + back + ready), 0)
        return LoadSample(
            state.now,
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
            SleepCosts(state.sleep_s.value, state.wake_s.value, state.drain_s.value),
            fresh=all(
                worker.load_fresh_until is not None or not worker.reports_load
                for worker in state.workers_in(S.active, S.draining, S.suspect)
            ),
            idle=idle,
            service_s=state.service_s.value,
        )

    def floor(self) -> int:
        """The minimum now: by plan, or by holds."""
        state = self.state
        return min(max([state.min_workers, *(workers for workers, _ in state.holds.values())]), state.max_workers)

    # ---- manual settings -------------------------------------------------------------------------------------------

    @on(e.ScaleRequested)
    def scale_requested(self, event: e.ScaleRequested) -> None:
        state = self.state
        if not state.min_workers <= event.workers <= state.max_workers:
            hint = f"the plan's range is {state.min_workers} to {state.max_workers}; change that first"
            raise InputError(f"{event.workers} workers", hint=hint)
        state.manual_workers, state.manual_until = event.workers, event.until
        state.manual_why = event.why or "set by hand"
        self.evaluate()

    @on(e.ScaleReleased)
    def scale_released(self, event: e.ScaleReleased) -> None:
        self.state.manual_workers = self.state.manual_until = None
        self.evaluate()

    @on(e.HoldRequested)
    def hold_requested(self, event: e.HoldRequested) -> None:
        if event.workers < 0:
            raise InputError(f"hold {event.name}: {event.workers} workers", hint="0 or more")
        self.state.holds[event.name] = (event.workers, event.until)
        self.evaluate()

    @on(e.HoldReleased)
    def hold_released(self, event: e.HoldReleased) -> None:
        """The policy may drain these workers when it decides to."""
        self.state.holds.pop(event.name, None)
        self.state.touch("", "")

    @on(e.WorkerRangeSet)
    def range_set(self, event: e.WorkerRangeSet) -> None:
        state = self.state
        if not 0 <= event.min_workers <= event.max_workers:
            raise InputError(f"min {event.min_workers}, max {event.max_workers} workers", hint="0 <= min <= max")
        state.min_workers, state.max_workers = event.min_workers, event.max_workers
        if state.manual_workers is not None:
            state.manual_workers = min(max(state.manual_workers, state.min_workers), state.max_workers)
        self.evaluate()

    def status(self) -> dict[str, Any]:
        """Manual settings and the policy's last decision, as plain data."""
        state, last = self.state, self.state.decision
        by_hand = None if state.manual_workers is None else {"workers": state.manual_workers, "why": state.manual_why}
        if by_hand is not None and state.manual_until is not None:
            by_hand["left_s"] = state.manual_until - state.now
        return {
            "by_hand": by_hand,
            "holds": {name: workers for name, (workers, _) in state.holds.items()},
            "decision": None
            if last is None
            else {
                "workers": last.workers,
                "reason": {"code": last.reason.code.value, "sentence": last.reason.sentence},
                "expects": last.expects,
            },
        }

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        state = self.state
        now = state.now
        if state.manual_until is not None and state.manual_until <= now:
            state.manual_workers = state.manual_until = None
        state.holds = {name: hold for name, hold in state.holds.items() if hold[1] is None or hold[1] > now}
        state.next_evaluation = now + state.rules.monitor_s if state.workers else None
        state.touch("", "")
        if not state.workers:
            return
        sample = self.sample()
        after, decision = scaling.consult(PolicyState(self.config, state.policy), sample)
        self.config, state.policy, state.decision = after.config, after.memory, decision
        self._check_outcome(decision.came_true, sample)
        if decision.reason.code is ReasonCode.policy_fault:
            state.emit(e.Warn(decision.reason))
        wanted, reason, expects = decision.workers, decision.reason, decision.expects
        floor = sample.min_workers
        if state.manual_workers is not None:
            wanted = min(max(state.manual_workers, floor), sample.max_workers)
            reason = Reason(ReasonCode.by_hand, f"{state.manual_why}: {state.manual_workers} workers")
            expects = f"{wanted} workers serve"
        elif wanted < floor or (wanted == floor > sample.serving and floor > state.min_workers):
            wanted = floor
            reason = Reason(ReasonCode.held, f"{floor} workers are held ready: {', '.join(state.holds)}")
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
            self.state.emit(e.AnnounceScaleStep(step))

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
        waiting = [worker for worker in self.state.workers_in(S.stale, S.empty) if self.state.will_serve(worker)]
        active = sorted(self.state.workers_in(S.active), key=lambda worker: (worker.outstanding_tokens, -worker.number))
        to_drain = sorted(waiting, key=lambda worker: -worker.number)[:count]
        to_drain += active[: max(0, min(count - len(to_drain), len(active) - self.floor()))]
        for worker in to_drain:
            self.workers.drain(worker, reason)
        return [worker.id for worker in to_drain]
