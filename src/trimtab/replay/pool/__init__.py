"""Simulated pools: scheduling policies and baselines on job traces."""
