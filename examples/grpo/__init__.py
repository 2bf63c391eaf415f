"""GRPO end to end on a toy task: a small policy that learns to write what is missing to nine."""

import os

# Before numpy is imported: matrices are small here, and threads that wait for each other cost more than they give.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
