"""Advising a run that is not ours: its log is followed, and what would be better is said and never done.

`tail` reads files that grow, `engines`, `cluster` and `gpus` ask who can be asked, `adviser` and `advising` decide,
`hook` runs the user's own command, `record` keeps what was seen in a folder of its own. Nothing here writes into the
run, its files, its engines or its cluster.
"""
