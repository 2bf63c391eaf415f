"""The planners: placement of components on GPUs. Pure: no cluster, no clock, no files."""
