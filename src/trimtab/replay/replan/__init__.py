"""Simulated RL runs: the replan machine and baselines."""
