"""Runs a job by its plan: components, order of their work, measured costs, run folder."""
