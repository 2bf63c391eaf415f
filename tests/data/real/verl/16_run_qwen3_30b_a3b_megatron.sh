#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh; the form is one that public scripts have.
set -e
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename "$0" .sh)_$(date +%m%d)
cd "$HERE"
ADV_ESTIMATOR=grpo
TRAIN_BATCH_SIZE=512
MAX_PROMPT_LENGTH=$((1024 * 2))
MAX_RESPONSE_LENGTH=$((1024 * 8))
PATH_MOD=Qwen/Qwen3-30B-A3B-Base
PPO_MINI_BATCH_SIZE_ACT=16
USE_DYNAMIC_BSZ_ACT=True
TENSOR_MODEL_PARALLEL_SIZE_MEG=4
PIPELINE_MODEL_PARALLEL_SIZE_MEG=2
VIRTUAL_PIPELINE_MODEL_PARALLEL_SIZE_MEG=2
EXPERT_MODEL_PARALLEL_SIZE_MEG=2
CONTEXT_PARALLEL_SIZE_MEG=1
NAME_ROL=vllm
TENSOR_MODEL_PARALLEL_SIZE_ROL=4
GPU_MEMORY_UTILIZATION_ROL=0.6
N_ROL=8
MAX_NUM_SEQS_ROL=$((1024 * 1))
N_GPUS_PER_NODE=8
NNODES=1
ARGS=""
ARGS+=" algorithm.adv_estimator=${ADV_ESTIMATOR}"
ARGS+=" data.train_batch_size=${TRAIN_BATCH_SIZE}"
ARGS+=" data.max_prompt_length=${MAX_PROMPT_LENGTH}"
ARGS+=" data.max_response_length=${MAX_RESPONSE_LENGTH}"
ARGS+=" actor_rollout_ref.model.path=${PATH_MOD}"
ARGS+=" actor_rollout_ref.actor.ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE_ACT}"
ARGS+=" actor_rollout_ref.actor.use_dynamic_bsz=${USE_DYNAMIC_BSZ_ACT}"
ARGS+=" actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PIPELINE_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=${VIRTUAL_PIPELINE_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EXPERT_MODEL_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.actor.megatron.context_parallel_size=${CONTEXT_PARALLEL_SIZE_MEG}"
ARGS+=" actor_rollout_ref.rollout.name=${NAME_ROL}"
ARGS+=" actor_rollout_ref.rollout.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
ARGS+=" actor_rollout_ref.rollout.gpu_memory_utilization=${GPU_MEMORY_UTILIZATION_ROL}"
ARGS+=" actor_rollout_ref.rollout.n=${N_ROL}"
ARGS+=" actor_rollout_ref.rollout.max_num_seqs=${MAX_NUM_SEQS_ROL}"
ARGS+=" trainer.n_gpus_per_node=${N_GPUS_PER_NODE}"
ARGS+=" trainer.nnodes=${NNODES}"
for retry in $(seq 3); do
    if ray status; then break; fi
    sleep 1
done
eval python3 -m verl.trainer.main_ppo $ARGS
