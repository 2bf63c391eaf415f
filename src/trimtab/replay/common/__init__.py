"""Shared by all simulations: virtual clock, traces, churn, durations, recommendations."""
