"""Train on all workers of a Ray cluster, while workers join, leave and are lost.

    python training_loop_with_autoscaling.py [--steps N]

It needs a cluster: ./start_ray_cluster.sh starts one, ./add_ray_worker.sh adds a worker to it. Ctrl-C ends it cleanly.
The loop is `trimtab.demos.elastic_loop`; docs/guides/elastic.md says how to use your own trainer.
"""

from __future__ import annotations

import sys

from trimtab.demos.elastic_loop import main

if __name__ == "__main__":
    sys.exit(main())
