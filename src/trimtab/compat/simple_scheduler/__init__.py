"""SimpleScheduler: pools, priorities and preemption, with dictionaries as answers."""
