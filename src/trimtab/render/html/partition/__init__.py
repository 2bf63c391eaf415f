"""Pages of a pipeline partition."""
