"""Costs in: timers for components, memory from a model's configuration."""
