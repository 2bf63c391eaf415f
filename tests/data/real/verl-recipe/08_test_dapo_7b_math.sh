#!/usr/bin/env bash
# Values of verl-recipe/dapo/test_dapo_7b_math.sh; the form is one that public scripts have.
set -e
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename "$0" .sh)_$(date +%m%d)
cd "$HERE"
MAX_PROMPT_LENGTH=$((1024 * 2))
MAX_RESPONSE_LENGTH=$((1024 * 8))
TRAIN_BATCH_SIZE=512
N_ROL=16
ADV_ESTIMATOR=grpo
USE_DYNAMIC_BSZ_ACT=True
NAME_ROL=vllm
PATH_MOD=/data/verl/models/Qwen2.5-Math-7B
PPO_MINI_BATCH_SIZE_ACT=32
ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT=4
GPU_MEMORY_UTILIZATION_ROL=0.80
TENSOR_MODEL_PARALLEL_SIZE_ROL=4
N_GPUS_PER_NODE=8
NNODES=8
ARGS=""
ARGS+=" data.max_prompt_length=${MAX_PROMPT_LENGTH}"
ARGS+=" data.max_response_length=${MAX_RESPONSE_LENGTH}"
ARGS+=" data.train_batch_size=${TRAIN_BATCH_SIZE}"
ARGS+=" actor_rollout_ref.rollout.n=${N_ROL}"
ARGS+=" algorithm.adv_estimator=${ADV_ESTIMATOR}"
ARGS+=" actor_rollout_ref.actor.use_dynamic_bsz=${USE_DYNAMIC_BSZ_ACT}"
ARGS+=" actor_rollout_ref.rollout.name=${NAME_ROL}"
ARGS+=" actor_rollout_ref.model.path=${PATH_MOD}"
ARGS+=" actor_rollout_ref.actor.ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE_ACT}"
ARGS+=" actor_rollout_ref.actor.ulysses_sequence_parallel_size=${ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT}"
ARGS+=" actor_rollout_ref.rollout.gpu_memory_utilization=${GPU_MEMORY_UTILIZATION_ROL}"
ARGS+=" actor_rollout_ref.rollout.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
ARGS+=" trainer.n_gpus_per_node=${N_GPUS_PER_NODE}"
ARGS+=" trainer.nnodes=${NNODES}"
for retry in $(seq 3); do
    if ray status; then break; fi
    sleep 1
done
eval python3 -m verl.trainer.main_ppo $ARGS
