"""A load balancer for verl's rollout servers, with verl's interface, built on the leases of a rollout pool.

verl's agent loops ask an actor for a server before each turn, talk to that server themselves, and give it back. Here
that actor holds a `RolloutPool` with one worker per server: turns of a trajectory and samples of a prompt go to the
same server while that pays, else to the least loaded one; a full or lost server gets nothing; a caller waits while all
servers are full, and gets a reason after `wait_s`, instead of queueing inside an engine.

Everything else stays with verl: weights, sleep, pause and abort. So in the pool these verbs belong to the trainer, and
the pool must never end or move a turn by itself. A server that verl removes gets no more turns at once; its running
turns are counted until they end. A server that comes back is a new worker: no state of the old one (load, cache, loss)
is carried over.

verl finds it by a file that `actor_rollout_ref.rollout.router_config_path` names:

    router_class: trimtab.integrations.verl.LoadBalancer
    limit: 256        # concurrent turns per server
    wait_s: 600       # for a free server, before the caller gets an error
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError

from trimtab.core.errors import TrimtabError, UnreachableError, check_known
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import LONGEST_S, MAX_COUNT, Ranges, check_fields
from trimtab.model.rollout import Owner, Ownership, RequestClass, RolloutRules, WorkerSpec, WorkerState
from trimtab.runtime.engines.engine import EngineCapability, EngineState, NotSupportedError
from trimtab.runtime.procs.background import NEVER_GIVE_UP
from trimtab.runtime.rollout.leases import Lease
from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.integrations.verl")

NO_SERVER = "No available servers in load balancer"  # verl's clients retry on this text
MAX_CONCURRENCY = 1_000_000  # of the actor: waiting callers must never block a release
QUEUE_LIMIT = 1_000_000
REMOVED = "removed by verl"
WATCH_MODES = ("actor", "http", "none")
ALIVE_S = 5.0  # an actor that does not answer within this is busy, not dead: Ray reports deaths itself


class BalancerSettings(Frozen):
    """Keys of verl's router file besides `router_class`."""

    limit: int = 256  # concurrent turns per server
    wait_s: float = 600.0  # for a free server
    lease_s: float = 14_400.0  # per turn; after that it is reported as overdue
    by_prompt: bool = True  # samples of a prompt go together; costs sending the prompt's ids with each turn
    watch: str = "actor"  # how losses are detected: by Ray, by the server's HTTP interface, or not at all
    look_s: float = 2.0  # between two health checks
    sticky: int = 10_000  # trajectories that are remembered

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("limit", "sticky"), (1, MAX_COUNT)),
        **dict.fromkeys(("wait_s", "lease_s", "look_s"), (1e-9, LONGEST_S)),
    }

    def __post_init__(self) -> None:
        check_fields(self, "the load balancer")
        check_known([self.watch], WATCH_MODES, "the load balancer", "watch is {!r}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> BalancerSettings:
        """From plain data; raises InputError for an unknown key."""
        known = [field.name for field in fields(cls)]
        check_known(given, (*known, "router_class"), "the load balancer", "unknown setting {}")
        return cls(**{key: value for key, value in given.items() if key != "router_class"})


@dataclass
class BalancedServer:
    """A server as a worker of the pool. Removed and added again, it is a new worker."""

    server: str
    handle: Any
    worker: str


class Balancer:
    """verl's `RequestLoadBalancer`, for a single event loop; `LoadBalancer` is the actor class."""

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
        self._servers: dict[str, BalancedServer] = {}  # by server: those that get turns
        self._by_worker: dict[str, BalancedServer] = {}  # also those being removed
        self._leases: dict[tuple[str, str], deque[Lease]] = {}  # by (server, request), oldest first
        self._inflight: Counter[str] = Counter()  # by worker
        self._groups: OrderedDict[str, str] = OrderedDict()  # by request, least recently used first
        self._generation = 0  # of groups: raised when the cache is cleared
        self._incarnations = Counter[str]()

    # ---- turns -----------------------------------------------------------------------------------------------------

    def require_acquire_fields(self) -> list[str]:
        """Fields of a turn that `acquire_server` needs besides the request's id."""
        return ["prompt_ids"] if self._settings.by_prompt else []

    def require_release_fields(self) -> list[str]:
        """Fields of a turn that `release_server` needs besides its server."""
        return ["request_id"]

    async def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int] | None = None, **others: Any
    ) -> tuple[str, Any]:
        """A server for one turn: its id and its handle. Raises RuntimeError if there is none within `wait_s`."""
        pool = await self._running()
        if not self._servers:
            raise RuntimeError(NO_SERVER)
        settings = self._settings
        group = self._group(request_id, prompt_ids)
        try:
            lease = await pool.acquire(group=group, wait_s=settings.wait_s, for_s=settings.lease_s)
        except UnreachableError as error:
            raise RuntimeError(f"{NO_SERVER}: {error.what}") from error
        server = self._by_worker[lease.worker]
        self._leases.setdefault((server.server, request_id), deque()).append(lease)
        self._inflight[lease.worker] += 1
        return server.server, server.handle

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """End a turn. Unknown turns are ignored: verl does not wait for an answer."""
        held = (key for key in self._leases if key[0] == server_id)
        key = next(held, None) if request_id is None else (server_id, request_id)
        if key is None or key not in self._leases:
            return
        leases = self._leases[key]
        lease = leases.popleft()
        if not leases:
            del self._leases[key]
        self._inflight[lease.worker] -= 1
        if self._inflight[lease.worker] <= 0:
            del self._inflight[lease.worker]
        await lease.release()

    def _group(self, request: str, prompt: Sequence[int] | None) -> str:
        """The affinity group of a turn: turns of a trajectory share a prefix, and so do samples of a prompt."""
        group = self._groups.get(request)
        if group is None:
            start = request
            if prompt is not None and len(prompt):
                start = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).hexdigest()
            group = self._groups[request] = f"{self._generation}.{start}"
            if len(self._groups) > self._settings.sticky:
                self._groups.popitem(last=False)
        self._groups.move_to_end(request)
        return group

    # ---- servers ---------------------------------------------------------------------------------------------------

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add or replace servers. If one of them cannot be reached, none is added."""
        pool = await self._running()
        await self._add(pool, servers)

    async def _add(self, pool: RolloutPool, servers: Mapping[str, Any]) -> None:
        adding = [self._attach(pool, server, handle) for server, handle in servers.items()]
        results = await asyncio.gather(*adding, return_exceptions=True)
        faults = [result for result in results if isinstance(result, BaseException)]
        added = [result for result in results if isinstance(result, BalancedServer)]
        if faults:
            for server in added:
                self._retire(pool, server)
            raise faults[0]
        for server in added:
            old = self._servers.get(server.server)
            self._servers[server.server] = server
            if old is not None:
                self._retire(pool, old)

    async def _attach(self, pool: RolloutPool, server: str, handle: Any) -> BalancedServer:
        self._incarnations[server] += 1
        added = BalancedServer(server, handle, f"{server}#{self._incarnations[server]}")
        self._by_worker[added.worker] = added
        limit = self._settings.limit
        try:
            if self._settings.watch == "http":
                url = server if "://" in server else f"http://{server}"
                await pool.attach(url, name=added.worker, limit=limit, version=pool.version)
            else:
                watched = handle if self._settings.watch == "actor" else None
                engine = ServerEngine(added.worker, watched, lambda why: pool.died(added.worker, why))
                spec = WorkerSpec(added.worker, limit=limit, can_sleep=False)
                await pool.add_engine(engine, spec, version=pool.version)
        except BaseException:
            del self._by_worker[added.worker]
            raise
        return added

    async def remove_servers(self, server_ids: Collection[str]) -> None:
        """Send no more turns to these servers. Their running turns are ended by verl and counted until then."""
        pool = await self._running()
        for server_id in server_ids:
            server = self._servers.pop(server_id, None)
            if server is not None:
                self._retire(pool, server)

    def _retire(self, pool: RolloutPool, server: BalancedServer) -> None:
        pool.take(server.worker, self._settings.lease_s, REMOVED, forced=True)  # no new turns from now on
        remove = functools.partial(self._remove_when_idle, pool, server)
        pool.background.start(f"remove {server.server}", remove, policy=NEVER_GIVE_UP)

    async def _remove_when_idle(self, pool: RolloutPool, server: BalancedServer) -> None:
        """Retry until removed: verl ends the turns, so this takes as long as they do."""
        while not await self._removed(pool, server):
            await asyncio.sleep(self._settings.look_s)
        self._by_worker.pop(server.worker, None)

    async def _removed(self, pool: RolloutPool, server: BalancedServer) -> bool:
        try:
            if any(view.worker == server.worker for view in pool.workers()):
                await pool.remove(server.worker, why=REMOVED)
        except TrimtabError as error:
            log.info("server %s: %s", server.server, error.what)
            return False
        return True

    # ---- status ----------------------------------------------------------------------------------------------------

    async def get_all_servers(self) -> list[str]:
        await self._running()
        return list(self._servers)

    async def get_inflight_count(self, server_id: str) -> int:
        return self._loads().get(server_id, 0)

    async def get_total_inflight(self) -> int:
        return sum(self._loads().values())

    async def get_status(self) -> dict[str, Any]:
        """Turns by server; `pool` is the rollout pool's status."""
        pool = await self._running()
        active = {view.worker for view in pool.workers() if view.state is WorkerState.active}
        loads = self._loads()
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": sum(server.worker in active for server in self._servers.values()),
            "registered_handles": list(self._servers),
            "pool": pool.status(),
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget the server of each trajectory and prompt."""
        cleared = len(self._groups)
        self._groups.clear()
        self._generation += 1
        return {"cleared_entries": cleared, "server_loads": self._loads()}

    def _loads(self) -> dict[str, int]:
        return {name: self._inflight[server.worker] for name, server in self._servers.items()}

    # ---- lifecycle ---------------------------------------------------------------------------------------------------

    async def _running(self) -> RolloutPool:
        """The pool. The first caller starts it, because only then is there an event loop."""
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
        """Stop the pool; the servers keep running."""
        if self._pool is not None:
            await self._pool.stop()


def _of_the_trainer(verb: str) -> Callable[..., Any]:
    """An engine's method that raises: verl calls its servers itself."""

    def refuse(self: ServerEngine, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(f"{verb} is the trainer's: verl calls its server directly", where=f"server {self.name}")

    return refuse


class ServerEngine:
    """A server that verl talks to directly: the pool only checks whether it is alive."""

    kind = "actor"
    capabilities: frozenset[EngineCapability] = frozenset()
    load, generate, abort, pause, resume, sleep, wake, flush, refit = map(
        _of_the_trainer, ("load", "generate", "abort", "pause", "resume", "sleep", "wake", "flush", "refit")
    )

    def __init__(self, name: str, handle: Any, on_gone: Callable[[str], None]) -> None:
        self.name = name
        self._handle = handle
        self._on_gone = on_gone
        self._gone = ""

    async def ready(self) -> EngineState:
        """Alive unless Ray reported that the actor died; an actor too busy to answer is alive."""
        ping = getattr(self._handle, "__ray_ready__", None)
        if ping is not None and not self._gone:
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(ping.remote().future()), ALIVE_S)
            except RayActorError as error:
                self._gone = str(error).partition("\n")[0] or "the actor died"
                asyncio.get_running_loop().call_soon(self._on_gone, self._gone)
        return EngineState(not self._gone, self._gone or "alive", dialect="a verl server")

    async def version(self) -> str | None:
        return None

    async def refitted(self, version: str) -> None: ...

    async def close(self) -> None: ...


def _rules(settings: BalancerSettings) -> RolloutRules:
    trainer = Owner.trainer
    return RolloutRules(
        min_workers=0,
        max_workers=QUEUE_LIMIT,
        capacity=settings.limit,
        ownership=Ownership(sleep=trainer, pause=trainer, refit=trainer, abort=trainer),
        classes=(RequestClass(queue_limit=QUEUE_LIMIT, deadline_s=None),),
    )


LoadBalancer = ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENCY)(Balancer)
