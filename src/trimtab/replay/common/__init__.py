"""The virtual clock, traces, churn, and summaries over seeds."""
