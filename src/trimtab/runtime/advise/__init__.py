"""Advises a run of another framework: follows its log and says what would be better, without changing anything.

`tail` reads growing log files, `engines` and `cluster` sample engines and the Ray cluster, `replanner` and `analysis`
decide, `hook` runs the user's command, `record` keeps what was seen in a folder of its own. Nothing here writes to the
run, its files, its engines or its cluster.
"""
