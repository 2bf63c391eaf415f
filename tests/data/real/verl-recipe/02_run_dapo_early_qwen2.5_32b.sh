#!/usr/bin/env bash
# Values of verl-recipe/dapo/run_dapo_early_qwen2.5_32b.sh; the form is one that public scripts have.
set -xeuo pipefail

max_prompt_length=${MAX_PROMPT_LENGTH:-$((1024 * 2))}
max_response_length=${MAX_RESPONSE_LENGTH:-$((1024 * 20))}
train_batch_size=${TRAIN_BATCH_SIZE:-512}
n_rol=${N_ROL:-16}
adv_estimator=${ADV_ESTIMATOR:-grpo}
use_dynamic_bsz_act=${USE_DYNAMIC_BSZ_ACT:-True}
path_mod=${PATH_MOD:-/data/verl/models/Qwen2.5-32B}
ppo_mini_batch_size_act=${PPO_MINI_BATCH_SIZE_ACT:-32}
ulysses_sequence_parallel_size_act=${ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT:-8}
gpu_memory_utilization_rol=${GPU_MEMORY_UTILIZATION_ROL:-0.80}
tensor_model_parallel_size_rol=${TENSOR_MODEL_PARALLEL_SIZE_ROL:-4}
name_rol=${NAME_ROL:-vllm}
n_gpus_per_node=${N_GPUS_PER_NODE:-8}
nnodes=${NNODES:-16}

python3 -m verl.trainer.main_ppo \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.train_batch_size=${train_batch_size} \
    actor_rollout_ref.rollout.n=${n_rol} \
    algorithm.adv_estimator=${adv_estimator} \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz_act} \
    actor_rollout_ref.model.path=${path_mod} \
    actor_rollout_ref.actor.ppo_mini_batch_size=${ppo_mini_batch_size_act} \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${ulysses_sequence_parallel_size_act} \
    actor_rollout_ref.rollout.gpu_memory_utilization=${gpu_memory_utilization_rol} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tensor_model_parallel_size_rol} \
    actor_rollout_ref.rollout.name=${name_rol} \
    trainer.n_gpus_per_node=${n_gpus_per_node} \
    trainer.nnodes=${nnodes} \
    "$@"
