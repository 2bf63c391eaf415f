"""verl's synchronous `RayPPOTrainer`, which also takes `elastic_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verl
from verl.trainer.ppo import ray_trainer

from trimtab.integrations.verl_sync import sleep_early
from trimtab.model.elastic_config import ElasticConfig


class RayPPOTrainer(ray_trainer.RayPPOTrainer):  # type: ignore[misc]
    """verl's, with replicas that sleep when they run empty; without settings, here or in the config, verl's own."""

    def __init__(
        self, *arguments: Any, elastic_config: ElasticConfig | Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        super().__init__(*arguments, **others)
        self.elastic_config = self.config.get("elastic_config") if elastic_config is None else elastic_config

    def init_workers(self) -> None:
        super().init_workers()
        if self.elastic_config is not None:
            sleep_early(self, self.elastic_config, verl.__version__)
