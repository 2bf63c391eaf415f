"""Runs a pipeline schedule as Ray actors."""
