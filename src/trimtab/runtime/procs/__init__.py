"""Processes of this machine: supervision, locks, ports, interrupts, GPUs."""
