"""Simulated RL runs: the replan machine against baselines."""
