"""Warm workers: idle processes kept ready on each node (setting `warm_hosts`), bound to a task in milliseconds.

Starting a process takes half a second of a core, so few are started at once, more if a task waits for one; a bound one
is replaced once its task is constructed, since both would share the cores. Must never return a worker that is known to
be dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.runtime.procs.background import Background, describe
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.workers.environments import WarmWorkerKind
from trimtab.runtime.workers.node_agent import EXIT_WAIT_S, NodeAgents
from trimtab.runtime.workers.worker_process import WorkerProcess

_REFILL_AFTER_S = 0.2  # the first call of a task comes before its worker's replacement
_TASK_FIRST_S = 5.0  # and so does its construction, for so long
_MAX_BACKOFF_S = 30.0

log = logging.getLogger(__name__)


class WorkerSetupError(Exception):
    """Ray cannot set up a task's runtime environment; a retry would not help."""


class WarmWorker(Frozen):
    """A process that is ready to be bound."""

    node: str
    actor: str
    handle: Any
    pid: int
    born: float
    kind: WarmWorkerKind


class WarmPool:
    """The warm workers of a controller."""

    def __init__(self, controller: str, agents: NodeAgents, background: Background, start_s: float) -> None:
        self._controller = controller
        self._agents = agents
        self._background = background
        self._start_s = start_s
        self._targets: dict[str, dict[WarmWorkerKind, int]] = {}
        self._ready: dict[str, list[WarmWorker]] = {}
        self._starting: dict[str, dict[str, WarmWorkerKind]] = {}  # by node and actor name
        self._waiting: dict[str, list[tuple[WarmWorkerKind, asyncio.Future[WarmWorker]]]] = {}
        self._binding: Counter[str] = Counter()  # by node: workers requested, whose task is not constructed yet
        self._failures: Counter[tuple[str, str]] = Counter()  # consecutive, by node and runtime environment
        self._backing_off: set[tuple[str, str]] = set()  # node and environment of a recently failed start
        self._own_names: set[str] = set()  # names of workers that were started or adopted here
        self._jobs: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()
        self._closed = False

    def set_targets(self, targets: Mapping[str, Mapping[WarmWorkerKind, int]]) -> None:
        """Set the number of ready workers by node and kind; surplus ones are ended."""
        self._targets = {node: dict(wanted) for node, wanted in targets.items()}
        for node, ready in self._ready.items():
            kept: Counter[WarmWorkerKind] = Counter()
            for host in list(ready):
                kept[host.kind] += 1
                if kept[host.kind] > self._targets.get(node, {}).get(host.kind, 0):
                    ready.remove(host)
                    self._run("end a warm host", self._end(host))
        for node in self._targets:
            self._start_missing(node)

    def expect(self, node: str, wanted: Mapping[WarmWorkerKind, int]) -> None:
        """Start these while the node's agent starts. Replaced by the next `set_targets`."""
        if wanted:
            self._targets[node] = dict(wanted)
            self._start_missing(node)

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            node: {"ready": len(self._ready.get(node, ())), "starting": len(self._starting.get(node, ()))}
            for node in self._agents.nodes
        }

    @contextlib.asynccontextmanager
    async def take(self, node: str, kind: WarmWorkerKind) -> AsyncIterator[tuple[WarmWorker, bool]]:
        """The best matching ready worker of this node and runtime environment, else the next to become ready; and
        whether it was ready. In the context its task is constructed, before spare workers are started.

        WorkerSetupError if the environment cannot be set up there.
        """
        loop = asyncio.get_running_loop()
        self._binding[node] += 1
        try:
            taken = await self._take(node, kind)
        except BaseException:
            self._bound(node)
            raise
        until = loop.call_later(_TASK_FIRST_S, self._bound, node)
        try:
            yield taken
        finally:
            if until.when() > loop.time():
                until.cancel()
                loop.call_later(_REFILL_AFTER_S, self._bound, node)

    def _bound(self, node: str) -> None:
        self._binding[node] -= 1
        self._start_missing(node)

    async def _take(self, node: str, kind: WarmWorkerKind) -> tuple[WarmWorker, bool]:
        ready = self._ready.get(node, [])
        for preload in (kind.preload, (), None):
            for host in ready:
                if host.kind.runtime_env == kind.runtime_env and preload in (None, host.kind.preload):
                    ready.remove(host)
                    self._own_names.discard(host.actor)
                    return host, True
        if self._closed or node not in self._agents.nodes:
            raise UnreachableError(f"node {node[:12]} is gone")
        future: asyncio.Future[WarmWorker] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(node, [])
        waiting.append((kind, future))
        self._start_missing(node)
        try:
            return await asyncio.shield(future), False
        except asyncio.CancelledError:
            if (kind, future) in waiting:
                waiting.remove((kind, future))
            elif future.done() and not future.exception():
                self._hand_out(future.result())
            raise

    async def adopt(self, node: str, records: list[dict[str, Any]]) -> None:
        """Adopt warm workers of an earlier controller; those that do not answer are ended."""
        for record in records:
            if (
                record.get("kind") == "host"
                and record.get("identity", "") is None
                and record["actor"] not in self._own_names
            ):
                self._own_names.add(record["actor"])
                self._starting.setdefault(node, {})[record["actor"]] = WarmWorkerKind()
                self._run("adopt a warm host", self._adopt(node, record))

    def died(self, node: str, pid: int, born: float) -> None:
        """A process died; a warm worker is replaced."""
        ready = self._ready.get(node, [])
        ready[:] = [host for host in ready if (host.pid, host.born) != (pid, born)]
        self._start_missing(node)

    def lost(self, node: str) -> None:
        self._targets.pop(node, None)
        self._ready.pop(node, None)
        self._starting.pop(node, None)
        for key in [key for key in self._failures if key[0] == node]:
            del self._failures[key]
        for _, future in self._waiting.pop(node, []):
            future.set_exception(UnreachableError(f"node {node[:12]} is gone"))

    async def close(self) -> None:
        """Cancel all starts."""
        self._closed = True
        self._targets, self._ready = {}, {}
        for task in list(self._jobs):
            task.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _start_missing(self, node: str) -> None:
        """Start missing workers, limited by the cores of the node."""
        if self._closed or node not in self._agents.nodes:
            return
        cores = self._agents.facts.get(node, {}).get("cores", 1)
        starting = self._starting.setdefault(node, {})
        waiting = self._waiting.get(node, [])
        coming = Counter(kind.runtime_env for kind in starting.values())
        for kind, _ in list(waiting):  # a starting worker for each waiter
            if coming[kind.runtime_env] > 0:
                coming[kind.runtime_env] -= 1
            elif len(starting) < max(2, cores):
                self._launch(node, kind)
        spares = cores // 4 if self._binding[node] else max(1, cores // 2)  # at once
        while len(starting) - len(waiting) < spares and len(starting) < max(2, cores):
            held = Counter(host.kind for host in self._ready.get(node, ())) + Counter(starting.values())
            owed = Counter(kind.runtime_env for kind, _ in waiting)  # starting workers go to waiters first
            missing = [
                kind
                for kind, target in self._targets.get(node, {}).items()
                if held[kind] - owed[kind.runtime_env] < target and (node, kind.runtime_env) not in self._backing_off
            ]
            if not missing:
                return
            self._launch(node, missing[0])

    def _launch(self, node: str, kind: WarmWorkerKind) -> None:
        name = f"trimtab:{self._controller}:host:{uuid.uuid4().hex[:8]}"
        self._own_names.add(name)
        self._starting[node][name] = kind
        self._run("start a warm host", self._start(node, name, kind))

    async def _start(self, node: str, name: str, kind: WarmWorkerKind) -> None:
        """Start a worker. Afterwards it no longer counts as starting, whatever happened."""
        try:
            host = await self._started(node, name, kind)
        except BaseException as fault:
            self._own_names.discard(name)
            try:
                if isinstance(fault, Exception):
                    await self._failed(node, kind, fault)
                else:
                    raise
            finally:
                self._start_ended(node, name)
            return
        self._failures.pop((node, kind.runtime_env), None)
        self._start_done(host)

    async def _started(self, node: str, name: str, kind: WarmWorkerKind) -> WarmWorker:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        host = ray.remote(WorkerProcess).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            runtime_env=json.loads(kind.runtime_env) if kind.runtime_env else None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        creating = asyncio.ensure_future(asyncio.to_thread(host.remote, self._controller, node, name, NAMESPACE, kind))
        try:
            handle = await asyncio.shield(creating)
            facts = await asyncio.wait_for(_answer(handle.ready.remote()), self._start_s)
            await self._agents.watch(node, facts["pid"], facts["born"])
        except BaseException:
            with contextlib.suppress(Exception):
                ray.kill(await creating)
            raise
        self._log_missing(facts["missing"])
        return WarmWorker(node, name, handle, facts["pid"], facts["born"], kind)

    async def _adopt(self, node: str, record: dict[str, Any]) -> None:
        import ray

        try:
            handle = await asyncio.to_thread(ray.get_actor, record["actor"], NAMESPACE)
            facts = await asyncio.wait_for(_answer(handle.ready.remote()), 10.0)
            await self._agents.watch(node, facts["pid"], facts["born"])
        except Exception:
            with contextlib.suppress(UnreachableError):
                await self._agents.request(node, "end", record["pid"], record["born"], timeout_s=EXIT_WAIT_S + 5.0)
            self._start_ended(node, record["actor"])
            return
        if facts["phase"] != "warm":  # the earlier controller bound it: a sweep finds it
            self._agents.unwatch(node, facts["pid"], facts["born"])
            self._start_ended(node, record["actor"])
            return
        kind = WarmWorkerKind(*facts["kind"])
        self._start_done(WarmWorker(node, record["actor"], handle, facts["pid"], facts["born"], kind))

    def _start_done(self, host: WarmWorker) -> None:
        if self._starting.get(host.node, {}).pop(host.actor, None) is not None:
            self._hand_out(host)
        else:  # the node was lost
            self._run("end a warm host", self._end(host))

    def _start_ended(self, node: str, name: str) -> None:
        if self._starting.get(node, {}).pop(name, None) is not None:
            self._start_missing(node)

    def _hand_out(self, host: WarmWorker) -> None:
        """Give it to the first waiter of its environment, else add it to the ready ones."""
        waiting = self._waiting.get(host.node, [])
        first = next((waiter for waiter in waiting if waiter[0].runtime_env == host.kind.runtime_env), None)
        if first is not None:
            waiting.remove(first)
            first[1].set_result(host)
        else:
            self._ready.setdefault(host.node, []).append(host)
        self._start_missing(host.node)

    async def _failed(self, node: str, kind: WarmWorkerKind, fault: Exception) -> None:
        """Back off before the next start; fail the waiters if waiting would not help."""
        from ray.exceptions import RuntimeEnvSetupError

        if node not in self._starting:
            return
        key = (node, kind.runtime_env)
        self._failures[key] += 1
        if isinstance(fault, RuntimeEnvSetupError):
            fault = WorkerSetupError(f"its runtime environment cannot be set up: {_setup_failure(fault)}")
        if self._failures[key] >= 3 or isinstance(fault, WorkerSetupError):
            waiting = self._waiting.get(node, [])
            for waiter in [waiter for waiter in waiting if waiter[0].runtime_env == kind.runtime_env]:
                waiting.remove(waiter)
                waiter[1].set_exception(fault)
        log.warning("a warm host on node %s did not start: %s", node[:12], describe(fault))
        self._backing_off.add(key)
        try:
            await asyncio.sleep(min(_MAX_BACKOFF_S, 0.25 * 2 ** min(self._failures[key], 10)))
        finally:
            self._backing_off.discard(key)

    async def _end(self, host: WarmWorker) -> None:
        self._agents.unwatch(host.node, host.pid, host.born)
        with contextlib.suppress(UnreachableError):
            await self._agents.request(host.node, "end", host.pid, host.born, timeout_s=EXIT_WAIT_S + 5.0)

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._background.once(name, work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    def _log_missing(self, missing: list[str]) -> None:
        for module in missing:
            if module not in self._logged:
                self._logged.add(module)
                log.warning("warm hosts cannot preload %s", module)


async def _answer(ref: Any) -> Any:
    return await ref


def _setup_failure(fault: Exception) -> str:
    """Ray's reason for a failed environment setup: the last line of the message."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[-1] if lines else type(fault).__name__
