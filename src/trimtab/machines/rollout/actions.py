"""What comes of acts on workers: each verb's good end, its failure, and its deadline.

Called by the machine when an act ended, and by time. Every act has an outcome of its own, also when it fails: nothing
stays "being done" for ever, and nothing is tried for ever. Late news of an act that was given up changes nothing.
"""

from __future__ import annotations

from trimtab.core.reasons import Code, Reason
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.health import Trouble
from trimtab.machines.rollout.records import Doing, Worker
from trimtab.machines.rollout.requests import Requests
from trimtab.machines.rollout.state import Books
from trimtab.machines.rollout.workers import Workers
from trimtab.model.rollout import Verb, WorkerState

S = WorkerState


class Acts:
    """Outcomes of acts."""

    def __init__(self, books: Books, requests: Requests, workers: Workers, trouble: Trouble) -> None:
        self.books = books
        self.requests = requests
        self.workers = workers
        self.trouble = trouble

    def act_done(self, event: e.ActDone) -> None:
        """Something was done."""
        worker, doing = self._was_doing(event.worker, event.attempt)
        if worker is None or doing is None:
            return
        books, took = self.books, self.books.rest.now - doing.since
        if event.note:
            self.workers.warn(worker, Reason(Code.faulty, f"{doing.verb.value}: {event.note}"))
        if doing.verb in (Verb.start, Verb.wake):
            worker.failures = 0
        if doing.verb is Verb.start:
            self.workers.arrives(worker, event.version, f"its engine started in {took:.3g} s")
        elif doing.verb is Verb.wake:
            books.rest.wake_s.add(took)
            self.workers.woken(worker, event.version, f"woken in {took:.3g} s")
        elif doing.verb is Verb.sleep:
            books.rest.sleep_s.add(took)
            self.workers.put_to_sleep(worker, worker.spec.sleep_keeps_weights, f"asleep after {took:.3g} s")
        elif doing.verb is Verb.stop:
            self._stopped(worker)
        elif doing.verb is Verb.pause:
            self.workers.on_quieter(worker)
        elif doing.verb is Verb.resume:
            worker.paused = False
            self.requests.resumed(worker)
            self.workers.activate(worker)
        elif doing.verb is Verb.refit and doing.version is not None:
            self.workers.on_confirmed(worker, doing.version)
        elif doing.verb is Verb.probe:
            worker.probes = worker.faults = 0
            self.trouble.back(worker, "it answered a probe")

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
            self.workers.warn(worker, Reason(Code.faulty, f"{why}; its memory may not be given back"))
            self.workers.put_to_sleep(worker, False, why)
        elif doing.verb is Verb.stop:
            self._stop_failed(worker, why)
        elif doing.verb is Verb.pause:
            self.requests.cut_all(worker, Reason(Code.faulty, f"{worker.id}: {why}"))
            self.workers.on_quieter(worker)
        elif doing.verb is Verb.resume:
            self.trouble.lost(worker, Reason(Code.faulty, why))
        elif doing.verb is Verb.refit:
            self.workers.on_refit_failed(worker, why)
        elif doing.verb is Verb.probe:
            self.trouble.probe_failed(worker, why)

    def _was_doing(self, name: str, attempt: int) -> tuple[Worker | None, Doing | None]:
        worker = self.books.workers.get(name)
        if worker is None or worker.doing is None or worker.doing.attempt != attempt:
            return None, None
        doing, worker.doing = worker.doing, None
        self.books.touch("w", name)
        return worker, doing

    def _stopped(self, worker: Worker) -> None:
        self.requests.lay_ghosts(worker)
        worker.started = worker.asleep = worker.paused = False
        worker.version = None
        worker.failures = 0 if worker.state is not S.lost else worker.failures
        if worker.leaving:
            self.workers.forget(worker)
        elif worker.state is S.draining:
            self.workers.become(worker, S.inactive, Reason(Code.asleep, "its engine was stopped"))

    def _stop_failed(self, worker: Worker, why: str) -> None:
        """A process that does not end: again, then it is given up, and said so."""
        worker.failures += 1
        if worker.failures < self.books.rules.tries:
            self.workers.act(worker, Verb.stop, Reason(Code.faulty, why))
            return
        self.workers.warn(worker, Reason(Code.faulty, f"{why}; it is given up, and may still hold its memory"))
        if worker.leaving:
            self.workers.forget(worker)
        elif worker.state is not S.lost:
            worker.out = True
            self.trouble.lost(worker, Reason(Code.faulty, why), stop=False)
        else:
            worker.out = True

    def _start_failed(self, worker: Worker, why: str) -> None:
        worker.failures += 1
        self.trouble.lost(worker, Reason(Code.start_failed, why), stop=worker.spec.startable)
        self.workers.try_later(worker, why)

    def _wake_failed(self, worker: Worker, why: str) -> None:
        """Out of memory, say: it stays asleep, and what weights it has nobody knows."""
        worker.failures += 1
        worker.version = None
        if worker.failures >= self.books.rules.tries:
            self.trouble.lost(worker, Reason(Code.start_failed, f"{why}, {worker.failures} times in a row"))
            return
        self.workers.become(worker, S.inactive, Reason(Code.start_failed, why))
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
            self.act_failed(e.ActFailed(name, doing.attempt, f"it took more than {now - doing.since:.3g} s"))
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
