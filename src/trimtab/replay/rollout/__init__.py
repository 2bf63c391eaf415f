"""Simulated rollouts: engines as arithmetic, scaling policies."""
