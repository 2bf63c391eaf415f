"""The placement planner: which GPUs each component gets."""
