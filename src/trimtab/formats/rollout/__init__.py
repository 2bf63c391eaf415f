"""The rollout sections of a job file."""
