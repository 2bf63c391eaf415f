"""`trimtab rollout`: serve, inspect, drain, scale and diagnose engines."""
