"""Runs the pool machine: an event goes through the machine, then into the journal, and only then is it executed.

Starts by replaying the journal and reconciling it with what is alive. Ticks the machine at its deadlines and does the
housekeeping (client leases, snapshots, lost placement groups). It makes no decision (the machine does), and no failure
of an instruction or an event stops it. Called by the controller's RPCs, on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.pool import events
from trimtab.machines.pool.events import PoolDropped, PoolEnsured, PoolEvent, PoolTick, TaskSubmitted
from trimtab.machines.pool.explain import instruction_text
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.reconcile import PoolReconciler, expected
from trimtab.machines.pool.records import PgState
from trimtab.model.pool import ENDED, TaskState
from trimtab.runtime.controller import nodes, recovery
from trimtab.runtime.controller.clients import ClientLeases, ClientRegistry
from trimtab.runtime.controller.executor import InstructionExecutor
from trimtab.runtime.controller.metrics import NodeMetrics, PoolMetrics, desired_workers
from trimtab.runtime.controller.rpc import ControllerSettings
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background
from trimtab.runtime.store.blobs import BlobStore, StagedBlob
from trimtab.runtime.store.journal import Journal, JournalVersionError
from trimtab.runtime.workers.environments import RuntimeEnvironments, WarmWorkerKind
from trimtab.runtime.workers.task_workers import TaskWorkerManager

log = logging.getLogger("trimtab.controller")

COMPACT_EVERY = 20_000  # events
HOUSEKEEPING_S = 1.0
GROUP_CHECK_S = 5.0
LOCK_WAIT_S = 5.0  # for a controller that has just died to release its journal
MIN_TICK_S = 0.01
TICK_RETRY_S = 1.0  # after an event on which the machine failed
USER_EVENTS = (
    events.QuotaSet,
    events.PoolDrained,
    events.PoolDropped,
    events.CompleteRequested,
    events.CancelRequested,
    events.EvictRequested,
    events.TurnRequested,
    events.NodeCordoned,
)


class MonotonicWallClock:
    """Wall-clock seconds that never go back: not when the clock is set back, not across restarts."""

    def __init__(self, not_before: float) -> None:
        self._base = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()


class ControllerLoop:
    """The pool machine, its journal, and the parts that execute its instructions."""

    def __init__(
        self, name: str, directory: Path, state_dir: str | None, ray: Any, settings: ControllerSettings | None = None
    ) -> None:
        self._name = name
        self._settings = settings or ControllerSettings()
        self.redone = 0  # lost instructions that were executed again
        self._ray = ray
        self._state_dir = state_dir
        self.directory = directory
        self.faults: list[str] = []  # internal failures, for status
        self.leases = ClientLeases()
        self.background = Background()
        self.client_registry = ClientRegistry(self.background)
        self._waiters: dict[str, set[tuple[frozenset[TaskState], asyncio.Future[None]]]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._warm_targets: dict[str, Counter[WarmWorkerKind]] = {}
        self._logged_fault: str | None = None  # journal fault that was logged last
        self._compactor: subprocess.Popen[bytes] | None = None
        self.closing = False

    # ---- start ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Replay the journal and recover what is alive."""
        began = time.monotonic()
        with _gc_disabled():
            try:
                self.journal = await asyncio.to_thread(
                    Journal, self.directory, owner=self._name, lock_wait_s=LOCK_WAIT_S, background=self.background
                )
            except JournalVersionError as refusal:  # before anything is started
                raise await asyncio.to_thread(recovery.refused_journal, self._ray, self._name, refusal) from None
            try:
                self.blobs = BlobStore(self.directory, self._state_dir)
                self.machine, is_fresh = self._replay()
            except BaseException:
                self.journal.close()
                raise
        self.environments = RuntimeEnvironments(self._ray, self.blobs)
        try:
            self.blobs.keep_only(self.machine.tasks)
            self.environments.recover(self._unfinished())
            await self._attach(is_fresh)
        except BaseException:
            self.background.stop()
            self.journal.close()
            raise
        took_s = time.monotonic() - began
        log.info("controller %s started after %.2f s, journal in %s", self._name, took_s, self.directory)

    def _replay(self) -> tuple[PoolMachine, bool]:
        """The machine as of the journal, and whether the journal was empty."""
        found = self.journal.take_contents()
        if found.torn:
            log.warning(found.torn)
        self._clock = MonotonicWallClock(found.last_time)
        machine = PoolMachine.load(found.snapshot) if found.snapshot is not None else PoolMachine()
        for now, event in found.events:
            machine.handle(event, now)
        return machine, found.empty

    async def _attach(self, is_fresh: bool) -> None:
        self.pool_metrics = PoolMetrics(self._name, self.machine, alias=self._settings.metric_alias)
        self.node_metrics = NodeMetrics(self._name)
        self.workers = TaskWorkerManager(
            self._name,
            self._state_dir,
            lambda member, why: self.executor.on_death(member, why),
            self.background,
            self._settings.worker_start_s,
        )
        self.executor = InstructionExecutor(self, self.workers, self.blobs, workers_save=self._state_dir is not None)
        self.node_monitor = nodes.NodeMonitor(
            self,
            self.workers,
            self._ray,
            self.directory / "nodes",
            self.executor.node_lost,
            self.client_registry.notify,
            self._settings.poll_nodes_s,
        )
        if self.node_monitor.set_aside:
            self.faults.append(self.node_monitor.set_aside)
        seen = await asyncio.to_thread(nodes.read_ray_nodes, self._ray)
        await asyncio.gather(*(self._join_node(node.node) for node in seen.nodes))
        self.node_monitor.adopt(self.machine.nodes)
        if is_fresh:
            await self.node_monitor.step(wait=True)
            if lost := await recovery.recover_without_journal(self, self.workers):
                log.error(lost)
                self.journal.note(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {lost}")
                self.journal.snapshot(self.now(), self.machine.dump())
        owners = [task.spec.client for task in self.machine.tasks.values()]
        owners += [pool.spec.client for pool in self.machine.pools.values()]
        for client in filter(None, owners):
            self.leases.touch(client)
        await recovery.reconcile(self, self.workers, self.executor, self.node_monitor)
        for name, work in (
            ("watch nodes", self.node_monitor.run),
            ("housekeeping", self._housekeep),
            ("client leases", self._watch_leases),
            ("check placement groups", self._check_groups),
            ("reconcile", self._reconcile),
        ):
            self._loops.append(self.background.start(name, work, policy=NEVER_GIVE_UP))
        self._wake_soon()

    async def _join_node(self, node: str) -> None:
        try:
            await self.workers.node_joined(node)
        except Exception as fault:
            log.warning("no agent on node %s yet: %s", node[:12], fault)

    # ---- events ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def feed(self, event: PoolEvent) -> None:
        """Handle an event of the runtime. A failure is recorded for `status`; the controller continues."""
        try:
            self.handle(event)
        except InputError as fault:  # about something that is no longer known
            log.info("%s was refused: %s", type(event).__name__, fault.what)
        except Exception as fault:
            log.exception("the machine failed on %s", event)
            self.faults.append(f"{type(event).__name__}: {type(fault).__name__}: {fault}")
            asyncio.get_running_loop().call_later(TICK_RETRY_S, self._wake_soon)  # sets the timer even after a failure

    def handle(self, event: PoolEvent, staged: StagedBlob | None = None) -> None:
        """Handle an event and the staged file it refers to. InputError, with nothing changed, if it is refused."""
        if self.closing and isinstance(event, (*USER_EVENTS, TaskSubmitted, PoolEnsured)):
            raise UnreachableError(f"the controller {self._name} is shutting down")
        now = self.now()
        resubmitted = isinstance(event, TaskSubmitted) and event.spec.id in self.machine.tasks
        instructions = self.machine.handle(event, now)
        if isinstance(event, TaskSubmitted) and staged is not None:
            if resubmitted:
                self.blobs.forget_previous_run(event.spec.id)
            staged.commit()
            self.journal.sync_first(staged.path)
        self.journal.append(now, event, [*map(instruction_text, instructions)])
        for instruction in instructions:
            self.executor.begin(instruction)
        self.pool_metrics.observe(event)
        self._wake_soon()

    def alive(self, node: str) -> bool:
        return node in self.node_monitor.known

    async def refresh_nodes(self, nodes: Collection[str], without: str) -> None:
        """Read again what others hold on these nodes: a placement group could not be created there."""
        await self.node_monitor.refresh(nodes, without)

    # ---- waiting --------------------------------------------------------------------------------------------

    async def wait(self, task: str, states: frozenset[TaskState], timeout_s: float) -> None:
        """Wait until the task is in one of the states or forgotten, or the timeout has passed."""
        record = self.machine.tasks.get(task)
        if record is None or record.state in states or timeout_s <= 0:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiters.setdefault(task, set())
        waiting.add((states, future))
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            waiting.discard((states, future))
            if not waiting:
                self._waiters.pop(task, None)

    def _wake_soon(self) -> None:
        """Once per iteration of the event loop: wake waiters, set the timer, update warm workers, compact."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._woken = False
        for task, waiting in self._waiters.items():
            record = self.machine.tasks.get(task)
            for states, future in waiting:
                if not future.done() and (record is None or record.state in states or self.closing):
                    future.set_result(None)
        self.client_registry.notify()
        if self.closing:
            return
        self._set_timer()
        self.update_warm_workers()
        if self.journal.since_snapshot >= COMPACT_EVERY:
            self._compact()

    def update_warm_workers(self) -> None:
        """Set the warm worker targets that the pools want now."""
        targets: dict[str, Counter[WarmWorkerKind]] = {}
        for node, by_pool in self.machine.warm_targets().items():
            targets[node] = Counter()
            for pool, count in by_pool.items():
                targets[node][self.environments.kind(self.machine.pools[pool].spec)] += count
        if targets != self._warm_targets:
            self._warm_targets = targets
            self.background.once("set warm targets", self.workers.warm(targets), on_failed=lambda *_: targets.clear())

    def _unfinished(self) -> list[str]:
        return [task.id for task in self.machine.tasks.values() if task.state not in ENDED]

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None:
            delay_s = max(MIN_TICK_S, deadline - self.now())
            self._timer = asyncio.get_running_loop().call_later(min(delay_s, 3600.0), self.feed, PoolTick())

    def _compact(self) -> None:
        """Compact the journal in a separate process, and delete the files of forgotten tasks."""
        if self._compactor is not None:
            return  # the next event tries again
        segment = self.journal.rotate()
        command = [sys.executable, "-m", "trimtab.runtime.store.journal", str(self.directory), str(segment)]
        self._compactor = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self.executor.forget(self.machine.tasks)
        asyncio.get_running_loop().run_in_executor(
            None, self.blobs.keep_only, set(self.machine.tasks), time.time()
        ).add_done_callback(log_failure)

    # ---- loops ----------------------------------------------------------------------------------------------

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if self._compactor is not None and (status := self._compactor.poll()) is not None:
                self._compactor = None
                if status:
                    self.faults.append(f"the journal in {self.directory} could not be compacted and is unchanged")
            self.journal.catch_up()
            await self.executor.states.retry_writes()
            await self.pool_metrics.sample(self.workers.warm_counts())
            views = self.node_monitor.views(gone=True)
            self.node_metrics.sample(views, self.desired_workers(), self.client_registry)
            if self.journal.fault != self._logged_fault:
                self._logged_fault = self.journal.fault
                log.error(self._logged_fault or "the journal can be written again")
            pools = [pool.spec for pool in self.machine.pools.values() if not pool.dropped]
            await self.environments.renew(self._unfinished(), pools)
            if self.journal.vanished:
                log.error("the journal in %s was deleted; writing it again", self.directory)
                self.journal.snapshot(self.now(), self.machine.dump())
                self.blobs.make_folders()

    def desired_workers(self) -> int:
        busy = {node for group in self.machine.groups.values() for node in group.nodes}
        return desired_workers(self.node_monitor.views(), busy, self.client_registry.wanted)

    async def _watch_leases(self) -> None:
        """End the tasks and pools of dead clients."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            silent = self.leases.silent()
            alive = await asyncio.gather(*(self.workers.agents.process_alive(process) for process in silent.values()))
            for client, found in zip(silent, alive, strict=True):
                if self.leases.is_dead(client, found):
                    log.warning("client %s is gone", client)
                    self.end_tasks_of(client)

    def end_tasks_of(self, client: str) -> None:
        self.leases.end(client)
        self.client_registry.forget(client)
        for record in list(self.machine.tasks.values()):
            if record.spec.client == client and record.state not in ENDED:
                self.feed(events.CancelRequested(record.id, code=ReasonCode.client_died))
        owned = [pool for pool in self.machine.pools.values() if pool.spec.client == client and not pool.dropped]
        for pool in owned:
            self.feed(PoolDropped(pool.spec.name))

    async def _reconcile(self) -> None:
        """Periodically execute again the instructions that the machine waits for and nothing executes."""
        reconciler = PoolReconciler()
        while True:
            await asyncio.sleep(self._settings.reconcile_s)
            for instruction in reconciler.lost(expected(self.machine), self.executor.in_progress()):
                self.redone += 1
                log.error("nothing executes %s: executing it again", instruction)
                self.executor.retry(instruction)

    async def _check_groups(self) -> None:
        while True:
            await asyncio.sleep(GROUP_CHECK_S)
            # Only groups that were ready before the query can be missing from its result.
            ready = [group for group in self.machine.groups.values() if group.state is PgState.ready]
            try:
                seen = await asyncio.wait_for(self.workers.groups(), nodes.ANSWER_S)
            except Exception as fault:
                log.warning("cannot list placement groups: %s", fault)
                continue
            for group in ready:
                if group.id not in self.machine.groups or group.state is not PgState.ready:
                    continue
                if group.id not in seen:
                    self.feed(events.PlacementGroupLost(group.id, "the placement group was removed by another process"))
                elif not seen[group.id].intact and all(self.alive(node) for node in group.nodes):
                    self.feed(events.PlacementGroupLost(group.id, "not all of its bundles are placed"))

    # ---- shutdown -------------------------------------------------------------------------------------------

    async def close(self, destroy: bool, timeout_s: float) -> None:
        """Close the journal; with `destroy`, first end all tasks, slots and processes."""
        if destroy:
            for pool in list(self.machine.pools):
                self.feed(PoolDropped(pool))
            deadline = time.monotonic() + timeout_s
            while self._unfinished() and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        self.closing = True
        for task in self._loops:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.node_monitor.close()
        await self.client_registry.close()
        await self.executor.close()
        if destroy:
            await asyncio.wait_for(self.workers.close(), timeout_s)
        if self._compactor is not None:
            self._compactor.kill()  # an unfinished compaction changes nothing
            self._compactor.wait()
        self.journal.close()
        self._wake()
        self.background.stop()


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Without garbage collection, which would scan the growing state again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def log_failure(task: asyncio.Task[Any] | asyncio.Future[Any]) -> None:
    """Log the exception of a task that nothing awaits."""
    if not task.cancelled() and (fault := task.exception()) is not None:
        if isinstance(fault, TrimtabError):
            log.warning("%s", fault)
        else:
            log.error("%s", fault, exc_info=fault)
