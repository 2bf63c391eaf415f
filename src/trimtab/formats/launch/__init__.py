"""Launch scripts and command lines: read without running them, down to the trainer and its arguments."""
