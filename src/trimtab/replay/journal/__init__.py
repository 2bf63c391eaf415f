"""Replays a controller's journal, and other policies on its workload."""
