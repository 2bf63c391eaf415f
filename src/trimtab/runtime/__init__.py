"""Carries out what the pure rooms decide: on Ray, with real processes, clocks and deadlines."""
