"""The import path of verl's elastic scheduler: `workers.rollout.elastic_scheduler`."""
