"""verl's replicas, servers and rollouter actor, as `trimtab.integrations.verl_elastic` uses them.

Server handles are guarded, so that a request to a dead server comes back as aborted, which verl's client carries on
elsewhere. The trainer's checkpoint managers hold their replicas wrapped, so that a lost one is left out of the next
sync group, and a second sleep does nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import MAX_COUNT, Range
from trimtab.model.elastic_config import ElasticConfig
from trimtab.runtime.procs.background import describe

log = logging.getLogger("trimtab.integrations.verl")

VERSIONS = ("0.9.1",)  # of verl
CALL_S = 600.0  # for one call to verl
PING_S = 1.0  # an actor that does not answer within this is busy, not dead: Ray reports deaths itself


def check_verl(version: str) -> None:
    """Raise InputError for a release of verl that this was not written for."""
    if version not in VERSIONS:
        raise InputError(
            f"elastic rollout is written for verl {', '.join(VERSIONS)}, and this is {version}",
            where="async_training.dynamic_schedule_policy",
            hint=f"install verl {VERSIONS[-1]}, or use verl's own policy: default",
        )


class GuardedServer(Frozen):
    """A server's handle. Where its actor is dead, the request ends as aborted and the server gets no more."""

    server: str
    handle: Any
    balancer: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__ray_ready__":  # as pickle asks
            raise AttributeError(name)
        return getattr(self.handle, name)

    @property
    def generate(self) -> GuardedGenerate:
        return GuardedGenerate(self)


class GuardedGenerate(Frozen):
    """`generate` of a guarded server, called as a Ray method is."""

    guarded: GuardedServer

    async def remote(self, **arguments: Any) -> Any:
        guarded = self.guarded
        try:
            return await guarded.handle.generate.remote(**arguments)
        except RayActorError as error:
            log.warning("server %s: %s", guarded.server, describe(error))
            await guarded.balancer.remove_servers.remote(server_ids=[guarded.server])
        return _aborted()


def _aborted() -> Any:
    """No token of an answer; verl's client goes on elsewhere."""
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(token_ids=[], stop_reason="aborted")


class VerlSetup(Frozen):
    """What the rollouter has, by address of the server."""

    elastic_config: Mapping[str, Any]
    partial_rollout: bool
    capacity: int  # samples at a time per replica
    total: int  # samples of the run
    balancer: Any
    shared: dict[str, str]  # resource id -> address
    dedicated: tuple[str, ...]


def attach_rollouter(rollouter: Any) -> VerlSetup:
    """In the rollouter's process: guard the servers, and say what there is."""
    from omegaconf import OmegaConf

    config, manager = rollouter.config, rollouter.llm_server_manager
    balancer = manager.global_load_balancer
    dedicated = list(manager.get_standalone_replicas())
    for replica in (*manager.hybrid_replicas.values(), *dedicated):
        if not isinstance(replica._server_handle, GuardedServer):
            replica._server_handle = GuardedServer(replica._server_address, replica._server_handle, balancer)
    manager.server_handles = [replica._server_handle for replica in dedicated]
    balancer.add_servers.remote(servers={replica._server_address: replica._server_handle for replica in dedicated})
    block: Any = config.get("elastic_config") or {}
    if not isinstance(block, dict):
        block = OmegaConf.to_container(block, resolve=True)
    asynchronous = config.async_training
    return VerlSetup(
        elastic_config=block,
        partial_rollout=bool(asynchronous.get("partial_rollout", False)),
        capacity=int(asynchronous.get("concurrent_samples_per_replica", 16)),
        total=int(rollouter.total_rollout_steps),
        balancer=balancer,
        shared={name: replica._server_address for name, replica in manager.hybrid_replicas.items()},
        dedicated=tuple(replica._server_address for replica in dedicated),
    )


def _route(rollouter: Any, address: str, on: bool) -> None:
    """In the rollouter's process: a dedicated replica joins or leaves its lists, and with them what it may begin."""
    manager = rollouter.llm_server_manager
    known = rollouter.__dict__.setdefault("_trimtab_replicas", {})
    known |= {replica._server_address: replica for replica in manager.rollout_replicas}
    replica = known[address]
    here = replica in manager.rollout_replicas
    if on and not here:
        manager.rollout_replicas.append(replica)
        manager.server_addresses.append(address)
        manager.server_handles.append(replica._server_handle)
    elif here and not on:
        manager.rollout_replicas.remove(replica)
        at = manager.server_addresses.index(address)
        del manager.server_addresses[at], manager.server_handles[at]
    if on:
        manager.global_load_balancer.add_servers.remote(servers={address: replica._server_handle})
    else:
        manager.global_load_balancer.remove_servers.remote(server_ids=[address])
    rollouter._update_max_concurrent_samples()


