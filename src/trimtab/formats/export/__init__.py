"""Exports a job's cluster to KubeRay and Slurm."""
