"""Runs inside .venv-skyrl: gives words to SkyRL's own config classes and to the checks of its entry points.

Standard input: a JSON list of lists of words. Standard output: a JSON list of {"trainer": GPUs, "rollout": GPUs,
"shared": whether they are the same} or {"error": text}. The fully asynchronous trainer's own checks are those that it
makes before it needs a model.
"""

import json
import os
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # the package is for Python 3.12
os.environ["WANDB_API_KEY"] = "none"

from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.utils.utils import validate_cfg  # noqa: E402


def checked(words):
    try:
        config = SkyRLTrainConfig.from_cli_overrides(words)
        validate_cfg(config)
        place, engines = config.trainer.placement, config.generator.inference_engine
        gpus = engines.num_engines * engines.tensor_parallel_size * engines.pipeline_parallel_size
        policy = place.policy_num_nodes * place.policy_num_gpus_per_node
        ahead = config.trainer.fully_async
        if ahead.enabled:
            assert not place.colocate_all, "colocate_all is not supported for async training yet."
            most = config.trainer.policy_mini_batch_size * (ahead.max_staleness_steps + 1)
            assert config.trainer.policy_mini_batch_size <= ahead.num_parallel_generation_workers <= most
            assert config.trainer.train_batch_size == config.trainer.policy_mini_batch_size
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    return {"trainer": policy, "rollout": gpus * engines.data_parallel_size, "shared": place.colocate_all}


print("ANSWERS" + json.dumps([checked(words) for words in json.load(sys.stdin)]))
