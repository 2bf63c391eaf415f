"""Runs the rollout machine (`trimtab.machines.rollout.machine`) with engines, clients, weights and a clock."""
