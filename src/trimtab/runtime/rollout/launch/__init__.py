"""Launchers of rollout engines: local processes, or tasks on slots of a pool."""
