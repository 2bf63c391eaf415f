"""A local cluster of small nodes: real `ray start` processes, one GPU each, started and ended by this package alone."""
