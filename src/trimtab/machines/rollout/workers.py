"""Worker transitions of the rollout machine: start, wake, drain, sleep, stop, remove.

Transitions that must not exist: to ACTIVE from STALE, EMPTY or LOST without a confirmed refit. An engine that comes
back may report any version, so a version is only ever what was confirmed, a loss or a discard clears it, and
`to_active` checks nothing else.

What must never happen besides: memory released with requests running (a sleep or stop begins only when nothing is held
there, except on a lost worker); a stop before route off, drain or abort, and sleep; a worker that waits for ever (every
action, drain and abort has a deadline and an outcome).
"""

from __future__ import annotations

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.records import OngoingAction, RolloutWorker, known_worker
from trimtab.machines.rollout.refit import RefitCoordinator
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.state import RolloutState
from trimtab.model.rollout import Owner, WorkerState, WorkerVerb

S = WorkerState

# All edges of the state graph; `transition` asserts them.
EDGES: dict[WorkerState, tuple[WorkerState, ...]] = {
    S.active: (S.draining, S.stale, S.empty, S.suspect, S.inactive, S.lost),
    S.draining: (S.active, S.inactive, S.stale, S.empty, S.lost),
    S.inactive: (S.starting, S.stale, S.empty, S.active, S.lost),
    S.starting: (S.active, S.stale, S.empty, S.inactive, S.draining, S.lost),
    S.stale: (S.active, S.empty, S.draining, S.inactive, S.lost),
    S.empty: (S.active, S.stale, S.draining, S.inactive, S.lost),
    S.suspect: (S.active, S.stale, S.empty, S.draining, S.inactive, S.lost),
    S.lost: (S.starting, S.stale, S.inactive),
}


