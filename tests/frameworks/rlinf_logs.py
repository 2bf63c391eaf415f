"""Runs inside .venv-rlinf: RLinf's own metric table, as the embodied runner prints it, for a run with these timings.

Standard input: JSON, a list of {metric: value} for each step. Standard output: what RLinf prints.
"""

import json
import sys
import time

from rlinf.utils.metric_utils import print_metrics_table

began = time.time() - 60.0
steps = json.load(sys.stdin)
for step, metrics in enumerate(steps):
    print_metrics_table(step, len(steps), began, metrics)
