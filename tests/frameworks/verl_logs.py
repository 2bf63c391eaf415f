"""Runs inside .venv-verl: verl's own metrics and loggers write what a run with these timings would have logged.

Argument: the file for the file logger. Standard input: JSON, a list of {timer: seconds} for each step. Standard output:
what verl's console logger prints.
"""

import json
import os
import sys

import numpy as np
import torch

os.environ["VERL_FILE_LOGGER_PATH"] = sys.argv[1]

from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_timing_metrics
from verl.utils.tracking import Tracking

PROMPT, ANSWER = 4, 12
batch = DataProto.from_dict(
    tensors={
        "responses": torch.ones(2, ANSWER, dtype=torch.long),
        "attention_mask": torch.ones(2, PROMPT + ANSWER, dtype=torch.long),
    }
)
tracking = Tracking("project", "experiment", default_backend=["console", "file"])
for step, timings in enumerate(json.load(sys.stdin), start=1):
    metrics = {"actor/pg_loss": np.float64(0.01), "response_length/mean": float(ANSWER), "prompt_length/mean": 4.0}
    metrics.update(compute_timing_metrics(batch, timings))
    tracking.log(data=metrics, step=step)
    if step % 10 == 0:
        tracking.log(data={"val-core/gsm8k/acc/mean@1": 0.5}, step=step)
