"""Why something waits on a Ray cluster, and what is wrong with a rollout pool."""
