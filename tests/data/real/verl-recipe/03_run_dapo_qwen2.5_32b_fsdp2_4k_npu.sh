#!/usr/bin/env bash
# Values of verl-recipe/dapo/run_dapo_qwen2.5_32b_fsdp2_4k_npu.sh; the form is one that public scripts have.
set -euxo pipefail
MAX_PROMPT_LENGTH=$((1024 * 2))  # data.max_prompt_length
MAX_RESPONSE_LENGTH=$((1024 * 4))  # data.max_response_length
TRAIN_BATCH_SIZE=32  # data.train_batch_size
N_ROL=16  # actor_rollout_ref.rollout.n
ADV_ESTIMATOR=grpo  # algorithm.adv_estimator
USE_DYNAMIC_BSZ_ACT=True  # actor_rollout_ref.actor.use_dynamic_bsz
PATH_MOD=/data/verl/models/Qwen2.5-32B  # actor_rollout_ref.model.path
PPO_MINI_BATCH_SIZE_ACT=32  # actor_rollout_ref.actor.ppo_mini_batch_size
ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT=8  # actor_rollout_ref.actor.ulysses_sequence_parallel_size
GPU_MEMORY_UTILIZATION_ROL=0.60  # actor_rollout_ref.rollout.gpu_memory_utilization
TENSOR_MODEL_PARALLEL_SIZE_ROL=4  # actor_rollout_ref.rollout.tensor_model_parallel_size
NAME_ROL=vllm  # actor_rollout_ref.rollout.name
STRATEGY_ACT=fsdp2  # actor_rollout_ref.actor.strategy
N_GPUS_PER_NODE=16  # trainer.n_gpus_per_node
NNODES=1  # trainer.nnodes

COMMON=(
    data.max_prompt_length=$MAX_PROMPT_LENGTH
    data.max_response_length=$MAX_RESPONSE_LENGTH
    data.train_batch_size=$TRAIN_BATCH_SIZE
    actor_rollout_ref.rollout.n=$N_ROL
    algorithm.adv_estimator=$ADV_ESTIMATOR
    actor_rollout_ref.actor.use_dynamic_bsz=$USE_DYNAMIC_BSZ_ACT
    actor_rollout_ref.model.path=$PATH_MOD
)
TRAIN=(
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE_ACT}"
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="${ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT}"
    actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION_ROL}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
    actor_rollout_ref.rollout.name="${NAME_ROL}"
    actor_rollout_ref.actor.strategy="${STRATEGY_ACT}"
    trainer.n_gpus_per_node="${N_GPUS_PER_NODE}"
    trainer.nnodes="${NNODES}"
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
