"""Adapters that connect trimtab to trainers without patching them, a module per trainer.

`ReplanMachine` and its events (`replan_events`) decide for a loop of your own when another plan pays.
"""

from __future__ import annotations

from trimtab.machines.replan import events as replan_events
from trimtab.machines.replan.machine import ReplanMachine

__all__ = ["ReplanMachine", "replan_events"]
