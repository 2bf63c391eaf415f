"""Tasks on nodes: placement groups, worker processes, the agent of each node."""
