#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen3_5_27b_fsdp_turbo.sh; the form is one that public scripts have.
set -xeuo pipefail

adv_estimator=${ADV_ESTIMATOR:-grpo}
train_batch_size=${TRAIN_BATCH_SIZE:-16}
max_prompt_length=${MAX_PROMPT_LENGTH:-$((1024 * 1))}
max_response_length=${MAX_RESPONSE_LENGTH:-$((1024 * 2))}
path_mod=${PATH_MOD:-/data/verl/models/Qwen3.5-27B}
ppo_mini_batch_size_act=${PPO_MINI_BATCH_SIZE_ACT:-16}
use_dynamic_bsz_act=${USE_DYNAMIC_BSZ_ACT:-False}
strategy_act=${STRATEGY_ACT:-fsdp_turbo}
name_rol=${NAME_ROL:-vllm}
tensor_model_parallel_size_rol=${TENSOR_MODEL_PARALLEL_SIZE_ROL:-4}
gpu_memory_utilization_rol=${GPU_MEMORY_UTILIZATION_ROL:-0.5}
n_rol=${N_ROL:-5}
n_gpus_per_node=${N_GPUS_PER_NODE:-8}
nnodes=${NNODES:-1}

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=${adv_estimator} \
    data.train_batch_size=${train_batch_size} \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path=${path_mod} \
    actor_rollout_ref.actor.ppo_mini_batch_size=${ppo_mini_batch_size_act} \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz_act} \
    actor_rollout_ref.actor.strategy=${strategy_act} \
    actor_rollout_ref.rollout.name=${name_rol} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tensor_model_parallel_size_rol} \
    actor_rollout_ref.rollout.gpu_memory_utilization=${gpu_memory_utilization_rol} \
    actor_rollout_ref.rollout.n=${n_rol} \
    trainer.n_gpus_per_node=${n_gpus_per_node} \
    trainer.nnodes=${nnodes} \
    "$@"
