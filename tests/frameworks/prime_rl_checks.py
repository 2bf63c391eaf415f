"""Runs inside .venv-prime-rl: gives configs to prime-rl's own config classes, as its `rl` launcher does with --dry-run.

Standard input: a JSON list of {"checkout": folder, "files": [TOML files], "words": [flags]}. Standard output: a JSON
list of {"trainer": GPUs, "rollout": GPUs, "workers": data-parallel ranks} or {"error": text}. The environments' and the
renderers' packages are stood in for: their configs are taken as they are.
"""

import json
import sys
import types
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # the package is for Python 3.12

from pydantic import BaseModel, ConfigDict  # noqa: E402


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class Environment(Anything):
    @property
    def env_id(self):
        task = (self.model_extra or {}).get("taskset") or {}
        return task.get("id", "environment") if isinstance(task, dict) else "environment"


class Served(Anything):
    address: str | None = None


class Renderer(Anything):
    name: str = "default"


class Every(dict):
    def __contains__(self, name):
        return True


def module(name, **members):
    made = types.ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made
    return made


v1 = module(
    "verifiers.v1",
    EnvConfig=Environment,
    SingleAgentEnvConfig=Environment,
    ServeConfig=Served,
    resolve_env_field=lambda data, annotation: data,
    narrowed_env_annotation=lambda kind: Environment,
    __getattr__=lambda name: Anything,
)
module("verifiers", v1=v1)
base = module("renderers.base", MODEL_RENDERER_MAP=Every())
module("renderers", AutoRendererConfig=Renderer, RendererConfig=Renderer, base=base)


def checked(case):
    sys.path.insert(0, f"{case['checkout']}/packages/prime-rl-configs/src")
    from prime_rl.configs.rl import RLConfig
    from pydantic_config import cli

    words = [word for file in case["files"] for word in ("@", file)] + case["words"]
    try:
        config = cli(RLConfig, args=words)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    place = config.deployment
    if place.type == "multi_node":
        gpus = place.num_train_nodes * place.gpus_per_node, place.total_infer_nodes * place.gpus_per_node
    else:
        gpus = place.num_train_gpus, place.num_infer_gpus
    return {"trainer": gpus[0], "rollout": gpus[1], "workers": config.orchestrator.num_train_workers}


print("ANSWERS" + json.dumps([checked(case) for case in json.load(sys.stdin)]))
