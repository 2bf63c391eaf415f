"""`make bench`: every table of this folder. `python -m bench placement` prints one of them."""

from __future__ import annotations

import importlib
import os
import platform
import sys

TABLES = (
    "placement",
    "partition",
    "pools",
    "hosts",
    "nodes",
    "elastic",
    "rollout",
    "rollout_pieces",
    "rollout_step",
    "heldout",
    "gateway",
    "startup",
    "loop",
    "run_fidelity",
    "run_moves",
    "replay",
    "dashboard",
    "truth",
)


def main() -> None:
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    wanted = [word for word in sys.argv[1:] if word not in options] or TABLES
    unknown = [name for name in wanted if name not in TABLES]
    if unknown:
        sys.exit(f"no bench is called {', '.join(unknown)}; there are: {', '.join(TABLES)}")
    if "--json" not in options:
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    for name in wanted:
        importlib.import_module(f"bench.{name}").main()
        if "--json" not in options:
            print()


main()
