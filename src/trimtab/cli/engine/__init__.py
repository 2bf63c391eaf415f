"""`trimtab engine`: serve, list, drain and diagnose engines."""
