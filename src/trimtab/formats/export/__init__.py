"""A job's cluster for other tools: KubeRay and Slurm."""
