"""Rollouts through `RolloutPool` beside direct calls to the same vLLM servers: `python -m bench.rollout_gpu --help`."""
