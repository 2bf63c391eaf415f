"""Runs inside .venv-verl: composes verl's own config with overrides and asks its own trainer for the resource pools.

Standard input: a JSON list of lists of Hydra overrides. Standard output: a JSON list of {"pools": {name: [GPUs of each
node]}, "roles": {role: pool}, "rollout": [GPUs of each node of the rollout's own pool]} or {"error": text}. The trainer
is made without its workers: neither Ray nor GPUs are needed.
"""

import json
import sys
from pathlib import Path

import verl.trainer.ppo.v1.trainer_colocate_async  # registers that mode
import verl.trainer.ppo.v1.trainer_separate_async  # registers that mode
import verl.trainer.ppo.v1.trainer_sync  # noqa: F401 - registers that mode
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import validate_config


class NoReplayBuffer:
    pass


def only_keep_config(self, config):
    self.config = config
    self.role_worker_mapping, self.mapping = {}, {}
    self.replay_buffer = NoReplayBuffer()


trainer_base.PPOTrainer.__init__ = only_keep_config


def pools(overrides):
    folder = Path(trainer_base.__file__).parents[2] / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    validate_config(config, use_reference_policy=False, use_critic=False)
    trainer = trainer_base.get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.role_worker_mapping, trainer.mapping = {}, {}
    trainer._init_resource_pool_mgr()
    manager = trainer.resource_pool_manager
    own = config.actor_rollout_ref.rollout
    return {
        "pools": {name: list(nodes) for name, nodes in manager.resource_pool_spec.items()},
        "roles": {role.name: pool for role, pool in manager.mapping.items()},
        "rollout": [own.n_gpus_per_node] * own.nnodes,
    }


def main():
    answers = []
    for overrides in json.load(sys.stdin):
        try:
            answers.append(pools(overrides))
        except Exception as error:  # noqa: PERF203 - whatever it says is the answer
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print("ANSWERS" + json.dumps(answers))


main()
