"""How many nodes and members now: nodes that come and go, groups that grow and shrink. Pure state machines."""
