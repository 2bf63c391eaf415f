"""Costs in: timers for components, memory from a model's configuration.

Importing this is cheap, so that a training loop may always do it; what reads and writes files is loaded when used.
"""

from trimtab.profile.timer import Block, Recorder, component, iteration, save

__all__ = ["Block", "Recorder", "component", "iteration", "save"]
