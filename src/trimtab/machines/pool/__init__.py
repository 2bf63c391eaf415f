"""The pool machine: which tasks run, wait or are evicted."""
