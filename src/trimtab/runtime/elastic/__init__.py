"""Elastic groups on Ray."""
