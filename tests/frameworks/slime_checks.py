"""Runs inside .venv-skyrl: gives flags to slime's own parser, checks, placement and schedule of batches.

Standard input: a JSON list of {"checkout": folder, "words": flags, "script": name}. Standard output: a JSON list of
{"gpus": all, "offset": first GPU of the engines, "trainer": GPUs, "rollout": GPUs} or {"error": text}. SGLang, its
router and Megatron are stood in for: of Megatron's checks only that sizes divide GPUs and batch is made here.
"""

import argparse
import importlib
import json
import math
import sys
import types
from pathlib import Path

sys.argv = ["train.py"]


class Anything:
    def __getattr__(self, name):
        return Anything()

    def __call__(self, *_, **__):
        return Anything()

    def __or__(self, other):
        return self


def anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


def module(name, **members):
    made = types.ModuleType(name)
    made.__dict__.update(members)
    made.__getattr__ = anything
    made.__path__ = []
    sys.modules[name] = made


class NoArguments:
    @staticmethod
    def add_cli_args(parser, *_, **__):
        return parser


for name in ("wandb", "requests", "pylatexenc", "httpx"):
    module(name)
for name in ("sglang", "sglang.srt", "sglang_router", "megatron", "megatron.training"):
    module(name)
module("sglang.srt.server_args", ServerArgs=NoArguments)
module("sglang_router.launch_router", RouterArgs=NoArguments)

MEGATRON = {
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
}


def checked(case):
    sys.path.insert(0, case["checkout"])
    for package in ("slime", "slime.ray"):
        if package not in sys.modules:  # their __init__ would import what needs GPUs
            module(package)
            sys.modules[package].__path__ = [str(Path(case["checkout"]) / package.replace(".", "/"))]
            del sys.modules[package].__getattr__
    arguments = importlib.import_module("slime.utils.arguments")
    placement = importlib.import_module("slime.ray.placement_group")
    schedule = importlib.import_module("slime.utils.dp_schedule")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in MEGATRON.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mtp-num-layers", type=int)
    arguments.get_slime_extra_args_provider()(parser)
    try:
        args, _ = parser.parse_known_args(case["words"])
        for name in ("debug_rollout_only", "debug_train_only"):
            setattr(args, name, f"--{name.replace('_', '-')}" in case["words"])
        args.train_backend, args.load_debug_rollout_data = "megatron", None
        args.use_kl_loss, args.kl_coef = False, 0  # a reference's checkpoint would have to be there
        args.use_opd, args.opd_teacher_load = False, None
        args.save, args.save_interval, args.eval_interval = "/tmp", None, None
        arguments.slime_validate_args(args)
        if case["script"] == "train_async.py":
            assert not args.colocate, "Colocation is not supported for async training."
        gpus, offset = placement._get_placement_group_layout(args)
        actor = args.actor_num_nodes * args.actor_num_gpus_per_node
        tensor, pipeline, context, experts = (getattr(args, n.replace("-", "_")) for n in list(MEGATRON)[:4])
        dense = tensor * pipeline * context
        assert actor % dense == 0, f"world size {actor} is not divisible by {dense}"
        within = args.expert_tensor_parallel_size or tensor
        assert experts == 1 or actor % (experts * within * pipeline) == 0, f"{actor} does not hold the experts"
        batch = args.global_batch_size or args.micro_batch_size * actor // dense
        assert batch % (args.micro_batch_size * actor // dense) == 0, f"batch {batch} is not divisible"
        assert args.rollout_num_gpus % args.rollout_num_gpus_per_engine == 0, "engines do not fill their GPUs"
        answers = args.rollout_batch_size * args.n_samples_per_prompt
        config = {"dp_size": actor // dense, "cp_size": context, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        args.balance_data = args.balance_by_flops = False
        args.max_tokens_per_gpu = args.max_tokens_per_gpu or 4096
        lengths = [math.ceil(args.max_tokens_per_gpu / 2)] * answers
        schedule.build_dp_schedule(args, config, lengths, global_batch_size=batch, rollout_indices=list(range(answers)))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    return {"gpus": gpus, "offset": offset, "trainer": actor, "rollout": args.rollout_num_gpus}


print("ANSWERS" + json.dumps([checked(case) for case in json.load(sys.stdin)]))
