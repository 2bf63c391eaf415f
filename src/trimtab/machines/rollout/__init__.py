"""Rollout workers: which serves a request, how many serve, and which weights they have."""
