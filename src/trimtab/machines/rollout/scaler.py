"""Carrying a number of workers out: who is called back, woken, started or drained, and what is said about it.

How many is the policy's decision (`trimtab.machines.rollout.policies.policy`), unless a person has said a number; who
it is, is decided here. What must never happen: fewer ACTIVE workers than the least by trimtab's own doing, more than
the most, a worker drained while a refit counts on it, a change without a Reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.policy import LoadSample, PolicyState, SleepCosts
from trimtab.machines.rollout.records import RolloutWorker
from trimtab.machines.rollout.state import RolloutState
from trimtab.machines.rollout.workers import WorkerTransitions
from trimtab.model.rollout import ScaleStep, WorkerState

S = WorkerState
STEPS_KEPT = 100


class Scaler:
    """The number of workers."""

    def __init__(self, books: RolloutState, workers: WorkerTransitions, state: PolicyState) -> None:
        self.books = books
        self.workers = workers
        self.state = state
        self.last: scaling.Decision | None = None  # also when it was to stay

    # ---- what is known ---------------------------------------------------------------------------------------------

    def sample(self) -> LoadSample:
        """The load and the workers as they are."""
        books, rest = self.books, self.books.rest
        active, coming, ready, back = 0, 0, 0, 0
        running, draining, drains, idle = 0, 0, 0, 0
        for worker in books.workers.values():
            if worker.state is S.active:
                load = self._load(worker)
                active += 1
                running += load
                idle += load == 0
            elif worker.state is S.draining:
                drains += 1
                draining += self._load(worker)
                back += self._callable(worker)
            elif books.coming(worker):
                coming += 1
                running += self._load(worker)
            else:
                running += self._load(worker)
                ready += self.workers.ready(worker)
        most = max(min(rest.most, active + coming + back + ready), 0)
        return LoadSample(
            rest.now,
            books.router.queued + len(books.later),
            running,
            draining,
            active,
            coming,
            drains,
            ready,
            books.rules.capacity,
            min(self.floor(), most),
            most,
            books.takers,
            SleepCosts(rest.sleep_s.value, rest.wake_s.value, rest.drain_s.value),
            fresh=all(
                one.load_until is not None or not one.load_asked for one in books.of(S.active, S.draining, S.suspect)
            ),
            idle=idle,
            service_s=rest.service_s.value,
        )

    def _load(self, worker: RolloutWorker) -> int:
        """Requests there, ours and those of others as far as its figures are fresh."""
        return len(worker.held) + (worker.outside if worker.load_until is not None else 0)

    def floor(self) -> int:
        """The fewest that are wanted now: by plan, or held ready."""
        rest = self.books.rest
        return min(max([rest.least, *(workers for workers, _ in rest.holds.values())]), rest.most)

    def _callable(self, worker: RolloutWorker) -> bool:
        return worker.doing is None and not (worker.leaving or worker.taken or worker.paused)

    # ---- what people say -------------------------------------------------------------------------------------------

    def scaled(self, event: e.ScaleRequested) -> None:
        """By hand: wins until released or expired."""
        rest = self.books.rest
        if not rest.least <= event.workers <= rest.most:
            raise InputError(
                f"{event.workers} workers", hint=f"the plan's range is {rest.least} to {rest.most}; change that first"
            )
        rest.scaled, rest.scaled_until = event.workers, event.until
        rest.scaled_why = event.why or "somebody set it by hand"
        self.look()

    def released(self, event: e.ScaleReleased) -> None:
        """The policy decides again."""
        self.books.rest.scaled = self.books.rest.scaled_until = None
        self.look()

    def held(self, event: e.HoldRequested) -> None:
        """So many are wanted for a while."""
        if event.workers < 0:
            raise InputError(f"hold {event.name}: {event.workers} workers", hint="0 or more")
        self.books.rest.holds[event.name] = (event.workers, event.until)
        self.look()

    def unheld(self, event: e.HoldReleased) -> None:
        """They are not wanted any more; the policy gives them up when it sees fit."""
        self.books.rest.holds.pop(event.name, None)
        self.books.touch("", "")

    def range_set(self, event: e.WorkerRangeSet) -> None:
        """The plan's range is another."""
        rest = self.books.rest
        if not 0 <= event.least <= event.most:
            raise InputError(f"least {event.least}, most {event.most} workers", hint="0 <= least <= most")
        rest.least, rest.most = event.least, event.most
        if rest.scaled is not None:
            rest.scaled = min(max(rest.scaled, rest.least), rest.most)
        self.look()

    def said(self) -> dict[str, Any]:
        """What people asked for, and what the policy decided last, as plain data."""
        rest, last = self.books.rest, self.last
        by_hand = None if rest.scaled is None else {"workers": rest.scaled, "why": rest.scaled_why}
        if by_hand is not None and rest.scaled_until is not None:
            by_hand["left_s"] = rest.scaled_until - rest.now
        return {
            "by_hand": by_hand,
            "holds": {name: workers for name, (workers, _) in rest.holds.items()},
            "decision": None
            if last is None
            else {
                "workers": last.workers,
                "reason": {"code": last.reason.code.value, "sentence": last.reason.sentence},
                "expects": last.expects,
            },
        }

    # ---- looks -----------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When something about the number changes by time alone."""
        rest = self.books.rest
        dues = [rest.next_look, rest.scaled_until, *(until for _, until in rest.holds.values())]
        return min((one for one in dues if one is not None), default=None)

    def look(self) -> None:
        """Ask, and carry it out."""
        books, rest = self.books, self.books.rest
        now = rest.now
        if rest.scaled_until is not None and rest.scaled_until <= now:
            rest.scaled = rest.scaled_until = None
        rest.holds = {name: one for name, one in rest.holds.items() if one[1] is None or one[1] > now}
        rest.next_look = now + books.rules.monitor_s if books.workers else None
        books.touch("", "")
        if not books.workers:
            return
        sample = self.sample()
        self.state, decision = scaling.consult(self.state, sample)
        self.last = decision
        self._judge(decision.came_true, sample)
        if decision.reason.code is ReasonCode.policy_fault:
            books.out.append(e.Warn(decision.reason))
        wanted, reason, expects = decision.workers, decision.reason, decision.expects
        floor = sample.least
        if rest.scaled is not None:
            wanted = min(max(rest.scaled, floor), sample.most)
            reason = Reason(ReasonCode.by_hand, f"{rest.scaled_why}: {rest.scaled} workers")
            expects = f"{wanted} workers serve"
        elif wanted < floor or (wanted == floor > sample.serving and floor > rest.least):
            wanted = floor
            reason = Reason(ReasonCode.held, f"{floor} workers are held ready: {', '.join(rest.holds)}")
            expects = f"{floor} workers serve"
        self._carry_out(wanted, reason, expects, sample)

    def _judge(self, came_true: bool | None, sample: LoadSample) -> None:
        """Whether the last step did what it said: by the policy's own judgement, or by its number if it was not its."""
        steps = self.books.steps
        if not steps or steps[-1].came_true is not None:
            return
        last = steps[-1]
        if last.reason.code in (ReasonCode.by_hand, ReasonCode.held):
            under_way = sample.starting or sample.draining_workers
            came_true = None if under_way else sample.active == last.workers
        if came_true is not None:
            steps[-1] = replace(last, came_true=came_true)

    def _carry_out(self, wanted: int, reason: Reason, expects: str, sample: LoadSample) -> None:
        before = sample.serving
        changed: list[str] = []
        if wanted > before:
            changed = self._more(wanted - before, reason)
        elif wanted < before and self.books.refit is None:
            changed = self._fewer(before - wanted, reason)
        if changed:
            step = ScaleStep(self.books.rest.now, before, wanted, reason, expects, tuple(changed))
            self.books.steps.append(step)
            del self.books.steps[:-STEPS_KEPT]
            self.books.out.append(e.AnnounceScaleStep(step))

    def _more(self, count: int, reason: Reason) -> list[str]:
        """Called back first, since they are warm; then woken; then started; those that were lost last."""
        changed: list[str] = []
        for worker in sorted(self.books.of(S.draining), key=lambda one: (-len(one.held), one.number)):
            if len(changed) < count and self.workers.call_back(worker, reason):
                changed.append(worker.id)
        rank = {S.inactive: 0, S.lost: 1}
        ready = [one for one in self.books.of(S.inactive, S.lost) if self.workers.ready(one)]
        ready.sort(key=lambda one: (rank[one.state], not one.started, one.asleep, one.number))
        for worker in ready[: count - len(changed)]:
            self.workers.bring_up(worker, reason)
            changed.append(worker.id)
        return changed

    def _fewer(self, count: int, reason: Reason) -> list[str]:
        """Those that wait for weights, then those with the least to do; never so many that too few would serve."""
        load = self.books.load_of
        waiting = [one for one in self.books.of(S.stale, S.empty) if self.books.coming(one)]
        active = sorted(self.books.of(S.active), key=lambda one: (load(one), -one.number))
        victims = sorted(waiting, key=lambda one: -one.number)[:count]
        victims += active[: max(0, min(count - len(victims), len(active) - self.floor()))]
        for worker in victims:
            self.workers.drain(worker, reason)
        return [one.id for one in victims]
