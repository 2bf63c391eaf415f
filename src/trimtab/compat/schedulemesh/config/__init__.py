"""Settings of the scheduler in `simple`."""
