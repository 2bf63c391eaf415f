"""Which tasks run now, and which are preempted."""
