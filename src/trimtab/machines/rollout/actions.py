"""What comes of acts on workers: each verb's good end, its failure, and its deadline.

Called by the machine when an act ended, and by time. Every act has an outcome of its own, also when it fails: nothing
stays "being done" for ever, and nothing is tried for ever. Late news of an act that was given up changes nothing.
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
    """Outcomes of acts."""

    def __init__(
        self, books: RolloutState, requests: RequestTransitions, workers: WorkerTransitions, trouble: WorkerHealth
    ) -> None:
        self.books = books
        self.requests = requests
        self.workers = workers
        self.trouble = trouble

    def act_done(self, event: e.ActionDone) -> None:
        """Something was done."""
        worker, doing = self._was_doing(event.worker, event.attempt)
        if worker is None or doing is None:
            return
        books, took = self.books, self.books.rest.now - doing.since
        if event.note:
            self.workers.warn(worker, Reason(ReasonCode.faulty, f"{doing.verb.value}: {event.note}"))
        if doing.verb in (WorkerVerb.start, WorkerVerb.wake):
            worker.failures = 0
        if doing.verb is WorkerVerb.start:
            self.workers.arrives(worker, event.version, f"its engine started in {took:.3g} s")
        elif doing.verb is WorkerVerb.wake:
            books.rest.wake_s.add(took)
            self.workers.woken(worker, event.version, f"woken in {took:.3g} s")
        elif doing.verb is WorkerVerb.sleep:
            books.rest.sleep_s.add(took)
            self.workers.put_to_sleep(worker, worker.spec.sleep_keeps_weights, f"asleep after {took:.3g} s")
        elif doing.verb is WorkerVerb.stop:
            self._stopped(worker)
        elif doing.verb is WorkerVerb.pause:
            self.workers.on_quieter(worker)
        elif doing.verb is WorkerVerb.resume:
            worker.paused = False
            self.requests.resumed(worker)
            self.workers.activate(worker)
        elif doing.verb is WorkerVerb.refit and doing.version is not None:
            self.workers.on_confirmed(worker, doing.version)
        elif doing.verb is WorkerVerb.probe:
            worker.probes = worker.faults = 0
            self.trouble.back(worker, "it answered a probe")

    def act_failed(self, event: e.ActionFailed) -> None:
        """Something could not be done: each verb has an outcome of its own."""
        worker, doing = self._was_doing(event.worker, event.attempt)
        if worker is None or doing is None:
            return
        why = f"{doing.verb.value} failed: {event.why}"
        if doing.verb is WorkerVerb.start:
            self._start_failed(worker, why)
        elif doing.verb is WorkerVerb.wake:
            self._wake_failed(worker, why)
        elif doing.verb is WorkerVerb.sleep:
            # It may hold its memory or not, and have its weights or not; it is asked to wake before it serves.
            self.workers.warn(worker, Reason(ReasonCode.faulty, f"{why}; its memory may not be given back"))
            self.workers.put_to_sleep(worker, False, why)
        elif doing.verb is WorkerVerb.stop:
            self._stop_failed(worker, why)
        elif doing.verb is WorkerVerb.pause:
            self.requests.cut_all(worker, Reason(ReasonCode.faulty, f"{worker.id}: {why}"))
            self.workers.on_quieter(worker)
        elif doing.verb is WorkerVerb.resume:
            self.trouble.lost(worker, Reason(ReasonCode.faulty, why))
        elif doing.verb is WorkerVerb.refit:
            self.workers.on_refit_failed(worker, why)
        elif doing.verb is WorkerVerb.probe:
            self.trouble.probe_failed(worker, why)

    def _was_doing(self, name: str, attempt: int) -> tuple[RolloutWorker | None, OngoingAction | None]:
        worker = self.books.workers.get(name)
        if worker is None or worker.doing is None or worker.doing.attempt != attempt:
            return None, None
        doing, worker.doing = worker.doing, None
        self.books.touch("w", name)
        return worker, doing

    def _stopped(self, worker: RolloutWorker) -> None:
        self.requests.lay_ghosts(worker)
        worker.started = worker.asleep = worker.paused = False
        worker.version = None
        worker.failures = 0 if worker.state is not S.lost else worker.failures
        if worker.leaving:
            self.workers.forget(worker)
        elif worker.state is S.draining:
            self.workers.become(worker, S.inactive, Reason(ReasonCode.asleep, "its engine was stopped"))

    def _stop_failed(self, worker: RolloutWorker, why: str) -> None:
        """A process that does not end: again, then it is given up, and said so."""
        worker.failures += 1
        if worker.failures < self.books.rules.tries:
            self.workers.act(worker, WorkerVerb.stop, Reason(ReasonCode.faulty, why))
            return
        self.workers.warn(worker, Reason(ReasonCode.faulty, f"{why}; it is given up, and may still hold its memory"))
        if worker.leaving:
            self.workers.forget(worker)
        elif worker.state is not S.lost:
            worker.out = True
            self.trouble.lost(worker, Reason(ReasonCode.faulty, why), stop=False)
        else:
            worker.out = True

    def _start_failed(self, worker: RolloutWorker, why: str) -> None:
        worker.failures += 1
        self.trouble.lost(worker, Reason(ReasonCode.start_failed, why), stop=worker.spec.startable)
        self.workers.try_later(worker, why)

    def _wake_failed(self, worker: RolloutWorker, why: str) -> None:
        """Out of memory, say: it stays asleep, and what weights it has nobody knows."""
        worker.failures += 1
        worker.version = None
        if worker.failures >= self.books.rules.tries:
            self.trouble.lost(worker, Reason(ReasonCode.start_failed, f"{why}, {worker.failures} times in a row"))
            return
        self.workers.become(worker, S.inactive, Reason(ReasonCode.start_failed, why))
        if worker.leaving:
            self.workers.put_away(worker)
        else:
            self.workers.try_later(worker, why)

    # ---- time --------------------------------------------------------------------------------------------------------

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
            self.trouble.figures(worker)
        if worker.doing is not None and worker.doing.deadline <= now:
            doing = worker.doing
            self.act_failed(e.ActionFailed(name, doing.attempt, f"it took more than {now - doing.since:.3g} s"))
        elif worker.drain_by is not None and not worker.drain_cut and worker.drain_by <= now:
            self.workers.cut_drain(worker)
        elif worker.try_at is not None and worker.try_at <= now:
            worker.try_at = None
            if worker.state is S.suspect and worker.doing is None:
                self.trouble.probe(worker, worker.reason.sentence)
            else:
                self.workers.wants_refit(worker)
                books.look_soon()
        books.touch("w", name)