def _death(ref: Any) -> str | None:
    """Why the actor that was asked is dead, if it is."""
    try:
        ray.get(ref)
    except RayActorError as error:
        return describe(error)
    return None


class VerlRollouter:
    """Calls to verl's rollouter actor."""

    def __init__(self, actor: Any, get: Callable[[Any], Any] | None = None) -> None:
        self._actor = actor
        self._get = get or (lambda ref: ray.get(ref, timeout=CALL_S))

    def attach(self) -> VerlSetup:
        setup: VerlSetup = self._get(self._actor.__ray_call__.remote(attach_rollouter))
        return setup

    def statistics(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._get(self._actor.get_statistics.remote())
        return found

    def add(self, names: Sequence[str]) -> None:
        self._get(self._actor.add_replicas.remote(list(names)))

    def remove(self, names: Sequence[str]) -> None:
        self._get(self._actor.remove_replicas.remote(list(names)))

    def route(self, address: str, on: bool) -> None:
        self._get(self._actor.__ray_call__.remote(_route, address, on))

    def rebalance(self) -> None:
        self._get(self._actor.rebalance_requests.remote())


def dead_servers(replicas: Mapping[str, TrackedReplica]) -> dict[str, str]:
    """Replicas whose first server's actor died, with what Ray says."""
    refs = {
        replica.servers[0].__ray_ready__.remote(): name
        for name, replica in replicas.items()
        if not replica.lost and replica.servers
    }
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=PING_S) if refs else ([], [])
    deaths = {refs[ref]: _death(ref) for ref in done}
    return {name: why for name, why in deaths.items() if why is not None}


class ReplicaOwner(Protocol):
    """What a tracked replica reports to."""

    def taken(self, name: str) -> None: ...

    def lost(self, name: str, why: str) -> None: ...


class TrackedReplica:
    """A replica in the trainer's checkpoint managers. A lost one is left out of syncs, a second sleep does nothing."""

    def __init__(self, replica: Any, name: str, policy: ReplicaOwner) -> None:
        self.name = name
        self.lost = False
        self.asleep = False  # a resume comes after the weight update that wakes it
        self._asleep_lock = threading.Lock()
        self._replica = replica
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    @property
    def workers(self) -> list[Any]:
        return [] if self.lost else list(self._replica.workers)

    async def sleep(self) -> None:
        """verl's: the trainer takes the GPUs."""
        await self._call("sleep")
        self._policy.taken(self.name)

    async def wake_up(self) -> None:
        await self._call("wake_up")

    async def abort_all_requests(self, **settings: Any) -> None:
        await self._call("abort_all_requests", **settings)

    async def resume_generation(self) -> None:
        await self._call("resume_generation")

    async def clear_kv_cache(self) -> None:
        await self._call("clear_kv_cache")

    async def release_kv_cache(self) -> None:
        await self._call("release_kv_cache")

    async def resume_kv_cache(self) -> None:
        await self._call("resume_kv_cache")

    async def _call(self, verb: str, **settings: Any) -> None:
        why = await self.attempt(verb, **settings)
        if why:
            self._policy.lost(self.name, why)

    async def attempt(self, verb: str, **settings: Any) -> str:
        """Why the replica turned out to be lost; empty if it did not."""
        if self.lost:
            return ""
        with self._asleep_lock:
            skip = verb == "sleep" and self.asleep
            self.asleep = verb == "sleep" or (self.asleep and verb != "resume_generation")
        if not skip:
            try:
                await getattr(self._replica, verb)(**settings)
            except RayActorError as error:
                return f"{verb}: {describe(error)}"
        return ""


def read_settings(setup: VerlSetup) -> ElasticConfig:
    """The `elastic_config` block of verl's config; limits and capacity default to what verl has."""
    where = "elastic_config"
    if not setup.partial_rollout:
        hint = "set async_training.partial_rollout: true, so that they go on elsewhere with their tokens"
        raise InputError("without partial rollout verl drops the requests of a drained replica", where=where, hint=hint)
    dedicated, replicas = len(setup.dedicated), len(setup.dedicated) + len(setup.shared)
    Range(1, MAX_COUNT, whole=True).check("concurrent_samples_per_replica", setup.capacity, "async_training")
    defaults = {
        "min_workers": max(1, dedicated),
        "max_workers": max(1, replicas),
        "requests_per_worker_capacity": setup.capacity,
    }
    return ElasticConfig.from_mapping({**defaults, **setup.elastic_config}, where)
