"""The HTTP front of a rollout pool: completions, chat and `/generate` in, the pool's answers out."""
