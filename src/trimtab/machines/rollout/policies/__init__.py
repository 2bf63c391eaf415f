"""Scaling policies: how many rollout workers are wanted."""
