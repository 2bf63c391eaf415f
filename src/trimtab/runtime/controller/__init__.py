"""The controller: an actor that drives the machines of pools, nodes and groups."""
