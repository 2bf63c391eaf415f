"""A folder per training framework: its config and its logs."""
