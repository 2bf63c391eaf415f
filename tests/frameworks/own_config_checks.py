"""Runs inside .venv-areal: gives configs to the own classes of AReaL, TRL and ROLL, which check them when they start.

Standard input: a JSON list of {"framework", "file", "overrides"} (AReaL, ROLL) or {"framework", "trainer", "folder",
"words", "server", "processes"} (TRL). Standard output: a JSON list of {"gpus": {role: GPUs}} or {"error": text}. ROLL
comes from PYTHONPATH. AReaL's trainer and ROLL's pipelines need their engines: of these, the rules on shared GPUs are
repeated here.
"""

import json
import os
import sys
import tempfile

os.chdir(tempfile.mkdtemp())  # some write logs where they are


def areal(case):
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.cli_args import GRPOConfig, parse_cli_args, to_structured_cfg
    from omegaconf import OmegaConf

    config, _ = parse_cli_args(["--config", case["file"], *case["overrides"]])
    config = OmegaConf.to_object(to_structured_cfg(config, GRPOConfig))
    roles = {"actor": config.actor, "rollout": config.rollout}
    roles |= {name: role for name in ("critic", "teacher") if (role := getattr(config, name)) is not None}
    if config.ref is not None and config.actor.kl_ctl > 0:
        roles["ref"] = config.ref
    found = {name: ModelAllocation.from_str(role.backend, name=name) for name, role in roles.items()}
    workers = {
        name: a.parallel.data_parallel_size if name == "rollout" else a.parallel.world_size for name, a in found.items()
    }
    gpus = {name: allocation.parallel.world_size for name, allocation in found.items()}
    own = dict(gpus)
    for name, role in roles.items():
        strategy = role.scheduling_strategy
        if strategy.type == "colocation":
            # areal/infra/scheduler/local.py: as many workers as the target has
            assert workers[name] == workers[strategy.target], (name, workers)
            own[name] = 0
            if {name, strategy.target} == {"actor", "rollout"}:
                assert config.enable_offload
                assert config.actor.weight_update_mode == "disk"
    assert sum(own.values()) <= config.cluster.n_nodes * config.cluster.n_gpus_per_node
    return {"rollout": gpus["rollout"], "update_actor": gpus["actor"]}


def roll(case):
    from dacite import from_dict
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf
    from roll.pipeline.agentic.agentic_config import AgenticConfig
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig
    from roll.platforms import current_platform

    folder, name = os.path.split(case["file"])
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose(config_name=name, overrides=case["overrides"])
    data = OmegaConf.to_container(config, resolve=True)
    type(current_platform).device_count = staticmethod(lambda: int(data.get("num_gpus_per_node", 8)))
    if "student_train" in data:
        data["is_pure_opd"] = True
    agentic = "train_env_manager" in data
    made = from_dict(data_class=AgenticConfig if agentic else RLVRConfig, data=data)
    train, infer = (set(role.device_mapping) for role in (made.actor_train, made.actor_infer))
    judges = {gpu for role in (getattr(made, "rewards", None) or {}).values() for gpu in role.device_mapping or ()}
    assert infer.isdisjoint(judges)
    if agentic:
        # AgenticPipeline._validate_partial_gpu_config
        assert not made.enable_reference or set(made.reference.device_mapping) == train
        reward = set(made.reward.device_mapping or ()) if made.reward else set()
        if not train.isdisjoint(infer):
            if train < infer:
                assert made.async_generation_ratio > 0
                assert made.actor_infer.world_size >= 2
            else:
                assert len(train) == len(infer) + len(reward)
                assert made.async_generation_ratio == 0
    return {"rollout": len(infer), "update_actor": len(train)}


def trl(case):
    from transformers import HfArgumentParser
    from trl import GRPOConfig, ModelConfig, RLOOConfig, ScriptArguments, TrlParser
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.scripts.vllm_serve import ScriptArguments as ServerArguments

    kinds = {"grpo": (GRPOConfig, ModelConfig), "rloo": (RLOOConfig, ModelConfig), "async_grpo": (AsyncGRPOConfig,)}
    kind, *others = kinds[case["trainer"]]
    kind.world_size = property(lambda self: case["processes"])
    os.chdir(case["folder"])
    here = ["--output_dir=.", "--use_cpu", "--bf16=False", "--report_to=none"]
    parser = TrlParser((ScriptArguments, kind, *others))
    _, made, *_ = parser.parse_args_and_config([*case["words"], *here], return_remaining_strings=True)
    if case["server"] is not None:
        HfArgumentParser(ServerArguments).parse_args_into_dataclasses(["--model=Qwen/Qwen3-8B", *case["server"]])
    step = made.per_device_train_batch_size * case["processes"] * made.gradient_accumulation_steps
    if kind is AsyncGRPOConfig:
        return {"step": step}
    if made.use_vllm and made.vllm_mode == "colocate":  # trl/generation/vllm_generation.py
        assert case["processes"] % made.vllm_tensor_parallel_size == 0
    return {"step": step, "batch": made.generation_batch_size // made.num_generations}


def checked(case):
    try:
        return {"gpus": {"areal": areal, "roll": roll, "trl": trl}[case["framework"]](case)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}


print("ANSWERS" + json.dumps([checked(case) for case in json.load(sys.stdin)]))
