"""Is the plan still right while it trains? Drift, gain against cost, migrations."""
