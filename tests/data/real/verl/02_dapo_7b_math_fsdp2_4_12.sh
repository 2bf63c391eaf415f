#!/usr/bin/env bash
# Values of verl/verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_4_12.sh; the form is one that public scripts have.
set -xeuo pipefail

max_prompt_length=${MAX_PROMPT_LENGTH:-$((1024 * 2))}
max_response_length=${MAX_RESPONSE_LENGTH:-$((1024 * 8))}
train_batch_size=${TRAIN_BATCH_SIZE:-0}
n_rol=${N_ROL:-16}
adv_estimator=${ADV_ESTIMATOR:-grpo}
hybrid_engine=${HYBRID_ENGINE:-False}
use_dynamic_bsz_act=${USE_DYNAMIC_BSZ_ACT:-True}
path_mod=${PATH_MOD:-/data/verl/models/Qwen2.5-Math-7B}
ppo_mini_batch_size_act=${PPO_MINI_BATCH_SIZE_ACT:-32}
ulysses_sequence_parallel_size_act=${ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT:-1}
gpu_memory_utilization_rol=${GPU_MEMORY_UTILIZATION_ROL:-0.80}
tensor_model_parallel_size_rol=${TENSOR_MODEL_PARALLEL_SIZE_ROL:-1}
name_rol=${NAME_ROL:-vllm}
nnodes=${NNODES:-2}
n_gpus_per_node=${N_GPUS_PER_NODE:-6}
nnodes_rol=${NNODES_ROL:-2}
n_gpus_per_node_rol=${N_GPUS_PER_NODE_ROL:-2}
staleness_threshold=${STALENESS_THRESHOLD:-0.1}
trigger_parameter_sync_step=${TRIGGER_PARAMETER_SYNC_STEP:-4}
require_batches=${REQUIRE_BATCHES:-4}

python3 -m verl.experimental.fully_async_policy.fully_async_main \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.train_batch_size=${train_batch_size} \
    actor_rollout_ref.rollout.n=${n_rol} \
    algorithm.adv_estimator=${adv_estimator} \
    actor_rollout_ref.hybrid_engine=${hybrid_engine} \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz_act} \
    actor_rollout_ref.model.path=${path_mod} \
    actor_rollout_ref.actor.ppo_mini_batch_size=${ppo_mini_batch_size_act} \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${ulysses_sequence_parallel_size_act} \
    actor_rollout_ref.rollout.gpu_memory_utilization=${gpu_memory_utilization_rol} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tensor_model_parallel_size_rol} \
    actor_rollout_ref.rollout.name=${name_rol} \
    trainer.nnodes=${nnodes} \
    trainer.n_gpus_per_node=${n_gpus_per_node} \
    rollout.nnodes=${nnodes_rol} \
    rollout.n_gpus_per_node=${n_gpus_per_node_rol} \
    async_training.staleness_threshold=${staleness_threshold} \
    async_training.trigger_parameter_sync_step=${trigger_parameter_sync_step} \
    async_training.require_batches=${require_batches} \
    "$@"
