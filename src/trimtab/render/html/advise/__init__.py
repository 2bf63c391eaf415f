"""Pages of an advised run."""
