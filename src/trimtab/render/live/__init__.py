"""Terminal displays that are redrawn in place."""
