"""SimpleScheduler: pools, priorities and preemption, with dictionaries for answers."""
