"""`trimtab cluster` and `trimtab node`."""
