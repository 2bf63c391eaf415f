"""Rollout for real: the machine of `trimtab.machines.rollout.machine` driven with engines, clients, weights and a
clock.
"""
