"""Weight updates for the trainer: membership, when to send, and the outcome.

    async with pool.refit(version=7) as refit:
        await refit.load("/weights/7")          # every engine reads them itself
    async with pool.refit(version=8, way="collective") as refit:
        trainer.send(refit.engines)             # sent by the trainer; offsets and sizes are frozen until the end

Leaving the block ends the refit. Engines that were neither confirmed nor failed must then report the version; after
an exception, unconfirmed engines count as failed. An engine without the new weights is out of service; the others go
on. A refit that failed on all of them says how the pool is brought back: `pool.restore()`.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import InFlight, Membership, Owner, RefitWay
from trimtab.runtime.engines.engine import Engine
from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.rollout.worker_actions import WorkerActions, forget_prefixes, resume_after_update, said


class RefitEngine(Frozen):
    """An engine in a refit, with ranks offset .. offset + size - 1 of the collective."""

    worker: str
    url: str
    offset: int
    size: int
    engine: Engine | None


class RefitWaiters:
    """Futures for the start and the end of refits."""

    def __init__(self, core: RolloutCore) -> None:
        self.core = core
        self.ready: dict[int, asyncio.Future[e.RefitReady]] = {}
        self.over: dict[int, asyncio.Future[e.RefitOver]] = {}
        core.handlers |= {e.RefitReady: self._ready, e.RefitOver: self._over}

    def _ready(self, ready: e.RefitReady) -> None:
        for member in ready.membership.members:
            if member.worker in self.core.handles:
                self.core.handles[member.worker].weight_updates += 1
        found = self.ready.get(ready.version)
        if found is not None and not found.done():
            found.set_result(ready)

    def _over(self, over: e.RefitOver) -> None:
        found = self.over.get(over.version)
        if found is not None and not found.done():
            found.set_result(over)


class RefitSession:
    """A refit, from begin to end."""

    def __init__(
        self,
        refits: RefitWaiters,
        actions: WorkerActions,
        version: int,
        way: RefitWay,
        in_flight: InFlight,
        wait_s: float,
    ) -> None:
        self.version = version
        self.way = way
        self.outcome: e.RefitOver | None = None
        """Workers with and without the new weights; set when the block is left."""
        self._refits, self._actions, self._core = refits, actions, refits.core
        self._in_flight, self._wait_s = in_flight, wait_s
        self._reported: set[str] = set()
        self._restores = False
        self._served = self._core.machine.served_version  # before this refit
        self._membership: Membership | None = None

    # ---- for the trainer ---------------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Members; frozen until the refit is over."""
        if self._membership is None:
            raise InputError("the refit has not begun", hint="async with pool.refit(version) as refit: ...")
        return self._membership

    @property
    def engines(self) -> tuple[RefitEngine, ...]:
        """Members with their addresses and ranks."""
        handles = self._core.handles
        return tuple(
            RefitEngine(
                member.worker,
                handles[member.worker].url if member.worker in handles else "",
                member.offset,
                member.size,
                handles[member.worker].engine if member.worker in handles else None,
            )
            for member in self.membership.members
        )

    async def load(self, path: str) -> None:
        """All engines read the weights from disk, in parallel. An engine that fails is out of service."""
        self._core.weights[self.version] = str(path)
        self._core.wake_waiters()
        if self._core.machine.rules.ownership.refit is Owner.trimtab:
            return  # the machine does it, maybe in sequence, and is awaited at the end
        await asyncio.gather(*(self._load(member.worker) for member in self.membership.members))

    async def restore(self, path: str | None = None) -> None:
        """Engines that still have this version are confirmed; the others load it."""
        if path is not None:
            self._core.weights[self.version] = str(path)
        self._restores, self._core.restoring = True, self.version
        self._core.wake_waiters()
        if self._core.machine.rules.ownership.refit is Owner.trainer:
            await asyncio.gather(*(self._load(member.worker) for member in self.membership.members))

    def confirm(self, worker: str) -> None:
        """This engine has the new weights."""
        self._reported.add(worker)
        self._core.handle_event(e.RefitConfirmed(worker, self.version, self.membership.epoch))

    def fail(self, worker: str, why: str) -> None:
        """This engine does not have the new weights."""
        self._reported.add(worker)
        self._core.handle_event(e.RefitFailed(worker, self.version, why))

    # ---- lifecycle ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> RefitSession:
        loop, version = asyncio.get_running_loop(), self.version
        if version in self._refits.over:
            raise InputError(f"a refit to version {version} is open", hint="wait for its end")
        ready: asyncio.Future[e.RefitReady] = loop.create_future()
        self._refits.ready[version], self._refits.over[version] = ready, loop.create_future()
        try:
            self._core.handle_event(e.RefitBegun(version, self.way, self._in_flight))
            done, _ = await asyncio.wait({ready}, timeout=self._wait_s)
            if not done:
                self._core.handle_event(e.RefitEnded(version))
                raise UnreachableError(
                    f"the engines were still busy after {self._wait_s:g} s, so version {version} was not sent",
                    hint=self._way_back(),
                )
        except BaseException:
            self._forget()
            raise
        self._membership = ready.result().membership
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self._refits.over[self.version]
        try:
            if self._core.machine.rules.ownership.refit is Owner.trainer:
                await self._settle(error)
                self._core.handle_event(e.RefitEnded(self.version))
            elif error is not None:
                self._core.handle_event(e.RefitEnded(self.version))
            done, _ = await asyncio.wait({over}, timeout=self._core.machine.rules.refit_s)
            if done:
                self.outcome = over.result()
        finally:
            self._forget()
            if self._restores:
                self._core.restoring = None
        if error is not None and self.outcome is not None and not self.outcome.current:
            getattr(error, "add_note", lambda note: None)(self._way_back())  # since Python 3.11
        if error is None and self.outcome is not None and self.membership.members and not self.outcome.current:
            worker = self._core.machine.worker(self.outcome.failed[0])
            why = "" if worker is None else f"; {worker.worker}: {worker.reason.sentence}"
            raise InfeasibleError(
                f"no engine has version {self.version}: {self.outcome.reason.sentence}{why}", hint=self._way_back()
            )

    def _way_back(self) -> str:
        """Which call brings the pool back."""
        if self._restores:
            return f"await pool.restore(path) with weights of version {self.version}, or refit to another version"
        return (
            f"await pool.restore() brings version {self._served} back, and a new refit brings other weights; "
            "until then nothing is served"
        )

    async def _settle(self, error: BaseException | None) -> None:
        left = [member.worker for member in self.membership.members if member.worker not in self._reported]
        if error is not None:
            for worker in left:
                self.fail(worker, f"the trainer's refit broke off: {error!r}")
        elif self.way is RefitWay.disk:
            for worker in left:
                self.fail(worker, "the weights were not loaded: call refit.load(path)")
        else:
            await asyncio.gather(*(self._confirm_version(worker) for worker in left))

    async def _load(self, worker: str) -> None:
        handle = self._core.handles.get(worker)
        if handle is None or handle.engine is None:
            return  # it is gone, as the machine knows
        try:
            await asyncio.wait_for(self._actions.load(handle, worker, self.version), self._core.machine.rules.refit_s)
        except asyncio.TimeoutError:
            self.fail(worker, f"it has not loaded them in {self._core.machine.rules.refit_s:g} s")
        except (TrimtabError, OSError) as error:
            self.fail(worker, said(error))
        else:
            self.confirm(worker)

    async def _confirm_version(self, worker: str) -> None:
        """The trainer sent the weights itself; checks the version that the engine reports, if it does."""
        handle = self._core.handles.get(worker)
        if handle is None or handle.engine is None:
            return
        try:
            await handle.engine.refitted(str(self.version))
            await forget_prefixes(handle.engine)
            await resume_after_update(handle)
        except (TrimtabError, OSError) as error:
            self.fail(worker, said(error))
        else:
            self.confirm(worker)

    def _forget(self) -> None:
        self._refits.ready.pop(self.version, None)
        self._refits.over.pop(self.version, None)
