"""Reads and writes files: job files, framework configs, logs, profiles."""
