"""The partition planner: which layers go on which device."""
