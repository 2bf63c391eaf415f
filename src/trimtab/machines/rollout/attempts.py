"""News of attempts: tokens, ends, failures, aborts, and silence.

News of an attempt that is not the current one of its request frees its place on the worker and does nothing else.

Where another client aborts all requests of all engines, it means those that wait here, too: in the engines' own queues
they would be aborted. So nothing is sent to an engine for a moment after such an abort. If all that serve are in that
moment and empty, what waits since before is answered as aborted; an engine that goes on with others takes new ones.
"""

from __future__ import annotations

from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.health import WorkerHealth
from trimtab.machines.rollout.records import RolloutRequest, RolloutWorker, SentAttempt, add_tokens, attempt_key
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.state import RolloutState
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.rollout import End, RequestState, WorkerState

ABORT_HOLD_S = 1.0  # between two aborts of one call


class AttemptEvents:
    """Applies news of attempts to requests and workers."""

    def __init__(
        self, state: RolloutState, requests: RequestTransitions, workers: WorkerTransitions, health: WorkerHealth
    ) -> None:
        self.state = state
        self.requests = requests
        self.workers = workers
        self.health = health

    @on(e.TokensStreamed)
    def streamed(self, event: e.TokensStreamed) -> None:
        found = self._current(event.request, event.attempt)
        if found is None:
            return
        request, sent, worker = found
        request.restart = request.restart or event.restart
        if self._count(request, sent, worker, event.tokens, event.version):
            sent.last = worker.last_response_at = self.state.now
            if request.state is RequestState.sent:
                reason = Reason(ReasonCode.sent, f"tokens come from {worker.id}")
                self.state.set_request_state(request, RequestState.streaming, reason)
            self._update_cost(request, sent, worker)
            self.health.responded(worker)

    @on(e.AttemptFinished)
    def finished(self, event: e.AttemptFinished) -> None:
        found = self._current(event.request, event.attempt)
        if found is None:
            self._release(event.request, event.attempt)
            return
        request, sent, worker = found
        state = self.state
        if worker.version is None:
            self._release(event.request, event.attempt)
            self.requests.requeue(request, f"{worker.id} finished it with unconfirmed weights")
            return
        self._count(request, sent, worker, event.tokens, event.version)
        worker.last_response_at, worker.faults = state.now, 0
        worker.served += 1
        state.service_s.add(state.now - sent.at)
        if request.spec.watched or request.tokens:  # a lease may not report its tokens
            state.router.predictor.learn(request.spec, request.tokens)
        self.health.responded(worker)
        if self.requests.mixes_versions(request):
            self.requests.requeue(request, f"{worker.id} finished it, but not all of it with one version")
        else:
            self.requests.done(request, event.end)
        self._release(event.request, event.attempt)

    @on(e.AttemptFailed)
    def failed(self, event: e.AttemptFailed) -> None:
        """The attempt failed. While an abort is pending, this counts as its end."""
        found = self._end(event.request, event.attempt, event.tokens)
        if found is None:
            return
        request, sent, worker = found
        if request.state is RequestState.moving:
            self.requests.requeue(request)
        elif event.outdated:
            self.requests.requeue(request, event.why)
        elif event.fatal:
            self.requests.fail(request, Reason(ReasonCode.refused, f"{worker.id} rejects the request: {event.why}"))
        else:
            self.requests.count_poison(request, sent, event.engine_died)
            self.requests.broken(request, worker, event.why)
            self.health.fault(worker, event.why)

    @on(e.AbortedExternally)
    def aborted_elsewhere(self, event: e.AbortedExternally) -> None:
        worker = self._aborted(event, event.why or "it was aborted on the engine by another client")
        if worker is not None and not event.paused:
            state = self.state
            if worker.hold_until is None:
                worker.aborted_at = state.now
            worker.hold_until = state.now + ABORT_HOLD_S
            state.update_lane(worker)
            state.touch("w", worker.id)
            self._abort_waiting()

    @on(e.AbortDone)
    def abort_done(self, event: e.AbortDone) -> None:
        self._aborted(event, "it was aborted on the engine by another client")

    def _aborted(self, event: e.AbortedExternally | e.AbortDone, why: str) -> RolloutWorker | None:
        """The worker, if another client aborted it."""
        found = self._end(event.request, event.attempt, event.tokens)
        if found is None:
            return None
        request, _, worker = found
        if request.state is RequestState.moving:
            self.requests.requeue(request)  # engines do not name the client: this is trimtab's own abort
            return None
        self.requests.answer(request, RequestState.done, End.abort, Reason(ReasonCode.passed_on, why))
        return worker

    def _abort_waiting(self) -> None:
        """Answer what waits, if all requests of all engines were aborted."""
        state = self.state
        serving = [worker for worker in state.workers_in(WorkerState.active) if worker.serves]
        if not serving or any(worker.held or worker.hold_until is None for worker in serving):
            return
        began = max(worker.aborted_at for worker in serving)
        reason = Reason(ReasonCode.passed_on, "another client aborted all requests of its engines while it waited")
        for request in state.router.waiting():
            if request.arrived <= began:
                self.requests.answer(request, RequestState.done, End.abort, reason)
        for worker in serving:
            worker.hold_until = None
            state.update_lane(worker)

    def late(self, key: str) -> None:
        """No token for too long, or an abort was not confirmed."""
        state = self.state
        sent = state.attempt(key)
        assert sent is not None
        worker = state.workers[state.worker_by_attempt[key]]
        request = state.requests.get(sent.request)
        mine = request is not None and request.attempt == sent.attempt
        if sent.abort_by is not None:
            sent.orphan = True
            if mine and request is not None and request.state is RequestState.moving:
                self.requests.requeue(request)
            self.health.unresponsive(
                worker, f"it has not confirmed the abort of {sent.request} in {state.rules.abort_s:g} s"
            )
            return
        why = f"no token in {state.rules.stall_s:g} s"
        if not mine or request is None:
            sent.orphan = True
            return
        self.requests.abort(request, Reason(ReasonCode.hung, why))
        self.requests.broken(request, worker, why)
        if worker.last_response_at + state.rules.stall_s <= state.now:
            self.health.unresponsive(worker, why)

    def _current(self, name: str, attempt: int) -> tuple[RolloutRequest, SentAttempt, RolloutWorker] | None:
        """Request, attempt and worker, if this is the current attempt."""
        state = self.state
        request = state.requests.get(name)
        if request is None or request.attempt != attempt or not request.worker:
            return None
        worker = state.workers.get(request.worker)
        sent = None if worker is None else worker.held.get(attempt_key(name, attempt))
        return None if worker is None or sent is None else (request, sent, worker)

    def _end(self, name: str, attempt: int, tokens: int) -> tuple[RolloutRequest, SentAttempt, RolloutWorker] | None:
        """Count the tokens of an attempt and take it off its worker; as `_current` before that."""
        found = self._current(name, attempt)
        if found is not None:
            self._count(*found, tokens, None)
        self._release(name, attempt)
        return found

    def _count(
        self, request: RolloutRequest, sent: SentAttempt, worker: RolloutWorker, tokens: int, version: int | None
    ) -> bool:
        """Count the tokens of this attempt, given as a total; True if there are new ones.

        Tokens made by unconfirmed weights are not counted, whatever version the engine reports.
        """
        total = min(sent.base + max(0, tokens), request.spec.max_tokens)
        if total <= request.tokens or worker.version is None:
            return False
        add_tokens(request.spans, worker.version if version is None else version, total - request.tokens)
        request.tokens = total
        return True

    def _update_cost(self, request: RolloutRequest, sent: SentAttempt, worker: RolloutWorker) -> None:
        left = self.state.router.predictor.remaining(request.spec, request.tokens)
        lane = self.state.router.lanes.get(worker.id)
        if lane is not None:
            lane.load += left - sent.cost
            self.state.router.load_decreased(lane)
        sent.cost = left

    def _release(self, name: str, attempt: int) -> None:
        """An attempt has ended on its worker, current or not."""
        key = attempt_key(name, attempt)
        worker = self.state.workers.get(self.state.worker_by_attempt.get(key, ""))
        if worker is None:
            return
        if key in worker.zombies:
            del worker.zombies[key]
            del self.state.worker_by_attempt[key]
        else:
            self.requests.drop_held(worker, worker.held[key])
            self.workers.settle(worker)
            if worker.hold_until is not None:
                self._abort_waiting()
