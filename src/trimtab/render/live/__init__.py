"""Displays that are redrawn in a terminal."""
