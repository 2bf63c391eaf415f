"""Runs inside .venv-openrlhf: gives flags to OpenRLHF's own launcher and prints where it puts its models.

Standard input: a JSON list of lists of flags. Standard output: a JSON list of {"groups": {model: [GPUs, shares]},
"engines": [engines, GPUs of each, shares]} or {"error": text}. The launcher checks its flags and makes its placement
group and its models as ever; Ray, torch and the models themselves are stood in for.
"""

import importlib.util
import json
import runpy
import sys
import types
from pathlib import Path


class LaunchedError(Exception):
    """Everything is placed; training would begin."""


class Group:
    """A placement group of so many bundles."""

    def __init__(self, bundles, strategy):
        self.size = len(bundles)

    def ready(self):
        return None


class Models:
    """Stands in for the models and for the engines, and remembers what was made."""

    def __init__(self):
        self.groups, self.engines = {}, None

    def actors(self, nodes, per_node, kind, pg=None, num_gpus_per_actor=1, duplicate_actors=1):
        assert pg is None or nodes * per_node <= pg.size, f"{kind} has more processes than its placement group"
        assert nodes * per_node % duplicate_actors == 0, f"{kind} does not divide into parallel groups"
        self.groups[kind] = [nodes * per_node, pg is not None]

    def create(self, count, tensor_parallel, *rest, **_):
        self.engines = [count, tensor_parallel, any(isinstance(one, Group) for one in rest)]


def module(name, **members):
    made = types.ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made
    return made


class Trainer:
    @staticmethod
    def remote(*_, **__):
        raise LaunchedError


def launched(flags, package):
    models = Models()
    module("ray", is_initialized=lambda: True, get=lambda one: one)
    module("ray.util")
    module("ray.util.placement_group", placement_group=Group)
    root = module("openrlhf", __path__=[str(package)])
    root.__file__ = str(package / "__init__.py")
    module("openrlhf.trainer", __path__=[])
    module("openrlhf.trainer.ray", __path__=[], create_vllm_engines=models.create)
    module(
        "openrlhf.trainer.ray.launcher",
        RayActorGroup=models.actors,
        ReferenceModelActor="ref",
        RewardModelActor="reward",
    )
    module("openrlhf.trainer.ray.ppo_actor", PolicyModelActor="actor")
    module("openrlhf.trainer.ray.ppo_critic", CriticModelActor="critic")
    for name in ("ppo_trainer", "ppo_trainer_async"):
        module(f"openrlhf.trainer.{name}", PPOTrainer=Trainer, PPOTrainerAsync=Trainer)
    strategy = types.SimpleNamespace(print=lambda *_: None)
    module("openrlhf.utils", __path__=[str(package / "utils")], get_strategy=lambda args: strategy)
    sys.argv = ["train_ppo_ray", *flags]
    try:
        runpy.run_path(str(package / "cli" / "train_ppo_ray.py"), run_name="__main__")
    except LaunchedError:
        return {"groups": models.groups, "engines": models.engines}
    raise AssertionError("the launcher ended before it trained")


def main():
    package = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0])
    answers = []
    for flags in json.load(sys.stdin):
        try:
            answers.append(launched(flags, package))
        except SystemExit as error:  # noqa: PERF203 - whatever it says is the answer
            answers.append({"error": f"its parser refuses the flags ({error})"})
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print("ANSWERS" + json.dumps(answers))


main()
