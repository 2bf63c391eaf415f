"""Simulations: pages, tables and what sweeps recommend."""
