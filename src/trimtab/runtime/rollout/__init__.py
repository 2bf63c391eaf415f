"""Rollout for real: the machine of `trimtab.fleet.rollout` driven with engines, clients, weights and a clock."""
