"""What trimtab demo runs."""
