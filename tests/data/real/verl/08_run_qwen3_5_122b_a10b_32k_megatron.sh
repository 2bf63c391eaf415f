#!/usr/bin/env bash
# Values of verl/examples/ascend_extras/grpo_trainer/run_qwen3_5_122b_a10b_32k_megatron.sh; the form is one that public scripts have.
set -e
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename "$0" .sh)_$(date +%m%d)
cd "$HERE"
TRAIN_BATCH_SIZE=16
MAX_PROMPT_LENGTH=$((1024 * 4))
MAX_RESPONSE_LENGTH=$((1024 * 32))
ADV_ESTIMATOR=grpo
PATH_MOD=/data/verl/models/Qwen3.5-122B-A10B
NAME_ROL=vllm
TENSOR_MODEL_PARALLEL_SIZE_ROL=16
GPU_MEMORY_UTILIZATION_ROL=0.6
N_ROL=5
USE_DYNAMIC_BSZ_ACT=False
PPO_MINI_BATCH_SIZE_ACT=16
TENSOR_MODEL_PARALLEL_SIZE_MEG=2
PIPELINE_MODEL_PARALLEL_SIZE_MEG=4
CONTEXT_PARALLEL_SIZE_MEG=4
EXPERT_MODEL_PARALLEL_SIZE_MEG=16
EXPERT_TENSOR_PARALLEL_SIZE_MEG=1
N_GPUS_PER_NODE=16
NNODES=4
ARGS=""
ARGS+=" data.train_batch_size=${TRAIN_BATCH_SIZE}"
ARGS+=" data.max_prompt_length=${MAX_PROMPT_LENGTH}"
ARGS+=" data.max_response_length=${MAX_RESPONSE_LENGTH}"
ARGS+=" algorithm.adv_estimator=${ADV_ESTIMATOR}"
ARGS+=" actor_rollout_ref.model.path=${PATH_MOD}"
ARGS+=" actor_rollout_ref.rollout.name=${NAME_ROL}"
ARGS+=" actor_rollout_ref.rollout.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
ARGS+=" actor_rollout_ref.rollout.gpu_memory_utilization=${GPU_MEMORY_UTILIZATION_ROL}"
ARGS+=" actor_rollout_ref.rollout.n=${N_ROL}"
ARGS+=" actor_rollout_ref.actor.use_dynamic_bsz=${USE_DYNAMIC_BSZ_ACT}"
ARGS+=" actor_rollout_ref.actor.ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE_ACT}"
ARGS+=" actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PIPELINE_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.context_parallel_size=${CONTEXT_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EXPERT_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=${EXPERT_TENSOR_PARALLEL_SIZE_MEG}"
ARGS+=" trainer.n_gpus_per_node=${N_GPUS_PER_NODE}"
ARGS+=" trainer.nnodes=${NNODES}"
for retry in $(seq 3); do
    if ray status; then break; fi
    sleep 1
done
eval python3 -m verl.trainer.main_ppo $ARGS
