"""Adapters of rollout engines: one protocol, one adapter for each kind of server."""
