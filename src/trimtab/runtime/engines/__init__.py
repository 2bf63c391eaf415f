"""Rollout engines as the pool sees them: one protocol, and an adapter for each dialect that real engines speak."""
