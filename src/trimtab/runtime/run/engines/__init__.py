"""Rollout engines as a component of a run."""
