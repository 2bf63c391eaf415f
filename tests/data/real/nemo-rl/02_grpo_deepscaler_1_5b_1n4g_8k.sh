#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-deepscaler-1.5b-1n4g-8K.sh; the form is one that public scripts have.
set -eu
NODES=${NODES:-1}
PROMPTS=128
COMMAND="uv run ./examples/run_grpo.py --config configs/02_grpo_deepscaler_1_5b_1n4g_8k.yaml cluster.num_nodes=${NODES} grpo.num_prompts_per_step=${PROMPTS} logger.log_dir=results" \
CONTAINER=image \
MOUNTS="$PWD:$PWD" \
sbatch \
    --nodes=${NODES} \
    --account=ACCOUNT \
    --job-name=grpo \
    --gres=gpu:8 \
    ray.sub
