"""The node machine: which nodes join, drain and leave."""
