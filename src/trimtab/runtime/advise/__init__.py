"""Advises a run of another framework: follows its log and says what would be better, without changing anything.

`follower` reads growing log files and runs the user's command, `samples` samples engines and the Ray cluster,
`replanner` and `analysis` decide, `record` keeps what was seen in a folder of its own. Nothing here writes to the run,
its files, its engines or its cluster.
"""
