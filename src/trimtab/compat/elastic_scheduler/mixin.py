"""`ElasticRolloutMixin`: elastic scheduling for a rollout class that is its own worker group.

The class has `get_worker_status`, `flush_worker_cache` and `resume_worker_memory`. Without settings the mixin does
nothing, so one class serves both cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping
from typing import Any

from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler
from trimtab.core.errors import InputError
from trimtab.model.elastic_config import ElasticConfig


class ElasticRolloutMixin:
    """Adds the calls of elastic scheduling. Put it before the rollout class, and pass `elastic_config`."""

    elastic_scheduler: ElasticScheduler | None

    def __init__(
        self, *arguments: Any, elastic_config: ElasticConfig | Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        super().__init__(*arguments, **others)
        if elastic_config is not None and not isinstance(elastic_config, ElasticConfig):
            elastic_config = ElasticConfig.from_mapping(elastic_config)
        self.elastic_scheduler = None
        if elastic_config is not None and elastic_config.enable_elastic:
            self.elastic_scheduler = ElasticScheduler(config=elastic_config, worker_group=self)

    def start_elastic_scheduling(self) -> Awaitable[None]:
        """Start the scheduler, if there is one."""
        return self._begin("start_elastic_scheduling", "start")

    def stop_elastic_scheduling(self) -> Awaitable[None]:
        """Stop: drains end, nothing is left running."""
        return self._begin("stop_elastic_scheduling", "stop")

    def wake_up_all_workers(self) -> Awaitable[None]:
        """Wake every worker, until `resume_elastic_scheduling`."""
        return self._begin("wake_up_all_workers", "wake_up_all_workers")

    def resume_elastic_scheduling(self) -> Awaitable[None]:
        """Let the policy decide again."""
        return self._begin("resume_elastic_scheduling", "resume_elastic_scheduling")

    def _begin(self, name: str, call: str) -> Awaitable[None]:
        """Begin the call in the running event loop, whether it is awaited or not; InputError where no loop runs."""
        if self.elastic_scheduler is None:
            return _NothingToAwait()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InputError(
                f"{name}() was called outside an event loop, so nothing was done",
                where=type(self).__name__,
                hint=f"make the calling function async (init_workers, _validate), and `await` {name}() there",
            ) from None
        begun: asyncio.Task[None] = loop.create_task(getattr(self.elastic_scheduler, call)())
        self._begun = begun  # a loop keeps no task alive by itself
        return begun


class _NothingToAwait:
    """Done already, and may be left without `await`."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()
