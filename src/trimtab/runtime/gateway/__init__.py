"""HTTP gateway of a rollout pool: completions, chat and /generate."""
