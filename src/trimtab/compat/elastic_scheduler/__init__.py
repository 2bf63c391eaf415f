"""ElasticScheduler: a trainer's own worker group behind the rollout machine."""
