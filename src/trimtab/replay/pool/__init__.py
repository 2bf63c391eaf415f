"""Simulated pools: policies and baselines on job traces."""
