"""verl: configuration and logs."""
