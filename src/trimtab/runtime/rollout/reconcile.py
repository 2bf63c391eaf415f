"""Compares the machine's state with the running tasks at intervals.

Something that the machine waits for and no task executes would be awaited until a deadline, or for ever: an attempt
that was never started, an action without a task, a client whose request the machine does not know. Each is failed with
that reason, and the machine decides how to go on. It is failed only if two checks in a row find it, because a task may
start or end just between an instruction and its event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from trimtab.machines.rollout import events as e
from trimtab.model.rollout import ANSWERED, RequestState
from trimtab.runtime.rollout.machine_loop import RolloutCore

WHY = "it was instructed, but no task executes it"


class RolloutReconciler:
    """Reconciles one pool. `is_busy`: a worker has a running action; `is_lease`: the request has no attempt."""

    def __init__(
        self, core: RolloutCore, every_s: float, is_busy: Callable[[str], bool], is_lease: Callable[[str], bool]
    ) -> None:
        self._core, self._every_s = core, every_s
        self._is_doing, self._is_lease = is_busy, is_lease
        self._actions: dict[str, e.WorkerAction] = {}
        self._seen: set[Hashable] = set()
        core.listeners.append(self._listen)

    def _listen(self, what: object, now: float) -> None:
        if isinstance(what, e.WorkerAction):
            self._actions[what.worker] = what

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self.check()

    def check(self) -> None:
        missing = self._missing()
        again = [outcome for key, outcome in missing.items() if key in self._seen]
        self._seen = set(missing)
        for outcome in again:
            self._core.counters["reconciled"] += 1
            outcome()

    def _missing(self) -> dict[Hashable, Callable[[], None]]:
        core, found = self._core, dict[Hashable, Callable[[], None]]()
        for request in core.machine.requests():
            name, attempt = request.request, request.attempt
            running = (name, attempt) in core.attempts
            if running or self._is_lease(name):
                continue
            if request.state in (RequestState.sent, RequestState.streaming):
                found[name, attempt] = self._report(e.AttemptFailed(name, attempt, 0, WHY))
            elif request.state is RequestState.moving:
                found[name, attempt] = self._report(e.AbortDone(name, attempt, 0))
        for worker in core.machine.workers():
            action = self._actions.get(worker.worker)
            if action is not None and worker.doing is action.verb and not self._is_doing(action.worker):
                found[action.worker, action.attempt, action.verb] = self._report(
                    e.ActionFailed(action.worker, action.attempt, WHY)
                )
        for name, pending in core.pending.items():
            view = core.machine.request(name)
            if not pending.answered.done() and (view is None or view.state in ANSWERED):
                found[name] = self._fail_client(name)
        return found

    def _report(self, event: e.RolloutEvent) -> Callable[[], None]:
        return lambda: self._core.handle_event(event)

    def _fail_client(self, request: str) -> Callable[[], None]:
        return lambda: self._core.fail_client(request, "its answer was lost")
