"""`ElasticRolloutMixin`: elastic scheduling for a rollout class that is its own worker group.

The class has `get_worker_status`, `flush_worker_cache` and `resume_worker_memory`. Without settings the mixin does
nothing, so one class serves both cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler
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

    async def start_elastic_scheduling(self) -> None:
        """Start the scheduler, if there is one."""
        if self.elastic_scheduler is not None:
            await self.elastic_scheduler.start()

    async def stop_elastic_scheduling(self) -> None:
        """Stop: drains end, nothing is left running."""
        if self.elastic_scheduler is not None:
            await self.elastic_scheduler.stop()

    async def wake_up_all_workers(self) -> None:
        """Wake every worker, until `resume_elastic_scheduling`."""
        if self.elastic_scheduler is not None:
            await self.elastic_scheduler.wake_up_all_workers()

    async def resume_elastic_scheduling(self) -> None:
        """Let the policy decide again."""
        if self.elastic_scheduler is not None:
            await self.elastic_scheduler.resume_elastic_scheduling()
