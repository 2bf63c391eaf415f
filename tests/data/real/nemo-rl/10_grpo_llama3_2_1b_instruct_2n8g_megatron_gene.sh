#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-llama3.2-1b-instruct-2n8g-megatron_generation-noncolocated.sh; the form is one that public scripts have.
set -eu
NODES=${NODES:-2}
PROMPTS=32
COMMAND="uv run ./examples/run_grpo.py --config configs/10_grpo_llama3_2_1b_instruct_2n8g_megatron_gene.yaml cluster.num_nodes=${NODES} grpo.num_prompts_per_step=${PROMPTS} logger.log_dir=results" \
CONTAINER=image \
MOUNTS="$PWD:$PWD" \
sbatch \
    --nodes=${NODES} \
    --account=ACCOUNT \
    --job-name=grpo \
    --gres=gpu:8 \
    ray.sub
