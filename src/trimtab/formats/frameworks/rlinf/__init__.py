"""RLinf: configuration and logs."""
