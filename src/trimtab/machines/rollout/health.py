"""Worker health: suspicion, probes, loss, recovery, outcomes of actions, and actions of other clients on engines.

A suspect keeps its requests and gets no new ones until it has answered: a passing health check proves nothing about a
wedged engine. What must never happen: a worker lost by a tick alone (how long it is unhealthy comes from its health
check; an unanswered probe or an unconfirmed abort was sent to it), and attempts forgotten while its process may run.

Every action has an outcome: nothing stays in progress for ever, and nothing is retried for ever. Late news of an action
that was given up changes nothing.
"""

from __future__ import annotations

from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.records import OngoingAction, RolloutWorker
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.state import RolloutState
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.rollout import WorkerState, WorkerVerb

S = WorkerState


class WorkerHealth:
    """Failures and recovery of workers."""

    def __init__(self, state: RolloutState, requests: RequestTransitions, workers: WorkerTransitions) -> None:
        self.state = state
        self.requests = requests
        self.workers = workers
        self.refits = workers.refits

    # ---- failures ---------------------------------------------------------------------------------------------------

    def fault(self, worker: RolloutWorker, why: str) -> None:
        worker.faults += 1
        if worker.faults >= self.state.rules.faults:
            self.suspect(worker, Reason(ReasonCode.faulty, f"{worker.faults} requests in a row failed: {why}"))

    def unresponsive(self, worker: RolloutWorker, why: str) -> None:
        """It does not answer, though its health check may pass."""
        orphans = sum(attempt.orphan for attempt in worker.held.values())
        if orphans and worker.state in (S.draining, S.stale, S.empty):
            self.lost(worker, Reason(ReasonCode.hung, f"{why}, and its drain or refit waits for that"))
        elif orphans >= self.state.rules.faults:
            self.lost(worker, Reason(ReasonCode.hung, f"{why}, nor that of {orphans - 1} others"))
        else:
            self.suspect(worker, Reason(ReasonCode.hung, why))
            self.refits.update_quiesced(worker)

    @on(e.WorkerUnhealthy)
    def unhealthy(self, event: e.WorkerUnhealthy) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.state not in (S.active, S.draining, S.stale, S.empty, S.suspect):
            return
        rules = self.state.rules
        if event.for_s < rules.suspect_s:
            return
        worker.unhealthy = True
        reason = Reason(ReasonCode.unhealthy, f"{event.why}, for {event.for_s:.3g} s")
        if event.for_s >= rules.lost_s:
            self.lost(worker, reason)
        else:
            self.suspect(worker, reason)

    @on(e.WorkerHealthy)
    def healthy(self, event: e.WorkerHealthy) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None or not worker.unhealthy:
            return
        worker.unhealthy = False
        if worker.state is S.suspect and worker.action is None:
            worker.probes = 0
            self.probe(worker, "its health check passes again")

    def responded(self, worker: RolloutWorker) -> None:
        """Tokens came: a suspect that answers is cleared."""
        if worker.state is S.suspect and not worker.unhealthy and worker.faults < self.state.rules.faults:
            self.recovered(worker, "it answers")

    def suspect(self, worker: RolloutWorker, reason: Reason) -> None:
        """Route nothing new there until it has answered a probe."""
        if worker.state is not S.active:
            return
        self.workers.transition(worker, S.suspect, reason)
        worker.probes = 0
        self.state.evaluate_soon()
        if worker.action is None:
            self.probe(worker, reason.sentence)

    def probe(self, worker: RolloutWorker, why: str) -> None:
        if worker.paused_elsewhere:
            return  # a probe would hang; the resume triggers one
        self.workers.start_action(worker, WorkerVerb.probe, Reason(ReasonCode.faulty, why))

    def probe_failed(self, worker: RolloutWorker, why: str) -> None:
        if worker.state is not S.suspect:
            return
        worker.probes += 1
        if worker.probes >= self.state.rules.tries:
            # Hung: healthy by its own word. A process that is gone fails its health check as well.
            code = ReasonCode.unhealthy if worker.unhealthy else ReasonCode.hung
            self.lost(worker, Reason(code, f"{why}, {worker.probes} times in a row"))
        else:
            worker.retry_at = self.state.now + self.state.rules.back_off_s
            self.state.touch("w", worker.id)

    def recovered(self, worker: RolloutWorker, why: str) -> None:
        """It works again. Weights that became stale meanwhile stay stale."""
        current = worker.version is not None and worker.version == self.state.version
        if worker.state is S.suspect and worker.unhealthy:
            return
        if worker.state is S.suspect and not current:
            reason = Reason(ReasonCode.outdated, f"{why}; its weights are older than the trainer's")
            self.workers.transition(worker, S.stale, reason)
            self.workers.request_refit(worker)
        elif worker.state is S.suspect:
            self.workers.to_active(worker, Reason(ReasonCode.steady, why))
        self.refits.update_quiesced(worker)

    @on(e.WorkerDied)
    def died(self, event: e.WorkerDied) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.state is S.lost:
            return
        if not worker.started and worker.state is S.inactive:
            return
        worker.started = False
        self.lost(worker, Reason(ReasonCode.process_died, event.why))

    def lost(self, worker: RolloutWorker, reason: Reason, *, stop: bool = True) -> None:
        """Give up the worker and everything on it."""
        if worker.state is S.lost:
            return
        state = self.state
        self.workers.transition(worker, S.lost, reason)
        worker.was_lost, worker.version = True, None
        worker.incarnation += 1
        # The same process may come back: asleep or paused as it was, or was about to be.
        worker.asleep = worker.asleep or (worker.action is not None and worker.action.verb is WorkerVerb.sleep)
        worker.unhealthy = False
        worker.faults = worker.probes = 0
        worker.action, worker.load_fresh_until, worker.retry_at = None, None, None
        worker.reports_load = False
        self.requests.lose_all(worker, f"{worker.id} was lost: {reason.sentence}", process_gone=not worker.started)
        if not worker.started and worker.spec.startable:
            self.requests.drop_zombies(worker)
        state.evaluate_soon()
        self.refits.update_quiesced(worker)
        if stop and worker.spec.startable and worker.started:
            sentence = f"its old process must end: {reason.sentence}"
            self.workers.start_action(worker, WorkerVerb.stop, Reason(reason.code, sentence))
        elif worker.leaving:
            self.workers.forget(worker)

    # ---- other clients ----------------------------------------------------------------------------------------------

    @on(e.WorkerUp)
    def came_up(self, event: e.WorkerUp) -> None:
        """Up without a trimtab action."""
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.state is S.starting:
            return
        if event.restarted:
            worker.paused_elsewhere = False
            self.state.update_lane(worker)
        if worker.state is S.lost:
            if worker.action is None:
                self.requests.abort_zombies(worker)
                self.workers.process_started(worker, event.version, "it is back", ours=False)
        elif worker.state is S.inactive:
            if not worker.started or event.restarted:
                worker.was_lost = worker.was_lost or worker.started
                self.workers.process_started(worker, event.version, "it came up by itself", ours=False)
            elif worker.asleep:
                self.workers.woken(worker, event.version, "another client woke it")
        elif event.restarted:
            # When is unknown: the last requests may be on the new process, so they are aborted there, too.
            self.lost(worker, Reason(ReasonCode.process_died, "it was restarted, its requests are gone"), stop=False)
            if worker.id in self.state.workers:
                self.requests.abort_zombies(worker)
                self.workers.process_started(worker, event.version, "it was restarted", ours=False)

    @on(e.WorkerSlept)
    def slept(self, event: e.WorkerSlept) -> None:
        """Another client put it to sleep, and is expected to have aborted what ran there."""
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.state in (S.lost, S.starting, S.inactive):
            return
        worker.action = None
        if worker.state is S.draining and worker.held:
            self.requests.abort_all(worker, Reason(ReasonCode.moved, f"{worker.id} was put to sleep"))
        self.workers.mark_asleep(worker, event.keeps_weights, "another client put it to sleep")

    @on(e.WeightsDiscarded)
    def weights_discarded(self, event: e.WeightsDiscarded) -> None:
        """Its weights are gone: tokens made from now on are invalid."""
        worker = self.state.workers.get(event.worker)
        if worker is None:
            return
        worker.version = None
        if worker.state in (S.lost, S.starting, S.inactive, S.empty):
            return
        reason = Reason(ReasonCode.emptied, "its weights were discarded")
        self.requests.abort_all(worker, Reason(ReasonCode.moved, f"{worker.id}: its weights were discarded"))
        if worker.state is not S.draining:
            self.workers.transition(worker, S.empty, reason)
            self.workers.request_refit(worker)

    @on(e.PausedExternally)
    def paused_elsewhere(self, event: e.PausedExternally) -> None:
        """Another client pauses or resumes it. Requests there wait; none is sent there."""
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.paused_elsewhere == event.on or worker.state is S.lost:
            return
        worker.paused_elsewhere = event.on
        self.state.update_lane(worker)
        if not event.on:
            self.requests.resumed(worker)
            if worker.state is S.suspect and worker.action is None:
                self.probe(worker, "it was resumed")
        sentence = "another client paused it: nothing is sent there" if event.on else "another client resumed it"
        self.state.set_worker_state(worker, worker.state, Reason(ReasonCode.passed_on, sentence))

    @on(e.LoadReported)
    def load_reported(self, event: e.LoadReported) -> None:
        state = self.state
        worker = state.workers.get(event.worker)
        until = event.at + state.rules.load_fresh_s
        if worker is None or until <= state.now:
            return
        worker.outside = max(0, event.running + event.waiting - len(worker.held))
        worker.kv_full = event.kv_used_share >= state.rules.kv_full
        worker.load_fresh_until, worker.reports_load = until, True
        if event.generates:
            worker.generated_at = state.now
        state.touch("w", worker.id)
        self.load_changed(worker)

    def load_changed(self, worker: RolloutWorker) -> None:
        lane = self.state.router.lanes.get(worker.id)
        if lane is not None:
            self.state.update_lane_load(worker, lane)
            self.state.router.changed(lane)
        self.workers.settle(worker)

    # ---- outcomes of actions -----------------------------------------------------------------------------------------

    @on(e.ActionDone)
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
            state.wake_s.add(took)
            self.workers.woken(worker, event.version, f"woken in {took:.3g} s")
        elif action.verb is WorkerVerb.sleep:
            state.sleep_s.add(took)
            self.workers.mark_asleep(worker, worker.spec.sleep_keeps_weights, f"asleep after {took:.3g} s")
        elif action.verb is WorkerVerb.stop:
            self._stopped(worker)
        elif action.verb is WorkerVerb.pause:
            self.refits.update_quiesced(worker)
        elif action.verb is WorkerVerb.resume:
            worker.paused = False
            self.requests.resumed(worker)
            self.workers.activate(worker)
        elif action.verb is WorkerVerb.refit and action.version is not None:
            self.refits.confirm(worker, action.version)
        elif action.verb is WorkerVerb.probe:
            worker.probes = worker.faults = 0
            self.recovered(worker, "it answered a probe")

    @on(e.ActionFailed)
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
            self.refits.update_quiesced(worker)
        elif action.verb is WorkerVerb.resume:
            self.lost(worker, Reason(ReasonCode.faulty, why))
        elif action.verb is WorkerVerb.refit:
            self.refits.member_failed(worker, why)
        elif action.verb is WorkerVerb.probe:
            self.probe_failed(worker, why)

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
            self.lost(worker, Reason(ReasonCode.faulty, why), stop=False)
        else:
            worker.disabled = True

    def _start_failed(self, worker: RolloutWorker, why: str) -> None:
        worker.failures += 1
        self.lost(worker, Reason(ReasonCode.start_failed, why), stop=worker.spec.startable)
        self.workers.schedule_retry(worker, why)

    def _wake_failed(self, worker: RolloutWorker, why: str) -> None:
        """It stays asleep with unknown weights (out of memory, for example)."""
        worker.failures += 1
        worker.version = None
        if worker.failures >= self.state.rules.tries:
            self.lost(worker, Reason(ReasonCode.start_failed, f"{why}, {worker.failures} times in a row"))
            return
        self.workers.transition(worker, S.inactive, Reason(ReasonCode.start_failed, why))
        if worker.leaving:
            self.workers.deactivate(worker)
        else:
            self.workers.schedule_retry(worker, why)

    def late(self, name: str) -> None:
        state = self.state
        worker, now = state.workers[name], state.now
        if worker.load_fresh_until is not None and worker.load_fresh_until <= now:
            worker.load_fresh_until = None
            self.load_changed(worker)
        if worker.hold_until is not None and worker.hold_until <= now:
            worker.hold_until = None
            state.update_lane(worker)
        if worker.action is not None and worker.action.deadline <= now:
            action = worker.action
            self.action_failed(e.ActionFailed(name, action.attempt, f"it took more than {now - action.since:.3g} s"))
        elif worker.drain_deadline is not None and not worker.drain_expired and worker.drain_deadline <= now:
            self.workers.expire_drain(worker)
        elif worker.retry_at is not None and worker.retry_at <= now:
            worker.retry_at = None
            if worker.state is S.suspect and worker.action is None:
                self.probe(worker, worker.reason.sentence)
            else:
                self.workers.request_refit(worker)
                state.evaluate_soon()
        state.touch("w", name)
