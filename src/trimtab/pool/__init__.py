"""Who runs now, and who yields: a pure state machine. Events in, instructions out."""
