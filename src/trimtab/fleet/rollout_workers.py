"""Workers of the rollout machine: started, woken, drained, put to sleep, suspected, lost, and back.

Called by the machine for events about workers, and by the rooms of requests, refits and scaling. The transitions that
must not exist are those to ACTIVE from STALE, EMPTY or LOST without a confirmed refit: an engine that comes back
reports whatever version it likes, and every answer it gave would be of weights that nobody trains any more. So a
version is only ever what was confirmed, a loss or a discard takes it away, and `_to_active` looks at nothing else.

What must never happen besides: memory released with requests running (a sleep or stop begins only when nothing is held
there, but for a worker that is lost anyway); a stop before route off, drain or abort, and sleep; a worker that waits
for ever (every act, drain and cut has a deadline, with what follows).
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab.fleet import rollout_events as e
from trimtab.fleet.rollout_books import Books
from trimtab.fleet.rollout_records import Doing, Worker, counted, known_worker
from trimtab.fleet.rollout_requests import Requests
from trimtab.model.errors import InfeasibleError, InputError
from trimtab.model.reason import Code, Reason
from trimtab.model.rollout import Owner, Verb, WorkerState

S = WorkerState

# Every edge there is. What is not here does not exist, and `Books` refuses it.
EDGES: dict[WorkerState, tuple[WorkerState, ...]] = {
    S.active: (S.draining, S.stale, S.empty, S.suspect, S.inactive, S.lost),
    S.draining: (S.active, S.inactive, S.stale, S.empty, S.lost),
    S.inactive: (S.starting, S.stale, S.empty, S.active, S.lost),
    S.starting: (S.active, S.stale, S.empty, S.inactive, S.draining, S.lost),
    S.stale: (S.active, S.empty, S.draining, S.inactive, S.lost),
    S.empty: (S.active, S.stale, S.draining, S.inactive, S.lost),
    S.suspect: (S.active, S.stale, S.empty, S.draining, S.inactive, S.lost),
    S.lost: (S.starting, S.stale),
}


class Workers:
    """Lives of workers."""

    def __init__(self, books: Books, requests: Requests) -> None:
        self.books = books
        self.requests = requests
        # What refits do when a worker changes; set by the machine.
        self.on_quieter: Callable[[Worker], None] = lambda worker: None
        self.on_confirmed: Callable[[Worker, int], None] = lambda worker, version: None
        self.on_refit_failed: Callable[[Worker, str], None] = lambda worker, why: None
        self.in_refit: Callable[[Worker], bool] = lambda worker: False

    # ---- joining and leaving ---------------------------------------------------------------------------------------

    def added(self, event: e.WorkerAdded) -> None:
        """A worker more. The same again changes nothing."""
        books, spec = self.books, event.spec
        known = books.workers.get(spec.id)
        if known is not None:
            if known.spec != spec or known.leaving:
                raise InputError(
                    f"there is a worker {spec.id} already", hint="remove it first, or give this one another name"
                )
            return
        books.rest.joins += 1
        reason = Reason(Code.joined, "it was added" + ("" if event.up else "; its engine is not started"))
        worker = Worker(spec, S.inactive, reason, books.rest.now, books.rest.joins, heard=books.rest.now)
        books.workers[spec.id] = worker
        books.write_worker(worker, S.inactive, reason)
        if event.up:
            self._arrives(worker, event.version, "it was added with its engine running")
        if books.rest.next_look is None:
            books.look_soon()

    def removed(self, event: e.WorkerRemoved) -> None:
        """To go for good, in order."""
        worker = known_worker(self.books.workers, event.worker)
        if worker.leaving:
            return
        worker.leaving = True
        reason = Reason(Code.by_hand, event.why or "it is to go")
        self._route_off(worker, reason, event.deadline_s)

    def taken(self, event: e.WorkerTaken) -> None:
        """Given to others, with notice."""
        books = self.books
        worker = known_worker(books.workers, event.worker)
        if worker.taken:
            return
        if worker.state is S.active and not event.forced and books.count(S.active) <= books.rest.least:
            raise InfeasibleError(
                f"worker {worker.id} cannot be taken: {counted(books.count(S.active), 'worker')} serve, "
                f"and at least {books.rest.least} must",
                hint="wake or add another one first",
            )
        worker.taken = True
        left_s = max(0.0, event.deadline - books.rest.now - books.rules.abort_s)
        self._route_off(worker, Reason(Code.taken, event.why), min(left_s, books.rules.drain_s))

    def given(self, event: e.WorkerGiven) -> None:
        """May be used again; whatever failed before is forgiven."""
        worker = known_worker(self.books.workers, event.worker)
        worker.taken = worker.out = False
        worker.failures, worker.try_at = 0, None
        self.books.write_worker(worker, worker.state, Reason(Code.returned, "it may be used again"))
        self.wants_refit(worker)
        if worker.state is S.lost and worker.started and worker.spec.startable and worker.doing is None:
            self.act(worker, Verb.stop, Reason(Code.returned, "it may be used again; what is left of it goes first"))

    def _route_off(self, worker: Worker, reason: Reason, drain_s: float | None) -> None:
        if worker.state in (S.active, S.stale, S.empty, S.suspect):
            self.drain(worker, reason, drain_s)
        elif worker.state is S.draining:
            books = self.books
            by = books.rest.now + (books.rules.drain_s if drain_s is None else drain_s)
            worker.drain_by = by if worker.drain_by is None else min(by, worker.drain_by)
            books.write_worker(worker, S.draining, reason)
            self.settle(worker)
        else:
            self.books.write_worker(worker, worker.state, reason)
            self._put_away(worker)

    # ---- draining --------------------------------------------------------------------------------------------------

    def drain(self, worker: Worker, reason: Reason, drain_s: float | None = None) -> None:
        """Take nothing new; what is left at the deadline is cut and goes elsewhere."""
        books = self.books
        worker.drain_began, worker.drain_cut = books.rest.now, False
        worker.drain_by = books.rest.now + (books.rules.drain_s if drain_s is None else drain_s)
        if worker.doing is not None and worker.doing.verb in (Verb.probe, Verb.refit):
            worker.doing = None
        self._become(worker, S.draining, reason)
        if worker.paused:
            self._cut_drain(worker)  # what is paused here will not end by itself
        self.settle(worker)

    def call_back(self, worker: Worker, reason: Reason) -> bool:
        """A draining worker serves again. What is being cut goes elsewhere all the same."""
        if worker.state is not S.draining or worker.doing is not None or worker.leaving or worker.taken:
            return False
        if worker.paused:
            return False
        if worker.version is not None and worker.version == self.books.rest.version:
            self._to_active(worker, reason)
        else:
            self._become(worker, S.stale, Reason(Code.outdated, f"{reason.sentence}; its weights are older"))
            self.wants_refit(worker)
        return True

    def _cut_drain(self, worker: Worker) -> None:
        worker.drain_cut = True
        waited = self.books.rest.now - (worker.drain_began or 0.0)
        if self.requests.may_cut() or worker.paused:
            self.requests.cut_all(worker, Reason(Code.moved, f"{worker.id} drains, and {waited:.3g} s are over"))
        if worker.held and not self.requests.may_cut():
            left = f"{counted(len(worker.held), 'request')} after {waited:.3g} s, and cutting them is not trimtab's"
            self.warn(worker, Reason(Code.node_draining, f"it drains, with {left}"))
        self.books.touch("w", worker.id)
        self.settle(worker)

    def settle(self, worker: Worker) -> None:
        """Something there has ended: go on with whatever waited for it."""
        if worker.state is S.draining and worker.doing is None and self._empty(worker) and not self.in_refit(worker):
            self._put_away(worker)
        self.on_quieter(worker)

    def _empty(self, worker: Worker) -> bool:
        """Whether nothing runs there, ours or others'. Old figures are no proof, until the drain's time is over."""
        if worker.held:
            return False
        if worker.load_until is not None:
            return worker.outside == 0
        return worker.drain_cut or not worker.load_asked

    def _put_away(self, worker: Worker) -> None:
        """Nothing runs there: sleep, then stop where it is to go for good. Called until nothing is left to do."""
        books, spec = self.books, worker.spec
        if worker.doing is not None or worker.state in (S.starting, S.active):
            return
        if worker.state is S.draining and worker.drain_began is not None and not worker.held:
            books.rest.drain_s.add(books.rest.now - worker.drain_began)
            worker.drain_began = None
        ours = books.rules.ownership.sleep is Owner.trimtab
        up = worker.state is S.draining
        if up and spec.can_sleep and ours and not worker.asleep:
            self.act(worker, Verb.sleep, Reason(Code.asleep, worker.reason.sentence))
            return
        if spec.startable and worker.started and (worker.leaving or (up and not worker.asleep and not spec.can_sleep)):
            self.act(worker, Verb.stop, Reason(worker.reason.code, worker.reason.sentence))
            return
        if worker.leaving:
            self._forget(worker)
        elif up:
            self._become(worker, S.inactive, Reason(Code.asleep, f"{worker.reason.sentence}: it is routed off"))

    def _forget(self, worker: Worker) -> None:
        books = self.books
        self.requests.lose_all(worker, "it was removed", certain=True)
        self.requests.lay_ghosts(worker)
        books.router.close(worker.id)
        del books.workers[worker.id]

    # ---- waking and starting ---------------------------------------------------------------------------------------

    def ready(self, worker: Worker) -> bool:
        """Whether it can be had: nothing is being done to it, and nothing speaks against it."""
        if worker.taken or worker.leaving or worker.out or worker.doing is not None or worker.try_at is not None:
            return False
        if worker.state is S.lost:
            return worker.spec.startable and not worker.started
        if worker.state is not S.inactive:
            return False
        if not worker.started:
            return worker.spec.startable
        return not worker.asleep or self.books.rules.ownership.sleep is Owner.trimtab

    def bring_up(self, worker: Worker, reason: Reason) -> None:
        """Start it, wake it, or route it on, whichever it needs."""
        if not worker.started:
            self._become(worker, S.starting, reason)
            worker.started = True  # from now on there may be something to stop
            self.act(worker, Verb.start, reason, self.books.rest.version)
        elif worker.asleep:
            self._become(worker, S.starting, reason)
            self.act(worker, Verb.wake, reason)
        else:
            self._woken(worker, None, reason.sentence)

    def _arrives(self, worker: Worker, reported: int | None, why: str, *, new: bool = True) -> None:
        """A process that was not there before, or (`new` false) is seen again after it was lost.

        Its weights are the trainer's only where nobody has trained yet.
        """
        books = self.books
        self.requests.lay_ghosts(worker)
        worker.started, worker.asleep = True, False
        if new:
            worker.paused = worker.paused_elsewhere = False
        worker.incarnation += 1
        worker.version = None
        if worker.leaving or worker.taken:
            worker.version = None
            self._become(worker, S.stale, Reason(Code.outdated, why))
            self.drain(worker, Reason(Code.taken, "it is not to serve any more"), 0.0)
        elif not worker.was_lost and reported == books.rest.version == books.rules.version:
            worker.version = reported
            self._to_active(worker, Reason(Code.current, f"{why}; version {reported}, as the trainer's"))
        else:
            said = "it reports no version" if reported is None else f"it reports version {reported}"
            sentence = f"{why}; {said}, but nobody has confirmed that it has version {books.rest.version}"
            self._become(worker, S.stale, Reason(Code.outdated, sentence))
            self.wants_refit(worker)

    def _woken(self, worker: Worker, reported: int | None, why: str) -> None:
        """The same process as before, awake."""
        books = self.books
        worker.asleep = False
        if reported is not None and worker.version is not None and reported != worker.version:
            worker.version = None
        if worker.leaving or worker.taken:
            self._become(worker, S.stale, Reason(Code.outdated, why))
            self.drain(worker, Reason(Code.taken, "it is not to serve any more"), 0.0)
        elif worker.version is None and not worker.spec.sleep_keeps_weights:
            self._become(worker, S.empty, Reason(Code.emptied, f"{why}; its weights were discarded"))
            self.wants_refit(worker)
        elif worker.version is None or worker.version != books.rest.version:
            has = "nobody knows what weights it has" if worker.version is None else f"it has version {worker.version}"
            sentence = f"{why}; {has}, the trainer is at {books.rest.version}"
            self._become(worker, S.stale, Reason(Code.outdated, sentence))
            self.wants_refit(worker)
        elif worker.paused:
            self._become(worker, S.stale, Reason(Code.current, f"{why}; it is resumed before it serves"))
            self.activate(worker)
        else:
            self._to_active(worker, Reason(Code.current, f"{why}; version {worker.version}, as the trainer's"))

    # ---- what is done to it ----------------------------------------------------------------------------------------

    def act(self, worker: Worker, verb: Verb, reason: Reason, version: int | None = None) -> None:
        """Have something done, with a deadline."""
        books = self.books
        assert verb not in (Verb.sleep, Verb.stop) or not worker.held or worker.state is S.lost, worker.id
        worker.attempt += 1
        deadline = books.rest.now + self._allowed_s(verb)
        worker.doing = Doing(verb, worker.attempt, books.rest.now, deadline, version)
        worker.try_at = None
        worker.paused = worker.paused or verb is Verb.pause  # even if nobody confirms it
        books.touch("w", worker.id)
        books.out.append(
            e.Act(worker.id, worker.attempt, verb, deadline, reason, version, worker.spec.sleep_keeps_weights)
        )

    def _allowed_s(self, verb: Verb) -> float:
        rules = self.books.rules
        return {
            Verb.start: rules.start_s,
            Verb.wake: rules.wake_s,
            Verb.sleep: rules.sleep_s,
            Verb.stop: rules.stop_s,
            Verb.pause: rules.pause_s,
            Verb.resume: rules.pause_s,
            Verb.refit: rules.refit_s,
            Verb.probe: rules.probe_s,
        }[verb]

    def act_done(self, event: e.ActDone) -> None:
        """Something was done."""
        worker, doing = self._was_doing(event.worker, event.attempt)
        if worker is None or doing is None:
            return
        books, took = self.books, self.books.rest.now - doing.since
        if event.note:
            self.warn(worker, Reason(Code.faulty, f"{doing.verb.value}: {event.note}"))
        if doing.verb in (Verb.start, Verb.wake):
            worker.failures = 0
        if doing.verb is Verb.start:
            self._arrives(worker, event.version, f"its engine started in {took:.3g} s")
        elif doing.verb is Verb.wake:
            books.rest.wake_s.add(took)
            self._woken(worker, event.version, f"woken in {took:.3g} s")
        elif doing.verb is Verb.sleep:
            books.rest.sleep_s.add(took)
            self._slept(worker, worker.spec.sleep_keeps_weights, f"asleep after {took:.3g} s")
        elif doing.verb is Verb.stop:
            self._stopped(worker)
        elif doing.verb is Verb.pause:
            self.on_quieter(worker)
        elif doing.verb is Verb.resume:
            worker.paused = False
            self.requests.resumed(worker)
            self._back(worker, "it makes tokens again")
        elif doing.verb is Verb.refit and doing.version is not None:
            self.on_confirmed(worker, doing.version)
        elif doing.verb is Verb.probe:
            worker.probes = worker.faults = 0
            self._back(worker, "it answered a probe")

    def act_failed(self, event: e.ActFailed) -> None:
        """Something could not be done: each verb has an outcome of its own."""
        worker, doing = self._was_doing(event.worker, event.attempt)
        if worker is None or doing is None:
            return
        why = f"{doing.verb.value} failed: {event.why}"
        if doing.verb is Verb.start:
            self._start_failed(worker, why)
        elif doing.verb is Verb.wake:
            self._wake_failed(worker, why)
        elif doing.verb is Verb.sleep:
            # It may hold its memory or not, and have its weights or not; it is asked to wake before it serves.
            self.warn(worker, Reason(Code.faulty, f"{why}; its memory may not be given back"))
            self._slept(worker, False, why)
        elif doing.verb is Verb.stop:
            self._stop_failed(worker, why)
        elif doing.verb is Verb.pause:
            self.requests.cut_all(worker, Reason(Code.faulty, f"{worker.id}: {why}"))
            self.on_quieter(worker)
        elif doing.verb is Verb.resume:
            self.lost(worker, Reason(Code.faulty, why))
        elif doing.verb is Verb.refit:
            self.on_refit_failed(worker, why)
        elif doing.verb is Verb.probe:
            self._probe_failed(worker, why)

    def _was_doing(self, name: str, attempt: int) -> tuple[Worker | None, Doing | None]:
        worker = self.books.workers.get(name)
        if worker is None or worker.doing is None or worker.doing.attempt != attempt:
            return None, None
        doing, worker.doing = worker.doing, None
        self.books.touch("w", name)
        return worker, doing

    def _slept(self, worker: Worker, keeps_weights: bool, why: str) -> None:
        worker.asleep = True
        worker.load_until, worker.load_asked = None, False
        if not keeps_weights:
            worker.version = None
        if worker.leaving:
            self._put_away(worker)
        else:
            self._become(worker, S.inactive, Reason(Code.asleep, why))

    def _stopped(self, worker: Worker) -> None:
        self.requests.lay_ghosts(worker)
        worker.started = worker.asleep = worker.paused = False
        worker.version = None
        worker.failures = 0 if worker.state is not S.lost else worker.failures
        if worker.leaving:
            self._forget(worker)
        elif worker.state is S.draining:
            self._become(worker, S.inactive, Reason(Code.asleep, "its engine was stopped"))

    def _stop_failed(self, worker: Worker, why: str) -> None:
        """A process that does not end: again, then it is given up, and said so."""
        worker.failures += 1
        if worker.failures < self.books.rules.tries:
            self.act(worker, Verb.stop, Reason(Code.faulty, why))
            return
        self.warn(worker, Reason(Code.faulty, f"{why}; it is given up, and may still hold its memory"))
        if worker.leaving:
            self._forget(worker)
        elif worker.state is not S.lost:
            worker.out = True
            self.lost(worker, Reason(Code.faulty, why), stop=False)
        else:
            worker.out = True

    def _start_failed(self, worker: Worker, why: str) -> None:
        worker.failures += 1
        self.lost(worker, Reason(Code.start_failed, why), stop=worker.spec.startable)
        self._try_later(worker, why)

    def _wake_failed(self, worker: Worker, why: str) -> None:
        """Out of memory, say: it stays asleep, and what weights it has nobody knows."""
        worker.failures += 1
        worker.version = None
        if worker.failures >= self.books.rules.tries:
            self.lost(worker, Reason(Code.start_failed, f"{why}, {worker.failures} times in a row"))
            return
        self._become(worker, S.inactive, Reason(Code.start_failed, why))
        if worker.leaving:
            self._put_away(worker)
        else:
            self._try_later(worker, why)

    def _try_later(self, worker: Worker, why: str) -> None:
        rules = self.books.rules
        if worker.id not in self.books.workers:
            return
        if worker.failures >= rules.tries:
            worker.out = True
            self.warn(
                worker, Reason(Code.restarts_used, f"{why}; {worker.failures} times in a row, it is not tried again")
            )
            return
        worker.try_at = self.books.rest.now + rules.back_off_s * 2 ** (worker.failures - 1)
        self.books.touch("w", worker.id)

    # ---- trouble ---------------------------------------------------------------------------------------------------

    def fault(self, worker: Worker, why: str) -> None:
        """A request broke there."""
        worker.faults += 1
        if worker.faults >= self.books.rules.faults:
            self.suspect(worker, Reason(Code.faulty, f"{worker.faults} requests in a row broke: {why}"))

    def deaf(self, worker: Worker, why: str) -> None:
        """It does not answer, though it may be healthy."""
        orphans = sum(one.orphan for one in worker.held.values())
        if orphans and worker.state in (S.draining, S.stale, S.empty):
            self.lost(worker, Reason(Code.hung, f"{why}, and others wait for that"))
        elif orphans >= self.books.rules.faults:
            self.lost(worker, Reason(Code.hung, f"{why}, nor that of {orphans - 1} others"))
        else:
            self.suspect(worker, Reason(Code.hung, why))
            self.on_quieter(worker)

    def unwell(self, event: e.WorkerUnwell) -> None:
        """Its health check has failed for so long."""
        worker = self.books.workers.get(event.worker)
        if worker is None or worker.state not in (S.active, S.draining, S.stale, S.empty, S.suspect):
            return
        rules = self.books.rules
        if event.for_s < rules.suspect_s:
            return
        worker.unwell = True
        reason = Reason(Code.unhealthy, f"{event.why}, for {event.for_s:.3g} s")
        if event.for_s >= rules.lost_s:
            self.lost(worker, reason)
        else:
            self.suspect(worker, reason)

    def well(self, event: e.WorkerWell) -> None:
        """Its health check passes; whether it answers is another question."""
        worker = self.books.workers.get(event.worker)
        if worker is None or not worker.unwell:
            return
        worker.unwell = False
        if worker.state is S.suspect and worker.doing is None:
            worker.probes = 0
            self._probe(worker, "its health check passes again")

    def heard(self, worker: Worker) -> None:
        """Tokens came from it: a suspect that answers is none."""
        if worker.state is S.suspect and not worker.unwell and worker.faults < self.books.rules.faults:
            self._back(worker, "it answers")

    def suspect(self, worker: Worker, reason: Reason) -> None:
        """Nothing new goes there until it has answered."""
        if worker.state is not S.active:
            return
        self._become(worker, S.suspect, reason)
        worker.probes = 0
        self.books.look_soon()
        if worker.doing is None:
            self._probe(worker, reason.sentence)

    def _probe(self, worker: Worker, why: str) -> None:
        if worker.paused_elsewhere:
            return  # a probe would hang; whoever resumes it is heard
        self.act(worker, Verb.probe, Reason(Code.faulty, why))

    def _probe_failed(self, worker: Worker, why: str) -> None:
        if worker.state is not S.suspect:
            return
        worker.probes += 1
        if worker.probes >= self.books.rules.tries:
            self.lost(worker, Reason(Code.hung, f"{why}, {worker.probes} times in a row"))
        else:
            worker.try_at = self.books.rest.now + self.books.rules.back_off_s
            self.books.touch("w", worker.id)

    def _back(self, worker: Worker, why: str) -> None:
        """It works again. Weights that became old in the meantime stay old."""
        current = worker.version is not None and worker.version == self.books.rest.version
        if worker.state is S.suspect and worker.unwell:
            return
        if worker.state is S.suspect and not current:
            self._become(worker, S.stale, Reason(Code.outdated, f"{why}; its weights are older than the trainer's"))
            self.wants_refit(worker)
        elif worker.state is S.suspect or (worker.state is S.stale and current and not self.in_refit(worker)):
            self._to_active(worker, Reason(Code.steady, why))
        self.on_quieter(worker)

    def died(self, event: e.WorkerDied) -> None:
        """Gone."""
        worker = self.books.workers.get(event.worker)
        if worker is None or worker.state is S.lost:
            return
        if not worker.started and worker.state is S.inactive:
            return
        worker.started = False
        self.lost(worker, Reason(Code.process_died, event.why))

    def lost(self, worker: Worker, reason: Reason, *, stop: bool = True) -> None:
        """Whatever it was, it is not there any more, and neither is what it had."""
        if worker.state is S.lost:
            return
        books = self.books
        self._become(worker, S.lost, reason)
        worker.was_lost, worker.version = True, None
        worker.incarnation += 1
        worker.asleep = worker.unwell = False
        worker.faults = worker.probes = 0
        worker.doing, worker.load_until, worker.try_at = None, None, None
        worker.load_asked = False
        self.requests.lose_all(worker, f"{worker.id} was lost: {reason.sentence}", certain=not worker.started)
        if not worker.started:
            self.requests.lay_ghosts(worker)
        books.look_soon()
        self.on_quieter(worker)
        if stop and worker.spec.startable and worker.started:
            self.act(worker, Verb.stop, Reason(reason.code, f"so that nothing of it is left: {reason.sentence}"))
        elif worker.leaving:
            self._forget(worker)

    # ---- news of others --------------------------------------------------------------------------------------------

    def came_up(self, event: e.WorkerUp) -> None:
        """Up without having been asked to."""
        worker = self.books.workers.get(event.worker)
        if worker is None or worker.state is S.starting:
            return
        if worker.state is S.lost:
            if worker.doing is None:
                if not event.restarted:
                    self.requests.wake_ghosts(worker)
                self._arrives(worker, event.version, "it is back", new=event.restarted)
        elif worker.state is S.inactive:
            if not worker.started or event.restarted:
                worker.was_lost = worker.was_lost or worker.started
                self._arrives(worker, event.version, "it came up by itself")
            elif worker.asleep:
                self._woken(worker, event.version, "others woke it")
        elif event.restarted:
            worker.started = False
            self.lost(worker, Reason(Code.process_died, "it was restarted: what it had is gone"))
            if worker.id in self.books.workers:
                self._arrives(worker, event.version, "it was restarted")

    def slept(self, event: e.WorkerSlept) -> None:
        """Others put it to sleep. What ran there is theirs to have aborted, and is heard of."""
        worker = self.books.workers.get(event.worker)
        if worker is None or worker.state in (S.lost, S.starting, S.inactive):
            return
        worker.doing = None
        if worker.state is S.draining and worker.held:
            self.requests.cut_all(worker, Reason(Code.moved, f"{worker.id} was put to sleep"))
        self._slept(worker, event.keeps_weights, "others put it to sleep")

    def emptied(self, event: e.WorkerEmptied) -> None:
        """Its weights are gone: what it makes from now on is worth nothing."""
        worker = self.books.workers.get(event.worker)
        if worker is None:
            return
        worker.version = None
        if worker.state in (S.lost, S.starting, S.inactive, S.empty):
            return
        reason = Reason(Code.emptied, "its weights were discarded")
        self.requests.cut_all(worker, Reason(Code.moved, f"{worker.id}: its weights were discarded"))
        if worker.state is not S.draining:
            self._become(worker, S.empty, reason)
            self.wants_refit(worker)

    def paused_elsewhere(self, event: e.PausedElsewhere) -> None:
        """Others pause and resume it. Requests there wait; none is sent there."""
        worker = self.books.workers.get(event.worker)
        if worker is None or worker.paused_elsewhere == event.on or worker.state is S.lost:
            return
        worker.paused_elsewhere = event.on
        self.books.lane(worker)
        if not event.on:
            self.requests.resumed(worker)
            if worker.state is S.suspect and worker.doing is None:
                self._probe(worker, "it was resumed")
        sentence = "others paused it: nothing is sent there" if event.on else "others resumed it"
        self.books.write_worker(worker, worker.state, Reason(Code.passed_on, sentence))

    def load_seen(self, event: e.LoadSeen) -> None:
        """Its own figures, while they are fresh."""
        books = self.books
        worker = books.workers.get(event.worker)
        until = event.at + books.rules.load_fresh_s
        if worker is None or until <= books.rest.now:
            return
        worker.outside = max(0, event.running + event.waiting - len(worker.held))
        worker.kv_full = event.kv_used_share >= books.rules.kv_full
        worker.load_until, worker.load_asked = until, True
        books.touch("w", worker.id)
        self._figures(worker)

    def _figures(self, worker: Worker) -> None:
        lane = self.books.router.lanes.get(worker.id)
        if lane is not None:
            self.books.figures(worker, lane)
            self.books.router.changed(lane)
        self.settle(worker)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def wants_refit(self, worker: Worker) -> None:
        """Where refits are trimtab's, a worker that waits for weights is given them; otherwise the trainer's turn."""
        books = self.books
        if books.rules.ownership.refit is not Owner.trimtab or books.refit is not None:
            return
        waits = worker.state in (S.stale, S.empty) and books.coming(worker)
        if waits and worker.doing is None and worker.try_at is None:
            version = books.rest.version
            self.act(worker, Verb.refit, Reason(Code.refitting, f"it needs version {version}"), version)

    def confirmed(self, worker: Worker, version: int) -> None:
        """It has the trainer's weights: the one way back to ACTIVE from STALE and EMPTY."""
        worker.version, worker.was_lost, worker.failures = version, False, 0
        worker.out = False
        if worker.state is S.empty:
            self._become(worker, S.stale, Reason(Code.current, f"it has version {version}, and does not serve yet"))

    def activate(self, worker: Worker) -> None:
        """Serve, resuming first where trimtab paused it."""
        if worker.state not in (S.stale, S.empty) or worker.version != self.books.rest.version:
            return
        if worker.paused:
            if worker.doing is None:
                self.act(worker, Verb.resume, Reason(Code.current, f"it has version {worker.version}"))
            return
        self._to_active(worker, Reason(Code.current, f"it has version {worker.version}, confirmed"))

    def refit_failed(self, worker: Worker, why: str) -> None:
        """It has not got them, and what it has now nobody knows. Out of service until it gets them."""
        worker.version = None
        self.requests.cut_all(worker, Reason(Code.refit_failed, f"{worker.id}: {why}"))
        if worker.state in (S.stale, S.empty):
            self.books.write_worker(worker, worker.state, Reason(Code.refit_failed, why))
        worker.failures += 1
        if self.books.rules.ownership.refit is Owner.trimtab:
            self._try_later(worker, why)

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _to_active(self, worker: Worker, reason: Reason) -> None:
        """The only way to ACTIVE."""
        assert worker.version is not None, worker.id
        assert worker.version == self.books.rest.version, worker.id
        assert not worker.was_lost, worker.id
        if worker.doing is not None and worker.doing.verb is Verb.refit:
            worker.doing = None
        self._become(worker, S.active, reason)

    def to_stale(self, worker: Worker, reason: Reason) -> None:
        """The trainer has newer weights."""
        self._become(worker, S.stale, reason)

    def _become(self, worker: Worker, state: WorkerState, reason: Reason) -> None:
        assert state is worker.state or state in EDGES[worker.state], (worker.id, worker.state, state)
        if state is not S.draining:
            worker.drain_by = worker.drain_began = None
            worker.drain_cut = False
        self.books.write_worker(worker, state, reason)
        self.books.lane(worker)

    def warn(self, worker: Worker, reason: Reason) -> None:
        """Somebody should know."""
        self.books.out.append(e.Warn(reason, worker.id))
        self.books.write_worker(worker, worker.state, reason)

    # ---- time ------------------------------------------------------------------------------------------------------

    def due(self, name: str) -> float | None:
        """When time alone changes something about the worker."""
        worker = self.books.workers.get(name)
        if worker is None:
            return None
        dues = [worker.try_at, worker.load_until]
        if worker.doing is not None:
            dues.append(worker.doing.deadline)
        if worker.drain_by is not None and not worker.drain_cut:
            dues.append(worker.drain_by)
        return min((one for one in dues if one is not None), default=None)

    def late(self, name: str) -> None:
        """Its due time has come."""
        books = self.books
        worker, now = books.workers[name], books.rest.now
        if worker.load_until is not None and worker.load_until <= now:
            worker.load_until = None
            self._figures(worker)
        if worker.doing is not None and worker.doing.deadline <= now:
            doing = worker.doing
            self.act_failed(e.ActFailed(name, doing.attempt, f"it took more than {now - doing.since:.3g} s"))
        elif worker.drain_by is not None and not worker.drain_cut and worker.drain_by <= now:
            self._cut_drain(worker)
        elif worker.try_at is not None and worker.try_at <= now:
            worker.try_at = None
            if worker.state is S.suspect and worker.doing is None:
                self._probe(worker, worker.reason.sentence)
            else:
                self.wants_refit(worker)
                books.look_soon()
        books.touch("w", name)