class WorkerTransitions:
    """Transitions of workers."""

    def __init__(self, state: RolloutState, requests: RequestTransitions) -> None:
        self.state = state
        self.requests = requests
        self.refits = RefitCoordinator(state, requests, self)

    # ---- joining and leaving ----------------------------------------------------------------------------------------

    @on(e.WorkerAdded)
    def added(self, event: e.WorkerAdded) -> None:
        """Add a worker. Idempotent."""
        state, spec = self.state, event.spec
        known = state.workers.get(spec.id)
        if known is not None:
            if known.spec != spec or known.leaving:
                raise InputError(f"there is a worker {spec.id} already", hint="remove it first, or use another name")
            return
        state.joins += 1
        reason = Reason(ReasonCode.joined, "it was added" + ("" if event.up else "; its engine is not started"))
        worker = RolloutWorker(spec, S.inactive, reason, state.now, state.joins, last_response_at=state.now)
        state.workers[spec.id] = worker
        state.set_worker_state(worker, S.inactive, reason)
        if event.up:
            self.process_started(worker, event.version, "it was added with its engine running")
        if state.next_evaluation is None:
            state.evaluate_soon()

    @on(e.WorkerRemoved)
    def removed(self, event: e.WorkerRemoved) -> None:
        worker = known_worker(self.state.workers, event.worker)
        if worker.leaving:
            return
        worker.leaving = True
        reason = Reason(ReasonCode.by_hand, event.why or "it was removed")
        self._route_off(worker, reason, event.deadline_s)

    @on(e.WorkerReclaimed)
    def reclaimed(self, event: e.WorkerReclaimed) -> None:
        state = self.state
        worker = known_worker(state.workers, event.worker)
        if worker.reclaimed:
            return
        active = sum(1 for _ in state.workers_in(S.active))
        if worker.state is S.active and not event.forced and active <= state.min_workers:
            raise InfeasibleError(
                f"worker {worker.id} cannot be lent out: {counted(active, 'worker')} serve, "
                f"and at least {state.min_workers} must",
                hint="wake or add another worker first",
            )
        worker.reclaimed = True
        left_s = max(0.0, event.deadline - state.now - state.rules.abort_s)
        drain_s = left_s if event.full_notice else min(left_s, state.rules.drain_s)
        self._route_off(worker, Reason(ReasonCode.taken, event.why), drain_s)
        state.evaluate_soon()  # a replacement may be needed

    @on(e.WorkerReturned)
    def returned(self, event: e.WorkerReturned) -> None:
        """The worker may be used again; earlier failures are forgotten."""
        worker = known_worker(self.state.workers, event.worker)
        worker.reclaimed = worker.disabled = False
        worker.failures, worker.retry_at = 0, None
        self.state.set_worker_state(worker, worker.state, Reason(ReasonCode.returned, "it may be used again"))
        self.request_refit(worker)
        if worker.state is S.lost and worker.started and worker.spec.startable and worker.action is None:
            reason = Reason(ReasonCode.returned, "it may be used again; its old process is stopped first")
            self.start_action(worker, WorkerVerb.stop, reason)

    def _route_off(self, worker: RolloutWorker, reason: Reason, drain_s: float | None) -> None:
        if worker.state in (S.active, S.stale, S.empty, S.suspect):
            self.drain(worker, reason, drain_s)
        elif worker.state is S.draining:
            state = self.state
            by = state.now + (state.rules.drain_s if drain_s is None else drain_s)
            worker.drain_deadline = by if worker.drain_deadline is None else min(by, worker.drain_deadline)
            state.set_worker_state(worker, S.draining, reason)
            self.settle(worker)
        else:
            self.state.set_worker_state(worker, worker.state, reason)
            self.deactivate(worker)

    # ---- draining ---------------------------------------------------------------------------------------------------

    def drain(self, worker: RolloutWorker, reason: Reason, drain_s: float | None = None) -> None:
        """Take nothing new; at the deadline, remaining requests are aborted and moved."""
        state = self.state
        worker.drain_started_at, worker.drain_expired = state.now, False
        worker.drain_deadline = state.now + (state.rules.drain_s if drain_s is None else drain_s)
        if worker.action is not None and worker.action.verb in (WorkerVerb.probe, WorkerVerb.refit):
            worker.action = None
        self.transition(worker, S.draining, reason)
        if worker.paused:
            self.expire_drain(worker)  # paused requests do not end by themselves
        self.settle(worker)

    def cancel_drain(self, worker: RolloutWorker, reason: Reason) -> bool:
        """Let a draining worker serve again; aborted requests stay moved. False where it cannot."""
        if worker.state is not S.draining or worker.action is not None or worker.leaving or worker.reclaimed:
            return False
        if worker.paused:
            return False
        if self.state.in_refit(worker):
            sentence = f"{reason.sentence}; it waits for the refit's end"
            self.transition(worker, S.stale, Reason(ReasonCode.refitting, sentence))
        elif worker.version is not None and worker.version == self.state.version:
            self.to_active(worker, reason)
        else:
            self.transition(worker, S.stale, Reason(ReasonCode.outdated, f"{reason.sentence}; its weights are older"))
            self.request_refit(worker)
        return True

    def expire_drain(self, worker: RolloutWorker) -> None:
        worker.drain_expired = True
        waited = self.state.now - (worker.drain_started_at or 0.0)
        if self.requests.may_abort() or worker.paused:
            reason = Reason(ReasonCode.moved, f"{worker.id} drains, and its {waited:.3g} s are over")
            self.requests.abort_all(worker, reason)
        if worker.held and not self.requests.may_abort():
            left = f"{counted(len(worker.held), 'request')} after {waited:.3g} s, and trimtab may not abort them"
            self.warn(worker, Reason(ReasonCode.node_draining, f"it drains, with {left}"))
        self.state.touch("w", worker.id)
        self.settle(worker)

    def settle(self, worker: RolloutWorker) -> None:
        """Continue with what waited for requests there to end."""
        if (
            worker.state is S.draining
            and worker.action is None
            and self._empty(worker)
            and not self.state.in_refit(worker)
        ):
            self.deactivate(worker)
        self.refits.update_quiesced(worker)

    def _empty(self, worker: RolloutWorker) -> bool:
        """Whether nothing runs there, of any client. Stale figures prove nothing until the drain has expired."""
        if worker.held:
            return False
        if worker.load_fresh_until is not None:
            return worker.outside == 0
        return worker.drain_expired or not worker.reports_load

    def deactivate(self, worker: RolloutWorker) -> None:
        """Sleep, then stop where it is being removed. Called until nothing is left to do."""
        state, spec = self.state, worker.spec
        if worker.action is not None or worker.state in (S.starting, S.active):
            return
        if worker.state is S.draining and worker.drain_started_at is not None and not worker.held:
            state.drain_s.add(state.now - worker.drain_started_at)
            worker.drain_started_at = None
        # An attached engine is left as it is when its worker is removed.
        ours = state.rules.ownership.sleep is Owner.trimtab and (spec.startable or not worker.leaving)
        up = worker.state is S.draining
        if up and spec.can_sleep and ours and not worker.asleep:
            self.start_action(worker, WorkerVerb.sleep, Reason(ReasonCode.asleep, worker.reason.sentence))
            return
        if spec.startable and worker.started and (worker.leaving or (up and not worker.asleep and not spec.can_sleep)):
            self.start_action(worker, WorkerVerb.stop, Reason(worker.reason.code, worker.reason.sentence))
            return
        if worker.leaving:
            self.forget(worker)
        elif up:
            reason = Reason(ReasonCode.asleep, f"{worker.reason.sentence}: it is routed off")
            self.transition(worker, S.inactive, reason)

    def forget(self, worker: RolloutWorker) -> None:
        """Remove it from the state."""
        state = self.state
        self.requests.lose_all(worker, "it was removed", process_gone=True)
        self.requests.drop_zombies(worker)
        state.lanes.pop(worker.id, None)
        del state.workers[worker.id]

    # ---- waking and starting ----------------------------------------------------------------------------------------

    def available(self, worker: RolloutWorker) -> bool:
        """Whether it can be brought up now."""
        if (
            worker.reclaimed
            or worker.leaving
            or worker.disabled
            or worker.action is not None
            or worker.retry_at is not None
        ):
            return False
        if worker.state is S.lost:
            return worker.spec.startable and not worker.started
        if worker.state is not S.inactive:
            return False
        if not worker.started:
            return worker.spec.startable
        return not worker.asleep or self.state.rules.ownership.sleep is Owner.trimtab

    def bring_up(self, worker: RolloutWorker, reason: Reason) -> None:
        """Start, wake or route on, whichever it needs."""
        if not worker.started:
            self.transition(worker, S.starting, reason)
            worker.started = True  # there may be a process to stop from now on
            self.start_action(worker, WorkerVerb.start, reason, self.state.version)
        elif worker.asleep:
            self.transition(worker, S.starting, reason)
            self.start_action(worker, WorkerVerb.wake, reason)
        else:
            self.woken(worker, None, reason.sentence)

    def process_started(self, worker: RolloutWorker, reported: int | None, why: str, *, ours: bool = True) -> None:
        """A new process. Its weights are current only before the first training step.

        Where another client started it (`ours` false), a sleep or pause in flight may still reach it: it counts as
        asleep and paused as before, and is woken and resumed before it serves.
        """
        state = self.state
        self.requests.drop_zombies(worker)
        worker.started = True
        if ours:
            worker.asleep = worker.paused = worker.paused_elsewhere = False
        worker.incarnation += 1
        worker.version = None
        if worker.asleep:
            self.mark_asleep(worker, False, f"{why}, and was asleep when it was last seen")
        elif worker.leaving or worker.reclaimed:
            self.transition(worker, S.stale, Reason(ReasonCode.outdated, why))
            self.drain(worker, Reason(ReasonCode.taken, "it must not serve any more"), 0.0)
        elif not worker.was_lost and reported == state.version == state.rules.version:
            worker.version = reported
            self.to_active(worker, Reason(ReasonCode.current, f"{why}; version {reported}, as the trainer's"))
        else:
            text = "it reports no version" if reported is None else f"it reports version {reported}"
            sentence = f"{why}; {text}, but version {state.version} is not confirmed"
            self.transition(worker, S.stale, Reason(ReasonCode.outdated, sentence))
            self.request_refit(worker)

    def woken(self, worker: RolloutWorker, reported: int | None, why: str) -> None:
        """The same process as before, awake."""
        state = self.state
        worker.asleep = False
        if reported is not None and worker.version is not None and reported != worker.version:
            worker.version = None
        if worker.leaving or worker.reclaimed:
            self.transition(worker, S.stale, Reason(ReasonCode.outdated, why))
            self.drain(worker, Reason(ReasonCode.taken, "it must not serve any more"), 0.0)
        elif worker.version is None and not worker.spec.sleep_keeps_weights:
            self.transition(worker, S.empty, Reason(ReasonCode.emptied, f"{why}; its weights were discarded"))
            self.request_refit(worker)
        elif worker.version is None or worker.version != state.version:
            has = "its weights are unknown" if worker.version is None else f"it has version {worker.version}"
            sentence = f"{why}; {has}, the trainer is at {state.version}"
            self.transition(worker, S.stale, Reason(ReasonCode.outdated, sentence))
            self.request_refit(worker)
        elif worker.paused:
            self.transition(worker, S.stale, Reason(ReasonCode.current, f"{why}; it is resumed before it serves"))
            self.activate(worker)
        else:
            self.to_active(worker, Reason(ReasonCode.current, f"{why}; version {worker.version}, as the trainer's"))

    def mark_asleep(self, worker: RolloutWorker, keeps_weights: bool, why: str) -> None:
        """It is asleep, or must be treated so: next is a wake or a stop."""
        worker.asleep = True
        worker.load_fresh_until, worker.reports_load = None, False
        if not keeps_weights:
            worker.version = None
        if worker.leaving:
            self.deactivate(worker)
        else:
            self.transition(worker, S.inactive, Reason(ReasonCode.asleep, why))

    # ---- actions ------------------------------------------------------------------------------------------

    def start_action(self, worker: RolloutWorker, verb: WorkerVerb, reason: Reason, version: int | None = None) -> None:
        state = self.state
        assert verb not in (WorkerVerb.sleep, WorkerVerb.stop) or not worker.held or worker.state is S.lost, worker.id
        worker.attempt += 1
        deadline = state.now + self._allowed_s(verb)
        worker.action = OngoingAction(verb, worker.attempt, state.now, deadline, version)
        worker.retry_at = None
        worker.paused = worker.paused or verb is WorkerVerb.pause  # even if it is never confirmed
        state.touch("w", worker.id)
        state.emit(
            e.WorkerAction(worker.id, worker.attempt, verb, deadline, reason, version, worker.spec.sleep_keeps_weights)
        )

    def _allowed_s(self, verb: WorkerVerb) -> float:
        rules = self.state.rules
        return {
            WorkerVerb.start: rules.start_s,
            WorkerVerb.wake: rules.wake_s,
            WorkerVerb.sleep: rules.sleep_s,
            WorkerVerb.stop: rules.stop_s,
            WorkerVerb.pause: rules.pause_s,
            WorkerVerb.resume: rules.pause_s,
            WorkerVerb.refit: rules.refit_s,
            WorkerVerb.probe: rules.probe_s,
        }[verb]

    def schedule_retry(self, worker: RolloutWorker, why: str) -> None:
        """Exponential backoff; disabled after `rules.tries` failures."""
        rules = self.state.rules
        if worker.id not in self.state.workers:
            return
        if worker.failures >= rules.tries:
            worker.disabled = True
            reason = Reason(ReasonCode.restarts_used, f"{why}; {worker.failures} times in a row, it is not retried")
            self.warn(worker, reason)
            return
        worker.retry_at = self.state.now + rules.back_off_s * 2 ** (worker.failures - 1)
        self.state.touch("w", worker.id)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def request_refit(self, worker: RolloutWorker) -> None:
        """Refit a worker that waits for weights, where refits are owned by trimtab."""
        state = self.state
        if state.rules.ownership.refit is not Owner.trimtab or state.refit is not None:
            return
        waits = worker.state in (S.stale, S.empty) and state.will_serve(worker)
        if waits and worker.action is None and worker.retry_at is None:
            version = state.version
            reason = Reason(ReasonCode.refitting, f"it needs version {version}")
            self.start_action(worker, WorkerVerb.refit, reason, version)

    def confirmed(self, worker: RolloutWorker, version: int) -> None:
        """It has the current weights: the only way back to ACTIVE from STALE and EMPTY."""
        worker.version, worker.was_lost, worker.failures = version, False, 0
        worker.disabled = False
        if worker.state is S.empty:
            reason = Reason(ReasonCode.current, f"it has version {version}, and does not serve yet")
            self.transition(worker, S.stale, reason)

    def activate(self, worker: RolloutWorker) -> None:
        """Serve, after a resume where trimtab paused it."""
        if worker.state not in (S.stale, S.empty) or worker.version != self.state.version:
            return
        if worker.paused:
            if worker.action is None:
                reason = Reason(ReasonCode.current, f"it has version {worker.version}")
                self.start_action(worker, WorkerVerb.resume, reason)
            return
        self.to_active(worker, Reason(ReasonCode.current, f"it has version {worker.version}, confirmed"))

    def refit_failed(self, worker: RolloutWorker, why: str) -> None:
        """Its weights are unknown: out of service until a refit succeeds."""
        worker.version = None
        self.requests.abort_all(worker, Reason(ReasonCode.refit_failed, f"{worker.id}: {why}"))
        if worker.state in (S.stale, S.empty):
            self.state.set_worker_state(worker, worker.state, Reason(ReasonCode.refit_failed, why))
        worker.failures += 1
        if self.state.rules.ownership.refit is Owner.trimtab:
            self.schedule_retry(worker, why)

    # ---- transitions ------------------------------------------------------------------------------------------------

    def to_active(self, worker: RolloutWorker, reason: Reason) -> None:
        """The only transition to ACTIVE."""
        assert worker.version is not None, worker.id
        assert worker.version == self.state.version, worker.id
        assert not worker.was_lost, worker.id
        if worker.action is not None and worker.action.verb is WorkerVerb.refit:
            worker.action = None
        self.state.served_version = worker.version
        self.transition(worker, S.active, reason)

    def transition(self, worker: RolloutWorker, state: WorkerState, reason: Reason) -> None:
        """Change state along an existing edge. Its lane opens and closes with it."""
        assert state is worker.state or state in EDGES[worker.state], (worker.id, worker.state, state)
        if state is not S.draining:
            worker.drain_deadline = worker.drain_started_at = None
            worker.drain_expired = False
        self.state.set_worker_state(worker, state, reason)
        self.state.update_lane(worker)

    def warn(self, worker: RolloutWorker, reason: Reason) -> None:
        self.state.emit(e.Warn(reason, worker.id))
        self.state.set_worker_state(worker, worker.state, reason)
