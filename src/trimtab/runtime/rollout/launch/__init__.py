"""Starting and ending rollout engines: processes of this machine, or tasks on slots of a pool."""
