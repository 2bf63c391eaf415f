#!/usr/bin/env bash
# Values of verl-recipe/low_precision/run_dapo_qwen3_moe_30b_fsdp_fp8_rollout.sh; the form is one that public scripts have.
set -e
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename "$0" .sh)_$(date +%m%d)
cd "$HERE"
MAX_PROMPT_LENGTH=$((1024 * 1))
MAX_RESPONSE_LENGTH=$((1024 * 20))
TRAIN_BATCH_SIZE=32
N_ROL=16
ADV_ESTIMATOR=grpo
PATH_MOD=Qwen/Qwen3-30B-A3B-Base
USE_DYNAMIC_BSZ_ACT=True
PPO_MINI_BATCH_SIZE_ACT=32
ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT=4
GPU_MEMORY_UTILIZATION_ROL=0.9
TENSOR_MODEL_PARALLEL_SIZE_ROL=1
MAX_NUM_SEQS_ROL=256
NAME_ROL=vllm
N_GPUS_PER_NODE=8
NNODES=2
ARGS=""
ARGS+=" data.max_prompt_length=${MAX_PROMPT_LENGTH}"
ARGS+=" data.max_response_length=${MAX_RESPONSE_LENGTH}"
ARGS+=" data.train_batch_size=${TRAIN_BATCH_SIZE}"
ARGS+=" actor_rollout_ref.rollout.n=${N_ROL}"
ARGS+=" algorithm.adv_estimator=${ADV_ESTIMATOR}"
ARGS+=" actor_rollout_ref.model.path=${PATH_MOD}"
ARGS+=" actor_rollout_ref.actor.use_dynamic_bsz=${USE_DYNAMIC_BSZ_ACT}"
ARGS+=" actor_rollout_ref.actor.ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE_ACT}"
ARGS+=" actor_rollout_ref.actor.ulysses_sequence_parallel_size=${ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT}"
ARGS+=" actor_rollout_ref.rollout.gpu_memory_utilization=${GPU_MEMORY_UTILIZATION_ROL}"
ARGS+=" actor_rollout_ref.rollout.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
ARGS+=" actor_rollout_ref.rollout.max_num_seqs=${MAX_NUM_SEQS_ROL}"
ARGS+=" actor_rollout_ref.rollout.name=${NAME_ROL}"
ARGS+=" trainer.n_gpus_per_node=${N_GPUS_PER_NODE}"
ARGS+=" trainer.nnodes=${NNODES}"
for retry in $(seq 3); do
    if ray status; then break; fi
    sleep 1
done
eval python3 -m verl.trainer.main_ppo $ARGS
