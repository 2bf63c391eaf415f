#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-nanov3-30BA3B-4n4g-megatron_async_colocated.sh; the form is one that public scripts have.
set -eu
NODES=${NODES:-4}
PROMPTS=2
COMMAND="uv run ./examples/run_grpo.py --config configs/14_grpo_nanov3_30ba3b_4n4g_megatron_async_coloc.yaml cluster.num_nodes=${NODES} grpo.num_prompts_per_step=${PROMPTS} logger.log_dir=results" \
CONTAINER=image \
MOUNTS="$PWD:$PWD" \
sbatch \
    --nodes=${NODES} \
    --account=ACCOUNT \
    --job-name=grpo \
    --gres=gpu:8 \
    ray.sub
