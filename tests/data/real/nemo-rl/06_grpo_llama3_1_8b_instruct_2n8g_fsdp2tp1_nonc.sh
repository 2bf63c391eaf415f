#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated-tq_simple.sh; the form is one that public scripts have.
set -eu
NODES=${NODES:-2}
PROMPTS=64
COMMAND="uv run ./examples/run_grpo.py --config configs/06_grpo_llama3_1_8b_instruct_2n8g_fsdp2tp1_nonc.yaml cluster.num_nodes=${NODES} grpo.num_prompts_per_step=${PROMPTS} logger.log_dir=results" \
CONTAINER=image \
MOUNTS="$PWD:$PWD" \
sbatch \
    --nodes=${NODES} \
    --account=ACCOUNT \
    --job-name=grpo \
    --gres=gpu:8 \
    ray.sub
