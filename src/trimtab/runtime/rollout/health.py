"""Looking after engines: whether they would serve, what they have to do, and what others did to them.

Every worker that has an engine is asked in turns of its own, so that one that hangs holds nobody up. An engine that
cannot be reached is unwell, and the machine decides when that means lost. One that is seen to be another process than
before, or to have other weights than were confirmed, was restarted behind trimtab's back, and does not serve until
somebody vouches for its weights. One that could not be looked at, for whatever reason, is unwell as well: no worker
stays active that is not looked after.
"""

from __future__ import annotations

import asyncio
import functools

from trimtab.core.errors import TrimtabError
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import WorkerState, WorkerView
from trimtab.runtime.engines.engine import EngineCapability as Offers
from trimtab.runtime.engines.engine import EngineState
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rollout.dispatcher import number_of
from trimtab.runtime.rollout.machine_loop import RolloutCore, WorkerHandle

S = WorkerState
IN_OUR_HANDS = (S.starting, S.inactive)


class EngineHealthChecker:
    """Asks engines, and tells the machine."""

    def __init__(self, core: RolloutCore, look_s: float) -> None:
        self._core = core
        self._look_s = look_s

    def begin(self, worker: str) -> None:
        """Look after it from now on."""
        hand = self._core.hands[worker]
        if hand.watch is None or hand.watch.done():
            hand.watch = self._core.background.start(
                f"watch {worker}",
                functools.partial(self._keep_looking, worker, hand),
                on_failed=lambda _, error: self._given_up(worker, hand, error),
            )

    async def _keep_looking(self, worker: str, hand: WorkerHandle) -> None:
        while self._core.hands.get(worker) is hand:
            if hand.engine is not None:
                try:
                    await self.look(worker, hand)
                except Exception as error:
                    self._unwell(worker, hand, f"it could not be looked at: {describe(error)}")
                    raise
            await asyncio.sleep(self._look_s)

    def _given_up(self, worker: str, hand: WorkerHandle, error: Exception) -> None:
        """Nothing looks after it any more, so it may not serve."""
        if self._core.hands.get(worker) is hand:
            why = f"it is not looked after any more, attach it again: {describe(error)}"
            self._core.tell(e.WorkerUnhealthy(worker, self._core.machine.rules.lost_s, why))

    async def look(self, worker: str, hand: WorkerHandle) -> None:
        """Once."""
        core, engine = self._core, hand.engine
        assert engine is not None
        state = await engine.ready()
        if hand.engine is not engine or core.hands.get(worker) is not hand:
            return
        hand.state = state
        view = core.machine.worker(worker)
        if view is None or view.doing is not None:
            return  # what is seen meanwhile is what is being done to it
        if state.up or state.paused or state.asleep:
            await self._reached(worker, hand, state, view)
        else:
            self._unwell(worker, hand, state.why)

    async def _reached(self, worker: str, hand: WorkerHandle, state: EngineState, view: WorkerView) -> None:
        core = self._core
        hand.unwell_since = None
        if self._restarted(hand, state, view):
            hand.boots = state.boots
            core.tell(e.WorkerUp(worker, number_of(state.version)))
            return
        if state.asleep and state.elsewhere and not view.asleep and view.state not in IN_OUR_HANDS:
            core.tell(e.WorkerSlept(worker, keeps_weights=False))  # nobody says how deep: not to know is not to have
            return
        if state.up and view.asleep and view.state is S.inactive:
            core.tell(e.WorkerUp(worker, number_of(state.version), restarted=False))
            return
        if view.state is not S.inactive and (view.paused_elsewhere or not view.paused):
            core.tell(e.PausedExternally(worker, state.paused and state.elsewhere and not state.asleep))
        core.tell(e.WorkerHealthy(worker))
        await self._load(worker, hand)

    def _restarted(self, hand: WorkerHandle, state: EngineState, view: WorkerView) -> bool:
        if view.state is S.lost or state.boots != hand.boots:
            return True
        offered = hand.engine is not None and Offers.version in hand.engine.verbs
        if not offered or state.version is None or view.version is None or view.state not in (S.active, S.draining):
            return False
        reported = number_of(state.version)
        return reported is not None and reported != view.version

    async def _load(self, worker: str, hand: WorkerHandle) -> None:
        engine = hand.engine
        assert engine is not None
        try:
            load = await engine.load()
        except TrimtabError:
            return  # the next look says whether it is well
        if load.fresh and hand.engine is engine and worker in self._core.hands:
            hand.load = load
            self._core.tell(e.LoadReported(worker, load.running, load.waiting, load.kv_used_share or 0.0, load.at))

    def _unwell(self, worker: str, hand: WorkerHandle, why: str) -> None:
        now = self._core.clock()
        if hand.unwell_since is None:
            hand.unwell_since = now
        self._core.tell(e.WorkerUnhealthy(worker, now - hand.unwell_since, why))
