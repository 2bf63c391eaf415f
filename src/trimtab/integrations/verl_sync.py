"""Elastic rollout in verl's synchronous trainer: replicas that run empty at the end of a generation sleep at once.

verl wakes all replicas with each weight update and puts all to sleep after each generation; nothing else can change
there. So a replica without requests leaves the load balancer and sleeps, when the scaling policy says that fewer are
enough; after the next weight update, which wakes it with its weights, it is routed to again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from trimtab.core.errors import InputError
from trimtab.integrations.verl_replicas import CALL_S, check_verl
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import LoadSample
from trimtab.model.elastic_config import ElasticConfig
from trimtab.runtime.procs.background import Background

log = logging.getLogger("trimtab.integrations.verl")


class EarlySleep:
    """Looks at the replicas while a batch is generated."""

    def __init__(
        self,
        config: ElasticConfig,
        replicas: list[Any],
        balancer: Any,
        *,
        get: Callable[[Any], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = replace(config, max_workers=max(config.min_workers, min(config.max_workers, len(replicas))))
        self.asleep: dict[str, Any] = {}  # by address, since the last weight update
        self._replicas = {replica._server_address: replica for replica in replicas}
        self._balancer = balancer
        self._get = get or (lambda ref: ray.get(ref, timeout=CALL_S))
        self._clock = clock
        self._background: Background | None = None
        self._state = scaling.begin(self.config)

    def begin(self) -> None:
        """All prompts of a batch are sent now."""
        self._state = scaling.begin(self.config)
        self._background = Background(prefix="verl-early-sleep")
        self._background.start_thread("look", self._look_on)

    def _look_on(self) -> None:
        background = self._background
        while background is not None and not background.stopping.wait(self.config.monitoring_interval):
            self.look()

    def end(self) -> None:
        """The batch is complete."""
        if self._background is not None:
            self._background.stop()
            self._background = None

    def look(self) -> None:
        """Put idle replicas to sleep, as many as the policy can spare."""
        loads: Mapping[str, int] = self._get(self._balancer.get_status.remote())["servers"]
        awake = {address: load for address, load in loads.items() if address in self._replicas}
        sample = LoadSample(
            self._clock(),
            queued=0,
            running=sum(awake.values()),
            draining=0,
            active=len(awake),
            starting=0,
            draining_workers=0,
            ready_to_wake=0,
            capacity=self.config.requests_per_worker_capacity,
            min_workers=min(self.config.min_workers, len(awake)),
            max_workers=len(awake),
            idle=sum(not load for load in awake.values()),
        )
        self._state, decision = scaling.consult(self._state, sample)
        idle = [address for address, load in awake.items() if not load]
        given = idle[: max(0, len(awake) - decision.workers)]
        if given:
            log.info("replicas: %s", decision.reason.sentence)
            self._get(self._balancer.remove_servers.remote(server_ids=given))
            self.asleep |= {address: self._replicas[address] for address in given}
            asyncio.run(self._sleep(given))

    async def _sleep(self, addresses: list[str]) -> None:
        """A request that came in between is finished first: vLLM's sleep in verl waits for it."""
        await asyncio.gather(*(self._replicas[address].sleep() for address in addresses))

    def woken(self) -> None:
        """verl has updated the weights, which wakes every replica."""
        if self.asleep:
            servers = {address: replica._server_handle for address, replica in self.asleep.items()}
            self._get(self._balancer.add_servers.remote(servers=servers))
            self.asleep = {}


class Watched:
    """An object of verl's whose calls named here are watched; all else is its own."""

    def __init__(self, watched: Any, **calls: Callable[..., Any]) -> None:
        self._watched, self._calls = watched, calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._calls:
            return getattr(self._watched, name)
        return self._calls[name]


def sleep_early(trainer: Any, elastic_config: Any, version: str, **others: Any) -> EarlySleep | None:
    """Watch a synchronous trainer of verl's, whose workers are made; None where elastic rollout is off."""
    if not isinstance(elastic_config, ElasticConfig):
        elastic_config = ElasticConfig.from_mapping(elastic_config)
    if not elastic_config.enable_elastic:
        return None
    check_verl(version)
    engine = trainer.config.actor_rollout_ref.rollout.name
    if engine != "vllm":
        hint = "use vllm, or leave elastic_config out"
        raise InputError(
            f"rollout.name is {engine}: its sleep does not wait for requests", where="elastic_config", hint=hint
        )
    servers, manager, loops = trainer.llm_server_manager, trainer.checkpoint_manager, trainer.async_rollout_manager
    early = EarlySleep(elastic_config, servers.get_replicas(), servers.global_load_balancer, **others)

    def generate_sequences(prompts: Any) -> Any:
        if prompts.meta_info.get("validate"):
            return loops.generate_sequences(prompts)
        early.begin()
        try:
            return loops.generate_sequences(prompts)
        finally:
            early.end()

    def update_weights(*given: Any, **named: Any) -> Any:
        answer = manager.update_weights(*given, **named)
        early.woken()
        return answer

    trainer.async_rollout_manager = Watched(loops, generate_sequences=generate_sequences)
    trainer.checkpoint_manager = Watched(manager, update_weights=update_weights)
    return early
