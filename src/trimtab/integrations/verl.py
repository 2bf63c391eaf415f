"""A load balancer for verl's rollout servers, with verl's interface, on top of the leases of a rollout pool.

verl's agent loops ask one actor for a server before each turn, talk to that server themselves, and give it back. Here
that actor holds a `RolloutPool` with one worker per server: turns of one trajectory and samples of one prompt go to the
same server while that pays, else to the one with the least to do; a full or lost server gets nothing; whoever comes
while all are full waits, with a reason at the end, instead of piling up inside an engine.

Everything else stays verl's: weights, sleep, pause and abort. So the pool is told that the trainer owns these verbs,
and must never end or move a turn by itself; and a server that verl takes out gets nothing from that moment on, though
its turns are still counted until they have ended. A server that comes back is a new worker: nothing that was believed
of the old one (load, cache, loss) is carried over.

verl finds it by a file that `actor_rollout_ref.rollout.router_config_path` names:

    router_class: trimtab.integrations.verl.LoadBalancer
    limit: 256        # turns at once on one server
    wait_s: 600       # for a place, before the caller is told that there is none
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray
from ray.exceptions import RayActorError

from trimtab.core.errors import InputError, TrimtabError, UnreachableError, nearest
from trimtab.model.rollout import Owner, Ownership, RequestClass, RolloutRules, WorkerSpec, WorkerState
from trimtab.runtime.engines.engine import (
    EngineCapability,
    EngineLoad,
    EngineState,
    GenerateRequest,
    MemoryTag,
    NotSupportedError,
    PauseMode,
    StreamDelta,
    WeightUpdate,
)
from trimtab.runtime.rollout.leases import Lease
from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.integrations.verl")

NO_SERVER = "No available servers in load balancer"  # verl's clients look for these words, and come again
CALLS_AT_ONCE = 1_000_000  # of the actor: callers that wait for a place must never keep out one that gives his back
QUEUE_LIMIT = 1_000_000
OUT = "verl took it out"
WATCHES = ("actor", "http", "none")
ALIVE_S = 5.0  # an actor that does not answer for so long is busy, not dead: of a death Ray tells by itself


@dataclass(frozen=True)
class BalancerSettings:
    """What the file for verl may say, beside `router_class`."""

    limit: int = 256  # turns at once on one server
    wait_s: float = 600.0  # for a place
    lease_s: float = 14_400.0  # for one turn; then it is said to be overdue
    by_prompt: bool = True  # samples of one prompt go together; costs sending the prompt's ids with each turn
    watch: str = "actor"  # how a loss is seen: by Ray, by the server's own HTTP interface, or not at all
    look_s: float = 2.0  # between two looks
    sticky: int = 10_000  # trajectories that are remembered

    def __post_init__(self) -> None:
        for name in ("limit", "sticky"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number, 1 or more, not {value!r}", where=name)
        for name in ("wait_s", "lease_s", "look_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InputError(f"{name} must be a number of seconds above 0, not {value!r}", where=name)
        if self.watch not in WATCHES:
            raise InputError(f"watch is {self.watch!r}", where="watch", hint=f"one of {', '.join(WATCHES)}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> BalancerSettings:
        """From plain data; a key that does not exist is an error that names the nearest one."""
        known = [one.name for one in fields(cls)]
        for key in given:
            if key not in (*known, "router_class"):
                near = nearest(str(key), known)
                hint = f"did you mean {near}?" if near else f"settings: {', '.join(known)}"
                raise InputError(f"{key} is no setting of the load balancer", where=str(key), hint=hint)
        return cls(**{key: value for key, value in given.items() if key != "router_class"})


@dataclass
class BalancedServer:
    """A server as a worker of the pool. Taken out and put back, it is another one."""

    server: str
    handle: Any
    worker: str


class Balancer:
    """verl's `RequestLoadBalancer`. `LoadBalancer` is the actor; this is the class, for one event loop."""

    def __init__(
        self,
        servers: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        max_cache_size: int | None = None,
    ) -> None:
        given = dict(config or {})
        if max_cache_size is not None:
            given.setdefault("sticky", max_cache_size)
        self._settings = BalancerSettings.read(given)
        self._first = dict(servers or {})
        self._pool: RolloutPool | None = None
        self._starting = asyncio.Lock()
        self._places: dict[str, BalancedServer] = {}  # by server: exactly those that get turns
        self._by_worker: dict[str, BalancedServer] = {}  # also those that are on their way out
        self._leases: dict[tuple[str, str], deque[Lease]] = {}  # by server and request, oldest first
        self._inflight: Counter[str] = Counter()  # by worker
        self._groups: OrderedDict[str, str] = OrderedDict()  # by request; the latest last
        self._age = 0  # of groups: after a clearing nothing is where it was
        self._numbers = Counter[str]()
        self._leaving: set[asyncio.Task[None]] = set()

    # ---- turns -----------------------------------------------------------------------------------------------------

    def require_acquire_fields(self) -> list[str]:
        """What is wanted of a turn beside its request's id."""
        return ["prompt_ids"] if self._settings.by_prompt else []

    def require_release_fields(self) -> list[str]:
        """What is wanted when a turn has ended, beside its server."""
        return ["request_id"]

    async def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int] | None = None, **others: Any
    ) -> tuple[str, Any]:
        """A server for one turn: its id and its handle. Raises RuntimeError where there is none, or none in time."""
        pool = await self._running()
        if not self._places:
            raise RuntimeError(NO_SERVER)
        settings = self._settings
        group = self._group(request_id, prompt_ids)
        try:
            lease = await pool.acquire(group=group, wait_s=settings.wait_s, for_s=settings.lease_s)
        except UnreachableError as error:
            raise RuntimeError(f"{NO_SERVER}: {error.what}") from error
        place = self._by_worker[lease.worker]
        self._leases.setdefault((place.server, request_id), deque()).append(lease)
        self._inflight[lease.worker] += 1
        return place.server, place.handle

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A turn has ended. What is not known is not an error: verl does not wait for an answer."""
        key = self._held(server_id, request_id)
        if key is None:
            return
        leases = self._leases[key]
        lease = leases.popleft()
        if not leases:
            del self._leases[key]
        self._inflight[lease.worker] -= 1
        if self._inflight[lease.worker] <= 0:
            del self._inflight[lease.worker]
        await lease.release()

    def _held(self, server: str, request: str | None) -> tuple[str, str] | None:
        if request is not None:
            return (server, request) if (server, request) in self._leases else None
        return next((key for key in self._leases if key[0] == server), None)

    def _group(self, request: str, prompt: Sequence[int] | None) -> str:
        """Turns of one trajectory begin alike, and so do samples of one prompt."""
        group = self._groups.get(request)
        if group is None:
            start = request if prompt is None or not len(prompt) else _digest(prompt)
            group = self._groups[request] = f"{self._age}.{start}"
            if len(self._groups) > self._settings.sticky:
                self._groups.popitem(last=False)
        self._groups.move_to_end(request)
        return group

    # ---- servers ---------------------------------------------------------------------------------------------------

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        """They get turns from now on; one that is known is replaced. Where one cannot be reached, none is added."""
        pool = await self._running()
        await self._add(pool, servers)

    async def _add(self, pool: RolloutPool, servers: Mapping[str, Any]) -> None:
        adding = [self._enter(pool, server, handle) for server, handle in servers.items()]
        came = await asyncio.gather(*adding, return_exceptions=True)
        faults = [one for one in came if isinstance(one, BaseException)]
        places = [one for one in came if isinstance(one, BalancedServer)]
        if faults:
            for place in places:
                self._leave(pool, place)
            raise faults[0]
        for place in places:
            old = self._places.get(place.server)
            self._places[place.server] = place
            if old is not None:
                self._leave(pool, old)

    async def _enter(self, pool: RolloutPool, server: str, handle: Any) -> BalancedServer:
        self._numbers[server] += 1
        place = BalancedServer(server, handle, f"{server}#{self._numbers[server]}")
        self._by_worker[place.worker] = place
        limit = self._settings.limit
        try:
            if self._settings.watch == "http":
                url = server if "://" in server else f"http://{server}"
                await pool.attach(url, name=place.worker, limit=limit, version=pool.version)
            else:
                watched = handle if self._settings.watch == "actor" else None
                engine = ServerEngine(place.worker, watched, lambda why: pool.died(place.worker, why))
                spec = WorkerSpec(place.worker, limit=limit, can_sleep=False, can_pause=False)
                await pool.add_engine(engine, spec, version=pool.version)
        except BaseException:
            del self._by_worker[place.worker]
            raise
        return place

    async def remove_servers(self, server_ids: Collection[str]) -> None:
        """They get nothing more. Turns that they have are ended by verl, and counted here until then."""
        pool = await self._running()
        for server in server_ids:
            place = self._places.pop(server, None)
            if place is not None:
                self._leave(pool, place)

    def _leave(self, pool: RolloutPool, place: BalancedServer) -> None:
        pool.take(place.worker, self._settings.lease_s, OUT, forced=True)  # at once; what follows takes a while
        task = asyncio.get_running_loop().create_task(self._see_off(pool, place))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _see_off(self, pool: RolloutPool, place: BalancedServer) -> None:
        """Until it is gone: its turns are not ours to end, so this takes as long as they do."""
        while not await self._gone(pool, place):
            await asyncio.sleep(self._settings.look_s)
        self._by_worker.pop(place.worker, None)

    async def _gone(self, pool: RolloutPool, place: BalancedServer) -> bool:
        try:
            if any(one.worker == place.worker for one in pool.workers()):
                await pool.remove(place.worker, why=OUT)
        except TrimtabError as error:
            log.info("server %s: %s", place.server, error.what)
            return False
        return True

    # ---- questions -------------------------------------------------------------------------------------------------

    async def get_all_servers(self) -> list[str]:
        """Servers that are registered."""
        await self._running()
        return list(self._places)

    async def get_inflight_count(self, server_id: str) -> int:
        """Turns of one server."""
        return self._loads().get(server_id, 0)

    async def get_total_inflight(self) -> int:
        """Turns on all registered servers."""
        return sum(self._loads().values())

    async def get_status(self) -> dict[str, Any]:
        """Who has how many turns; `pool` says all that a rollout pool says."""
        pool = await self._running()
        active = {one.worker for one in pool.workers() if one.state is WorkerState.active}
        loads = self._loads()
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": sum(one.worker in active for one in self._places.values()),
            "registered_handles": list(self._places),
            "pool": pool.status(),
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which trajectory and which prompt was where."""
        cleared = len(self._groups)
        self._groups.clear()
        self._age += 1
        return {"cleared_entries": cleared, "server_loads": self._loads()}

    def _loads(self) -> dict[str, int]:
        return {server: self._inflight[place.worker] for server, place in self._places.items()}

    # ---- life ------------------------------------------------------------------------------------------------------

    async def _running(self) -> RolloutPool:
        """The pool; the first caller starts it, since only then there is an event loop."""
        if self._pool is not None:
            return self._pool
        async with self._starting:
            if self._pool is None:
                pool = RolloutPool(_rules(self._settings), look_s=self._settings.look_s)
                await pool.start()
                try:
                    await self._add(pool, self._first)
                except BaseException:
                    await pool.stop()
                    raise
                self._pool = pool
        return self._pool

    async def close(self) -> None:
        """End what is open here; servers live on."""
        for task in list(self._leaving):
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._pool is not None:
            await self._pool.stop()


