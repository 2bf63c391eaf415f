"""Simulated rollouts: modelled engines and scaling policies."""
