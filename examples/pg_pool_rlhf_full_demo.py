"""Rollout, reward and train in one pool on Ray, with reserved slots and preemption; the same as `trimtab demo rlhf`.

    python examples/pg_pool_rlhf_full_demo.py [--lang zh] [--address host:6379]

It runs on RAY_ADDRESS, else on a Ray that runs here, else on a local one, and says which; sizes fit what is there.
"""

from __future__ import annotations

import sys

from trimtab.demos.rlhf import main

if __name__ == "__main__":
    sys.exit(main())
