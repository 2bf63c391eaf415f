"""Pure state machines: events in, instructions out. No network, no clock, no files, no randomness."""
