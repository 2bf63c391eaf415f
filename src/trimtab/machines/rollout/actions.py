"""Outcomes of worker actions: success, failure and deadline of each verb.

Every action has an outcome: nothing stays in progress for ever, and nothing is retried for ever. Late news of an action
that was given up changes nothing.
"""

from __future__ import annotations

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.health import WorkerHealth
from trimtab.machines.rollout.records import OngoingAction, RolloutWorker
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.state import RolloutState
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.rollout import WorkerState, WorkerVerb

S = WorkerState


class ActionResults:
    """Applies outcomes of worker actions."""

    def __init__(
        self, state: RolloutState, requests: RequestTransitions, workers: WorkerTransitions, health: WorkerHealth
    ) -> None:
        self.state = state
        self.requests = requests
        self.workers = workers
        self.health = health

    def action_done(self, event: e.ActionDone) -> None:
        worker, action = self._take_action(event.worker, event.attempt)
        if worker is None or action is None:
            return
        state, took = self.state, self.state.now - action.since
        if event.note:
            self.workers.warn(worker, Reason(ReasonCode.faulty, f"{action.verb.value}: {event.note}"))
        if action.verb in (WorkerVerb.start, WorkerVerb.wake):
            worker.failures = 0
        if action.verb is WorkerVerb.start:
            self.workers.process_started(worker, event.version, f"its engine started in {took:.3g} s")
        elif action.verb is WorkerVerb.wake:
            state.counters.wake_s.add(took)
            self.workers.woken(worker, event.version, f"woken in {took:.3g} s")
        elif action.verb is WorkerVerb.sleep:
            state.counters.sleep_s.add(took)
            self.workers.mark_asleep(worker, worker.spec.sleep_keeps_weights, f"asleep after {took:.3g} s")
        elif action.verb is WorkerVerb.stop:
            self._stopped(worker)
        elif action.verb is WorkerVerb.pause:
            self.workers.on_worker_changed(worker)
        elif action.verb is WorkerVerb.resume:
            worker.paused = False
            self.requests.resumed(worker)
            self.workers.activate(worker)
        elif action.verb is WorkerVerb.refit and action.version is not None:
            self.workers.on_confirmed(worker, action.version)
        elif action.verb is WorkerVerb.probe:
            worker.probes = worker.faults = 0
            self.health.recovered(worker, "it answered a probe")

    def action_failed(self, event: e.ActionFailed) -> None:
        worker, action = self._take_action(event.worker, event.attempt)
        if worker is None or action is None:
            return
        why = f"{action.verb.value} failed: {event.why}"
        if action.verb is WorkerVerb.start:
            self._start_failed(worker, why)
        elif action.verb is WorkerVerb.wake:
            self._wake_failed(worker, why)
        elif action.verb is WorkerVerb.sleep:
            # Memory and weights are in an unknown state; it is woken before it serves.
            self.workers.warn(worker, Reason(ReasonCode.faulty, f"{why}; its memory may not be released"))
            self.workers.mark_asleep(worker, False, why)
        elif action.verb is WorkerVerb.stop:
            self._stop_failed(worker, why)
        elif action.verb is WorkerVerb.pause:
            self.requests.abort_all(worker, Reason(ReasonCode.faulty, f"{worker.id}: {why}"))
            self.workers.on_worker_changed(worker)
        elif action.verb is WorkerVerb.resume:
            self.health.lost(worker, Reason(ReasonCode.faulty, why))
        elif action.verb is WorkerVerb.refit:
            self.workers.on_refit_failed(worker, why)
        elif action.verb is WorkerVerb.probe:
            self.health.probe_failed(worker, why)

    def _take_action(self, name: str, attempt: int) -> tuple[RolloutWorker | None, OngoingAction | None]:
        worker = self.state.workers.get(name)
        if worker is None or worker.action is None or worker.action.attempt != attempt:
            return None, None
        action, worker.action = worker.action, None
        self.state.touch("w", name)
        return worker, action

    def _stopped(self, worker: RolloutWorker) -> None:
        self.requests.drop_zombies(worker)
        worker.started = worker.asleep = worker.paused = False
        worker.version = None
        worker.failures = 0 if worker.state is not S.lost else worker.failures
        if worker.leaving:
            self.workers.forget(worker)
        elif worker.state is S.draining:
            self.workers.transition(worker, S.inactive, Reason(ReasonCode.asleep, "its engine was stopped"))

    def _stop_failed(self, worker: RolloutWorker, why: str) -> None:
        """Retry, then give up with a warning."""
        worker.failures += 1
        if worker.failures < self.state.rules.tries:
            self.workers.start_action(worker, WorkerVerb.stop, Reason(ReasonCode.faulty, why))
            return
        self.workers.warn(worker, Reason(ReasonCode.faulty, f"{why}; giving up; it may still hold its memory"))
        if worker.leaving:
            self.workers.forget(worker)
        elif worker.state is not S.lost:
            worker.disabled = True
            self.health.lost(worker, Reason(ReasonCode.faulty, why), stop=False)
        else:
            worker.disabled = True

    def _start_failed(self, worker: RolloutWorker, why: str) -> None:
        worker.failures += 1
        self.health.lost(worker, Reason(ReasonCode.start_failed, why), stop=worker.spec.startable)
        self.workers.schedule_retry(worker, why)

    def _wake_failed(self, worker: RolloutWorker, why: str) -> None:
        """It stays asleep with unknown weights (out of memory, for example)."""
        worker.failures += 1
        worker.version = None
        if worker.failures >= self.state.rules.tries:
            self.health.lost(worker, Reason(ReasonCode.start_failed, f"{why}, {worker.failures} times in a row"))
            return
        self.workers.transition(worker, S.inactive, Reason(ReasonCode.start_failed, why))
        if worker.leaving:
            self.workers.deactivate(worker)
        else:
            self.workers.schedule_retry(worker, why)

    # ---- time -------------------------------------------------------------------------------------------------------

    def due(self, name: str) -> float | None:
        worker = self.state.workers.get(name)
        if worker is None:
            return None
        dues = [worker.retry_at, worker.load_fresh_until]
        if worker.action is not None:
            dues.append(worker.action.deadline)
        if worker.drain_deadline is not None and not worker.drain_expired:
            dues.append(worker.drain_deadline)
        return min((due for due in dues if due is not None), default=None)

    def late(self, name: str) -> None:
        state = self.state
        worker, now = state.workers[name], state.now
        if worker.load_fresh_until is not None and worker.load_fresh_until <= now:
            worker.load_fresh_until = None
            self.health.load_changed(worker)
        if worker.action is not None and worker.action.deadline <= now:
            action = worker.action
            self.action_failed(e.ActionFailed(name, action.attempt, f"it took more than {now - action.since:.3g} s"))
        elif worker.drain_deadline is not None and not worker.drain_expired and worker.drain_deadline <= now:
            self.workers.expire_drain(worker)
        elif worker.retry_at is not None and worker.retry_at <= now:
            worker.retry_at = None
            if worker.state is S.suspect and worker.action is None:
                self.health.probe(worker, worker.reason.sentence)
            else:
                self.workers.request_refit(worker)
                state.evaluate_soon()
        state.touch("w", name)
