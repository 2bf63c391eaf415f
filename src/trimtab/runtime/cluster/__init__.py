"""A local cluster of small nodes: real `ray start` processes, one GPU each, that this package alone starts and ends."""
