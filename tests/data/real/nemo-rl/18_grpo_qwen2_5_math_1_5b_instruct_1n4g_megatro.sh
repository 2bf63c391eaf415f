#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-qwen2.5-math-1.5b-instruct-1n4g-megatron-single-controller-sync.sh; the form is one that public scripts have.
set -eu
NODES=${NODES:-1}
PROMPTS=32
COMMAND="uv run ./examples/run_grpo.py --config configs/18_grpo_qwen2_5_math_1_5b_instruct_1n4g_megatro.yaml cluster.num_nodes=${NODES} grpo.num_prompts_per_step=${PROMPTS} logger.log_dir=results" \
CONTAINER=image \
MOUNTS="$PWD:$PWD" \
sbatch \
    --nodes=${NODES} \
    --account=ACCOUNT \
    --job-name=grpo \
    --gres=gpu:8 \
    ray.sub