class ServerEngine:
    """A server that somebody else talks to: all that is asked of it is whether it lives."""

    kind = "actor"
    verbs: frozenset[EngineCapability] = frozenset()

    def __init__(self, name: str, handle: Any, on_gone: Callable[[str], None]) -> None:
        self.name = name
        self._handle = handle
        self._on_gone = on_gone
        self._gone = ""

    async def ready(self) -> EngineState:
        """Alive, unless Ray has said that the actor is dead; one that is too busy to answer is not."""
        asked = getattr(self._handle, "__ray_ready__", None)
        if asked is not None and not self._gone:
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(asked.remote().future()), ALIVE_S)
            except RayActorError as error:
                self._gone = str(error).partition("\n")[0] or "the actor died"
                asyncio.get_running_loop().call_soon(self._on_gone, self._gone)
        return EngineState(not self._gone, self._gone or "it lives", dialect="a server of verl")

    async def load(self) -> EngineLoad:
        """It is not asked."""
        raise self._not_ours("load")

    def generate(self, order: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        """Turns are between verl and the server."""
        raise self._not_ours("generate")

    async def abort(self, ids: Collection[str] | None = None) -> None:
        """The trainer's."""
        raise self._not_ours("abort")

    async def pause(self, mode: PauseMode = PauseMode.abort) -> None:
        """The trainer's."""
        raise self._not_ours("pause")

    async def resume(self) -> None:
        """The trainer's."""
        raise self._not_ours("resume")

    async def sleep(self, level: int = 1) -> None:
        """The trainer's."""
        raise self._not_ours("sleep")

    async def wake(self, parts: Collection[MemoryTag] | None = None) -> None:
        """The trainer's."""
        raise self._not_ours("wake")

    async def flush(self) -> None:
        """The trainer's."""
        raise self._not_ours("flush")

    async def version(self) -> str | None:
        """Nobody says."""
        return None

    async def refit(self, refit: WeightUpdate) -> None:
        """The trainer's."""
        raise self._not_ours("refit")

    async def refitted(self, version: str) -> None:
        """Believed: the trainer knows."""

    async def close(self) -> None:
        """Nothing is open."""

    def _not_ours(self, verb: str) -> NotSupportedError:
        return NotSupportedError(f"{verb} is between verl and its server", where=f"server {self.name}")


def _rules(settings: BalancerSettings) -> RolloutRules:
    trainer = Owner.trainer
    return RolloutRules(
        least=0,
        most=QUEUE_LIMIT,
        capacity=settings.limit,
        ownership=Ownership(sleep=trainer, pause=trainer, refit=trainer, abort=trainer),
        classes=(RequestClass(queue_limit=QUEUE_LIMIT, deadline_s=None),),
    )


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).hexdigest()


LoadBalancer = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(Balancer)
