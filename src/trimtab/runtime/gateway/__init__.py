"""The HTTP front of a rollout pool: completions, chat and /generate."""
