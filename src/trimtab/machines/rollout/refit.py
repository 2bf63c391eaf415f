"""Refits: membership, when the trainer may begin, which workers serve afterwards. The trainer moves the weights.

A refit may go back to an older version, for example to the last one that served. Workers whose refits failed too often
are not retried, but take part in every refit that the trainer begins: none is left out for good.

Membership is frozen from begin to end: a collective whose set of engines changes under way hangs for ever. Workers that
join or leave meanwhile are part of the next sync; a new one is STALE until then. From begin on only the new version is
current. Workers on which a refit fails are left STALE with no version, and the others go on; if all fail, no worker
serves, a warning says so, and the trainer may begin again. What must never happen: a refit without an end (it has a
deadline), and a worker that serves after a refit that was only tried.

Requests that run at the begin: those that may span versions stay paused in place (`keep`) or are aborted and continue
with their tokens (`move`, or where the engine cannot pause); those that may not span, or are pinned to one version, are
aborted and restart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.core.errors import InputError
from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.records import OngoingRefit, RolloutWorker
from trimtab.machines.rollout.requests import RequestTransitions
from trimtab.machines.rollout.state import RolloutState
from trimtab.model.rollout import InFlight, Membership, Owner, RefitMember, RefitWay, WorkerState, WorkerVerb

if TYPE_CHECKING:
    from trimtab.machines.rollout.workers import WorkerTransitions

S = WorkerState
TAKES_PART = (S.active, S.stale, S.empty)


class RefitCoordinator:
    """Runs weight refits."""

    def __init__(self, state: RolloutState, requests: RequestTransitions, workers: WorkerTransitions) -> None:
        self.state = state
        self.requests = requests
        self.workers = workers

    # ---- membership ------------------------------------------------------------------------------------------------

    def next_membership(self) -> Membership:
        """Members of the open refit, or of the next one."""
        before = self.state.membership
        if self.state.refit is not None:
            return before
        members, offset = [], 0
        for worker in self.state.workers_in(*TAKES_PART):
            if not (worker.leaving or worker.reclaimed):
                members.append(RefitMember(worker.id, worker.spec.size, offset, worker.incarnation))
                offset += worker.spec.size
        old = {(member.worker, member.incarnation) for member in before.members}
        new = {(member.worker, member.incarnation) for member in members}
        if old == new and tuple(members) == before.members:
            return Membership(before.epoch, before.members)
        joined = tuple(member.worker for member in members if (member.worker, member.incarnation) not in old)
        left = tuple(member.worker for member in before.members if (member.worker, member.incarnation) not in new)
        return Membership(before.epoch + 1, tuple(members), joined=joined, left=left)

    # ---- begin -----------------------------------------------------------------------------------------------------

    @on(e.RefitBegun)
    def begun(self, event: e.RefitBegun) -> None:
        """Freeze membership and quiesce all members."""
        state, rules = self.state, self.state.rules
        if state.refit is not None:
            if state.refit.version == event.version:
                return
            hint = "end it before beginning another"
            raise InputError(f"a refit to version {state.refit.version} is open", hint=hint)
        state.membership = replace(self.next_membership(), frozen=True)
        members = [state.workers[member.worker] for member in state.membership.members]
        deadline = state.now + rules.refit_s
        state.refit = OngoingRefit(
            event.version, event.way, event.in_flight, deadline, [worker.id for worker in members]
        )
        state.version = event.version
        state.touch("", "")
        for worker in members:
            self._quiesce(worker, event)
        self.requests.version_changed()
        for worker in members:
            self.update_quiesced(worker)
        self._ready()

    def _quiesce(self, worker: RolloutWorker, event: e.RefitBegun) -> None:
        reason = Reason(ReasonCode.refitting, f"version {event.version} is being loaded")
        worker.action, worker.retry_at = None, None  # actions in progress were for older weights
        worker.disabled, worker.failures = False, 0
        if worker.state is not S.empty:
            self.workers.transition(worker, S.stale, reason)
        if not worker.held:
            return
        ownership = self.state.rules.ownership
        keep = event.in_flight is InFlight.keep and (ownership.pause is Owner.trainer or worker.spec.can_pause)
        if self.requests.may_abort():
            self._abort_running(worker, keep, reason)
        if keep and ownership.pause is Owner.trimtab:
            self.workers.start_action(worker, WorkerVerb.pause, reason)  # also where a resume may be in flight

    def _abort_running(self, worker: RolloutWorker, keep: bool, reason: Reason) -> None:
        for sent in list(worker.held.values()):
            request = self.state.requests.get(sent.request)
            if request is None or request.attempt != sent.attempt:
                continue
            once = not request.spec.spans or request.spec.version is not None
            if once or not keep:
                self.requests.abort_and_requeue(request, reason, restart=once)

    def update_quiesced(self, worker: RolloutWorker) -> None:
        """A worker changed: it may be quiesced now, or be gone from the refit."""
        refit = self.state.refit
        if refit is None:
            return
        if worker.id in refit.waiting and self._is_quiesced(worker):
            refit.waiting.remove(worker.id)
            self._ready()
        gone = worker.id not in (*refit.confirmed, *refit.failed) and not self.state.in_refit(worker)
        if gone and any(member.worker == worker.id for member in self.state.membership.members):
            refit.failed.append(worker.id)
            self._end_if_complete()

    def _is_quiesced(self, worker: RolloutWorker) -> bool:
        if not self.state.in_refit(worker):
            return True
        if worker.action is not None and worker.action.verb is WorkerVerb.pause:
            return False
        return not any(attempt.abort_by is not None and not attempt.orphan for attempt in worker.held.values())

    def _ready(self) -> None:
        """Once all members are quiesced the trainer may send; where trimtab owns refits, it starts them."""
        state, refit = self.state, self.state.refit
        if refit is None or refit.ready or refit.waiting:
            return
        refit.ready = True
        membership = state.membership
        sentence = f"{counted(len(membership.members), 'worker')} wait for version {refit.version}"
        state.emit(e.RefitReady(refit.version, membership, Reason(ReasonCode.refitting, sentence)))
        if state.rules.ownership.refit is Owner.trimtab:
            for member in membership.members:
                worker = state.workers.get(member.worker)
                if worker is not None and self.state.in_refit(worker) and worker.state in (S.stale, S.empty):
                    reason = Reason(ReasonCode.refitting, f"it needs version {refit.version}")
                    self.workers.start_action(worker, WorkerVerb.refit, reason, refit.version)
            self._end_if_complete()

    # ---- outcomes --------------------------------------------------------------------------------------------------

    @on(e.RefitConfirmed)
    def confirmed(self, event: e.RefitConfirmed) -> None:
        state = self.state
        worker = state.workers.get(event.worker)
        if worker is None or event.version != state.version:
            return
        if event.epoch is not None and not (state.membership.epoch == event.epoch and state.is_member(worker)):
            return  # about an earlier process
        self.confirm(worker, event.version)

    def confirm(self, worker: RolloutWorker, version: int) -> None:
        """The worker has this version."""
        state, refit = self.state, self.state.refit
        if version != state.version or worker.state in (S.lost, S.starting, S.inactive):
            return
        if refit is not None and not self.state.in_refit(worker):
            return  # joins at the next sync
        self.workers.confirmed(worker, version)
        if refit is None:
            self.workers.activate(worker)
            return
        if worker.id in refit.failed:
            refit.failed.remove(worker.id)
        if worker.id not in refit.confirmed:
            refit.confirmed.append(worker.id)
        # Engines that load from disk need not wait for each other, unless the trainer keeps them paused.
        if refit.way is RefitWay.disk and state.rules.ownership.pause is Owner.trimtab and refit.ready:
            self.workers.activate(worker)
        self._end_if_complete()

    @on(e.RefitFailed)
    def failed(self, event: e.RefitFailed) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None and event.version == self.state.version and worker.state is not S.lost:
            self.member_failed(worker, event.why)

    def member_failed(self, worker: RolloutWorker, why: str) -> None:
        """One member failed; the others go on."""
        refit = self.state.refit
        if worker.state is S.active:
            return  # already confirmed and serving
        if refit is not None and self.state.in_refit(worker):
            if worker.id in refit.confirmed:
                refit.confirmed.remove(worker.id)
            if worker.id not in refit.failed:
                refit.failed.append(worker.id)
        self.workers.refit_failed(worker, why)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """Where trimtab owns refits, the refit ends with its last member."""
        state, refit = self.state, self.state.refit
        if refit is None or not refit.ready or state.rules.ownership.refit is not Owner.trimtab:
            return
        if len(refit.confirmed) + len(refit.failed) >= len(state.membership.members):
            self._end("all members have reported")

    @on(e.RefitEnded)
    def ended(self, event: e.RefitEnded) -> None:
        if self.state.refit is not None and self.state.refit.version == event.version:
            self._end("the trainer ended it")

    def late(self) -> None:
        self._end(f"it took more than {self.state.rules.refit_s:g} s")

    def _end(self, why: str) -> None:
        state, refit = self.state, self.state.refit
        assert refit is not None
        state.refit = None
        membership = state.membership = replace(state.membership, frozen=False)
        for member in membership.members:
            worker = state.workers.get(member.worker)
            if worker is None or worker.incarnation != member.incarnation:
                continue
            if member.worker in refit.confirmed:
                self.workers.activate(worker)
            elif member.worker not in refit.failed:
                refit.failed.append(member.worker)
                worker.action = None if worker.action and worker.action.verb is WorkerVerb.refit else worker.action
                self.workers.refit_failed(worker, f"{why}, and version {refit.version} was not confirmed here")
        failed = tuple(member.worker for member in membership.members if member.worker not in refit.confirmed)
        sentence = f"{why}: {len(refit.confirmed)} of {counted(len(membership.members), 'worker')} have it"
        code = ReasonCode.refit_failed if failed else ReasonCode.current
        state.emit(e.RefitOver(refit.version, tuple(refit.confirmed), failed, Reason(code, sentence)))
        if len(refit.confirmed) < state.min_workers and membership.members:
            below = f"{sentence}, and at least {state.min_workers} must serve"
            state.emit(e.Warn(Reason(ReasonCode.below_min, below)))
        for worker in list(state.workers.values()):
            self.workers.settle(worker)  # drains that waited for the end
            self.workers.request_refit(worker)  # and new workers
        state.evaluate_soon()
