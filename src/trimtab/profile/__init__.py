"""Measures costs: timers for components, memory from a model's configuration.

Importing this is cheap, so that a training loop can always do it; code that reads and writes files is loaded on use.
"""

from trimtab.profile.timer import Block, Recorder, component, iteration, save

__all__ = ["Block", "Recorder", "component", "iteration", "save"]
