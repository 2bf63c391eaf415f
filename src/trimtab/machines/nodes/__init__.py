"""How many nodes: which join, drain, leave."""
