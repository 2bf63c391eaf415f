"""The elastic scheduler under the import path that verl's documents name."""

from trimtab.compat.elastic_scheduler.mixin import ElasticRolloutMixin
from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler, Taker
from trimtab.model.elastic_config import ElasticConfig

__all__ = ["ElasticConfig", "ElasticRolloutMixin", "ElasticScheduler", "Taker"]
