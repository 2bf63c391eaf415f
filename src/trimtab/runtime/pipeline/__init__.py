"""A pipeline schedule, run as Ray actors."""
