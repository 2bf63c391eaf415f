"""Runs a job by its plan: the components, the order of their work, what it costs, and the folder it leaves."""
