"""One folder for each framework: its configuration and its logs."""
