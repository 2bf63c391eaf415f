"""Places inside trainers where trimtab's rollout pool fits without a patch, one module per trainer."""
