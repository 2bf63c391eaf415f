#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen3_5_35b_a3b_veomni.sh; the form is one that public scripts have.
set -euxo pipefail
ADV_ESTIMATOR=grpo  # algorithm.adv_estimator
TRAIN_BATCH_SIZE=128  # data.train_batch_size
MAX_PROMPT_LENGTH=$((1024 * 1))  # data.max_prompt_length
MAX_RESPONSE_LENGTH=$((1024 * 2))  # data.max_response_length
N_GPUS_PER_NODE=8  # trainer.n_gpus_per_node
NNODES=2  # trainer.nnodes
PATH_MOD=/data/model/Qwen3.5-35B-A3B  # actor_rollout_ref.model.path
USE_DYNAMIC_BSZ_ACT=False  # actor_rollout_ref.actor.use_dynamic_bsz
PPO_MINI_BATCH_SIZE_ACT=32  # actor_rollout_ref.actor.ppo_mini_batch_size
NAME_ROL=sglang  # actor_rollout_ref.rollout.name
TENSOR_MODEL_PARALLEL_SIZE_ROL=4  # actor_rollout_ref.rollout.tensor_model_parallel_size
GPU_MEMORY_UTILIZATION_ROL=0.6  # actor_rollout_ref.rollout.gpu_memory_utilization
N_ROL=8  # actor_rollout_ref.rollout.n

COMMON=(
    algorithm.adv_estimator=$ADV_ESTIMATOR
    data.train_batch_size=$TRAIN_BATCH_SIZE
    data.max_prompt_length=$MAX_PROMPT_LENGTH
    data.max_response_length=$MAX_RESPONSE_LENGTH
    trainer.n_gpus_per_node=$N_GPUS_PER_NODE
    trainer.nnodes=$NNODES
)
TRAIN=(
    actor_rollout_ref.model.path="${PATH_MOD}"
    actor_rollout_ref.actor.use_dynamic_bsz="${USE_DYNAMIC_BSZ_ACT}"
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE_ACT}"
    actor_rollout_ref.rollout.name="${NAME_ROL}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
    actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION_ROL}"
    actor_rollout_ref.rollout.n="${N_ROL}"
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
