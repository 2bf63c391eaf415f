"""trimtab rollout: serve, look at, drain, scale and examine engines."""
