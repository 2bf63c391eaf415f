"""Request transitions of the rollout machine: accepted, sent, moved with partial output, answered exactly once.

What must never happen: a second answer, or none; a retry of a request that another client aborted; tokens counted twice
at an abort; a request sent to a worker that the router has not open. The transition that must not exist is back from
answered: news of an attempt that is not the current one frees its place on the worker and does nothing else.
"""

from __future__ import annotations

from trimtab.core.errors import InputError, meant
from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.records import RolloutRequest, RolloutWorker, SentAttempt, attempt_key
from trimtab.machines.rollout.routing import RoutingChoice
from trimtab.machines.rollout.state import RolloutState
from trimtab.model.rollout import ANSWERED, End, Owner, RequestSpec, RequestState, WorkerState

MAX_RETRY_AFTER_S = 60.0
RUNNING = (RequestState.sent, RequestState.streaming)


class RequestTransitions:
    """Transitions of requests."""

    def __init__(self, state: RolloutState) -> None:
        self.state = state

    # ---- arrival ----------------------------------------------------------------------------------------------------

    @on(e.RequestArrived)
    def arrived(self, event: e.RequestArrived) -> None:
        state, spec = self.state, event.spec
        queue = state.router.queues.get(spec.class_)
        if queue is None:
            hint = meant(spec.class_, state.router.queues, f"classes: {', '.join(state.router.queues)}")
            raise InputError(f"request {spec.id}: there is no class {spec.class_}", hint=hint)
        if spec.id in state.requests or spec.id in state.past or spec.id in state.coalesced:
            raise InputError(f"there is a request {spec.id} already", hint="each request has an id of its own")
        if spec.key and self._same_key(spec):
            return
        if len(queue.waiting) + state.parked_by_class[spec.class_] >= queue.spec.queue_limit:
            self._refuse(spec, queue.spec.queue_limit)
            return
        now = state.now
        state.arrivals += 1
        deadline = spec.deadline
        if deadline is None and queue.spec.deadline_s is not None:
            deadline = now + queue.spec.deadline_s
        reason = Reason(ReasonCode.queued, "it arrived")
        request = RolloutRequest(
            spec, state.arrivals, RequestState.queued, reason, now, now, deadline, recipients=[spec.id]
        )
        state.requests[spec.id] = request
        if spec.key:
            state.keys[spec.key] = spec.id
        self._queue(request, reason)

    def _same_key(self, spec: RequestSpec) -> bool:
        """Whether the request shares the answer of another one with its idempotency key."""
        state = self.state
        first = state.keys.get(spec.key)
        if first is None:
            return False
        known = state.requests.get(first) or state.past[first]
        if (known.spec.prompt_tokens, known.spec.max_tokens) != (spec.prompt_tokens, spec.max_tokens):
            raise InputError(
                f"request {spec.id}: key {spec.key} belongs to request {first}, which has another prompt or limit",
                hint="use one idempotency key for each distinct request",
            )
        if known.state not in ANSWERED:
            known.recipients.append(spec.id)
            state.coalesced[spec.id] = first
            return True
        kept = state.now - known.since <= state.rules.key_kept_s
        if known.end not in (End.stop, End.length, End.abort) or not kept:
            return False  # failures are not shared: the request is tried again
        reason = Reason(known.reason.code, f"the answer to request {first}, which has the same key")
        state.answered += 1
        state.emit(e.AnswerRequest(spec.id, known.end, known.tokens, tuple(known.spans), reason, first))
        return True

    def _refuse(self, spec: RequestSpec, limit: int) -> None:
        state = self.state
        state.refused += 1
        service_s = state.service_s.value or 1.0
        capacity = sum(lane.limit for lane in state.router.lanes.values()) or 1
        wait = min(max(service_s * state.router.queued / capacity, 0.1), MAX_RETRY_AFTER_S)
        reason = Reason(ReasonCode.queue_full, f"{counted(limit, 'request')} of class {spec.class_} wait already")
        state.emit(e.RefuseRequest(spec.id, reason, wait))

    # ---- queue and send --------------------------------------------------------------------------------------------

    def _queue(self, request: RolloutRequest, reason: Reason) -> None:
        """Queue it for a worker or for a version, or fail it."""
        state, spec, version = self.state, request.spec, self.state.version
        request.worker = ""
        if request.deadline is not None and request.deadline <= state.now:
            self.fail(request, Reason(ReasonCode.too_late, "its deadline has passed"))
        elif spec.version is not None and spec.version < version:
            gone = f"it asked for version {spec.version}, the trainer is at {version}"
            self.fail(request, Reason(ReasonCode.version_gone, gone))
        elif state.is_early(request):
            wanted = max(wish for wish in (spec.version, spec.at_least) if wish is not None)
            state.park(request)
            sentence = f"it waits for version {wanted}, the trainer is at {version}"
            state.set_request_state(request, RequestState.queued, Reason(ReasonCode.version_awaited, sentence))
            state.touch("r", request.id)
        else:
            state.set_request_state(request, RequestState.queued, reason)
            state.router.push(request)
            state.touch("r", request.id)

    def version_changed(self) -> None:
        """Re-evaluate requests that ask for a version."""
        state = self.state
        pinned = [
            request
            for request in state.router.waiting()
            if request.spec.version is not None or request.spec.at_least is not None
        ]
        for request in sorted([*state.parked.values(), *pinned], key=lambda request: request.number):
            state.unpark(request)
            state.router.drop(request)
            self._queue(request, Reason(ReasonCode.queued, f"the trainer is at version {state.version}"))

    def dispatch(self) -> None:
        choose = self.state.router.choose
        while (choice := choose()) is not None:
            self._queued_to_sent(choice)

    def _queued_to_sent(self, choice: RoutingChoice) -> None:
        state, request, now = self.state, choice.request, self.state.now
        worker, spec = state.workers[choice.worker], request.spec
        assert worker.state is WorkerState.active, worker.id
        assert worker.version == state.version, worker.id
        if not spec.spans and request.spans and request.spans[-1].version != worker.version:
            request.tokens, request.spans = 0, []
        request.attempt += 1
        request.worker = worker.id
        cost = state.router.predictor.cost(spec, request.tokens)
        key = attempt_key(request.id, request.attempt)
        worker.held[key] = SentAttempt(request.id, request.attempt, request.tokens, now, now, cost)
        state.worker_by_attempt[key] = worker.id
        state.router.sent(request, worker.id, cost)
        why = "its prefix is there" if choice.prefix_hit else "it has the fewest tokens outstanding"
        reason = Reason(ReasonCode.sent, f"to {worker.id}: {why}")
        state.set_request_state(request, RequestState.sent, reason)
        state.touch("s", key)
        state.emit(
            e.SendRequest(
                request.id,
                request.attempt,
                worker.id,
                request.tokens,
                spec.max_tokens - request.tokens,
                max(0, spec.min_tokens - request.tokens),
                state.version,
                reason,
            )
        )

    @on(e.RequestCancelled)
    def cancelled(self, event: e.RequestCancelled) -> None:
        """Drop one recipient; the request ends with the last one."""
        state = self.state
        first = state.coalesced.pop(event.request, event.request)
        request = state.requests.get(first)
        if request is None or event.request not in request.recipients:
            return
        reason = Reason(ReasonCode.cancelled, event.why or "the client cancelled it")
        if len(request.recipients) == 1:
            self._end_now(request, RequestState.failed, End.cancelled, reason)
            return
        request.recipients.remove(event.request)
        state.answered += 1
        of = "" if event.request == first else first
        state.emit(e.AnswerRequest(event.request, End.cancelled, request.tokens, tuple(request.spans), reason, of))

    # ---- aborts, failures and losses --------------------------------------------------------------------------------

    def abort_and_requeue(self, request: RolloutRequest, reason: Reason, *, restart: bool = False) -> None:
        """Abort its attempt and continue elsewhere with its tokens (`restart`: from the prompt)."""
        if request.state in RUNNING or request.state is RequestState.moving:
            request.restart = request.restart or restart
        if request.state in RUNNING:
            self.abort(request, reason)
            request.moves += 1
            self.state.set_request_state(request, RequestState.moving, reason)

    def abort_all(self, worker: RolloutWorker, reason: Reason) -> None:
        for sent in list(worker.held.values()):
            request = self.state.requests.get(sent.request)
            if request is not None and request.attempt == sent.attempt:
                self.abort_and_requeue(request, reason)

    def lose_all(self, worker: RolloutWorker, why: str, *, process_gone: bool) -> None:
        """Give up all attempts there. They are kept as zombies where a process may still run them.

        That may be a new one: an engine that another client starts may have been back before its death was heard.
        """
        state = self.state
        for key, sent in list(worker.held.items()):
            request = state.requests.get(sent.request)
            self.drop_held(worker, sent)
            if not (process_gone and worker.spec.startable):
                sent.orphan = True
                worker.zombies[key] = sent
                state.worker_by_attempt[key] = worker.id
            if request is None or request.attempt != sent.attempt or not request.worker:
                continue
            if request.state is RequestState.moving:
                self.requeue(request)
            else:
                self.count_poison(request, sent, process_gone)
                self.broken(request, worker, why)

    def count_poison(self, request: RolloutRequest, sent: SentAttempt, gone: bool) -> None:
        """Count engines that died of it, so that one request cannot take down all of them."""
        if not gone or request.tokens > sent.base:
            request.poison_count = 0
        elif request.avoid != request.worker:  # another engine than the last one
            request.poison_count += 1

    def drop_zombies(self, worker: RolloutWorker) -> None:
        for key in worker.zombies:
            del self.state.worker_by_attempt[key]
        worker.zombies = {}

    def abort_zombies(self, worker: RolloutWorker) -> None:
        """The process is back: abort what it may still run; it counts as held until that has ended."""
        state = self.state
        worker.held, worker.zombies = worker.zombies, {}
        for key, sent in worker.held.items():
            sent.orphan, sent.abort_by = False, state.now + state.rules.abort_s
            state.touch("s", key)
            reason = Reason(ReasonCode.returned, f"{worker.id} was lost, and its requests were moved")
            state.emit(e.AbortAttempt(sent.request, sent.attempt, worker.id, sent.abort_by, reason))

    def abort(self, request: RolloutRequest, reason: Reason) -> None:
        state, key = self.state, attempt_key(request.id, request.attempt)
        sent = state.attempt(key)
        if sent is not None and sent.abort_by is None:
            sent.abort_by = state.now + state.rules.abort_s
            state.touch("s", key)
            state.emit(e.AbortAttempt(request.id, request.attempt, request.worker, sent.abort_by, reason))

    def broken(self, request: RolloutRequest, worker: RolloutWorker, why: str) -> None:
        """Requeue it with its tokens, unless it is complete or failed too often."""
        request.breaks += 1
        request.avoid = worker.id
        if request.poison_count >= self.state.rules.poison_count:
            engines = counted(request.poison_count, "engine")
            sentence = f"{engines} in a row died before its first token, last {worker.id}: {why}"
            self.fail(request, Reason(ReasonCode.retries_used, sentence))
        elif request.breaks > self.state.rules.retries and request.tokens < request.spec.max_tokens:
            times = counted(request.breaks, "time")
            self.fail(request, Reason(ReasonCode.retries_used, f"it failed {times}, last on {worker.id}: {why}"))
        else:
            self.requeue(request, f"it failed on {worker.id}: {why}")

    def requeue(self, request: RolloutRequest, why: str | None = None) -> None:
        """Continue on another worker. `why` None: as its move says."""
        spec, why = request.spec, request.reason.sentence if why is None else why
        restart = request.restart or self.mixes_versions(request)
        if request.tokens >= spec.max_tokens and not restart:
            self.done(request, End.length)
            return
        if request.tokens and (restart or not spec.resumable):
            sentence = f"{why}; it restarts from the prompt, {request.tokens} tokens are dropped"
            reason = Reason(ReasonCode.restarted, sentence)
            request.tokens, request.spans = 0, []
        else:
            reason = Reason(ReasonCode.moved, f"{why}; it continues with its {request.tokens} tokens")
        request.restart = False
        self._queue(request, reason)

    def mixes_versions(self, request: RolloutRequest) -> bool:
        """Whether several versions made it though it must be one: a refit that trimtab could not abort for."""
        pin = request.spec.version
        if pin is not None and any(span.version != pin for span in request.spans):
            return True
        return not request.spec.spans and len(request.spans) > 1

    # ---- answers ---------------------------------------------------------------------------------------------------

    def done(self, request: RolloutRequest, end: End) -> None:
        sentence = f"{counted(request.tokens, 'token')} in {counted(request.attempt, 'attempt')}"
        self.answer(request, RequestState.done, end, Reason(ReasonCode.completed, sentence))

    def fail(self, request: RolloutRequest, reason: Reason) -> None:
        self.answer(request, RequestState.failed, End.failed, reason)

    def _end_now(self, request: RolloutRequest, end_state: RequestState, end: End, reason: Reason) -> None:
        if request.worker:
            self.abort(request, reason)
        self.answer(request, end_state, end, reason)

    def answer(self, request: RolloutRequest, end_state: RequestState, end: End, reason: Reason) -> None:
        """The only place where a request ends: every recipient gets one answer."""
        state = self.state
        del state.requests[request.id]
        state.unpark(request)
        state.router.drop(request)
        request.end, request.worker = end, ""
        state.set_request_state(request, end_state, reason)
        spans = tuple(request.spans)
        for name in request.recipients:
            state.coalesced.pop(name, None)
            of = "" if name == request.id else request.id
            state.emit(e.AnswerRequest(name, end, request.tokens, spans, reason, of))
        state.answered += len(request.recipients)
        request.recipients = []
        state.past[request.id] = request
        while len(state.past) > state.rules.answers_kept:
            old = state.past.pop(next(iter(state.past)))
            if state.keys.get(old.spec.key) == old.id:
                del state.keys[old.spec.key]

    # ---- time ------------------------------------------------------------------------------------------------------

    def late(self, name: str) -> None:
        request = self.state.requests[name]
        waited = self.state.now - request.arrived
        reason = Reason(ReasonCode.too_late, f"not done after {waited:.3g} s; last: {request.reason.sentence}")
        self._end_now(request, RequestState.failed, End.failed, reason)

    def drop_held(self, worker: RolloutWorker, sent: SentAttempt) -> None:
        key = attempt_key(sent.request, sent.attempt)
        del worker.held[key]
        del self.state.worker_by_attempt[key]
        lane = self.state.router.lanes.get(worker.id)
        if lane is not None:
            lane.count -= 1
            lane.load -= sent.cost
            self.state.router.changed(lane)

    def resumed(self, worker: RolloutWorker) -> None:
        """The worker runs again: stall timers of its requests restart."""
        worker.last_response_at = self.state.now
        for key, sent in worker.held.items():
            sent.last = self.state.now
            self.state.touch("s", key)

    def may_abort(self) -> bool:
        return self.state.rules.ownership.abort is Owner.trimtab
