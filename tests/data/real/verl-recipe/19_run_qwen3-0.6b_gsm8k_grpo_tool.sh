#!/usr/bin/env bash
# Values of verl-recipe/partial_rollout/run/run_qwen3-0.6b_gsm8k_grpo_tool.sh; the form is one that public scripts have.
set -euxo pipefail
N_GPUS_PER_NODE=2  # trainer.n_gpus_per_node
NNODES=1  # trainer.nnodes
TRAIN_BATCH_SIZE=8  # data.train_batch_size
MAX_PROMPT_LENGTH=$((1024 * 1))  # data.max_prompt_length
MAX_RESPONSE_LENGTH=3584  # data.max_response_length
ADV_ESTIMATOR=grpo  # algorithm.adv_estimator
PATH_MOD=Qwen/Qwen3-0.6B  # actor_rollout_ref.model.path
PPO_MINI_BATCH_SIZE_ACT=8  # actor_rollout_ref.actor.ppo_mini_batch_size
NAME_ROL=vllm  # actor_rollout_ref.rollout.name
N_ROL=8  # actor_rollout_ref.rollout.n
TENSOR_MODEL_PARALLEL_SIZE_ROL=1  # actor_rollout_ref.rollout.tensor_model_parallel_size
GPU_MEMORY_UTILIZATION_ROL=0.5  # actor_rollout_ref.rollout.gpu_memory_utilization

COMMON=(
    trainer.n_gpus_per_node=$N_GPUS_PER_NODE
    trainer.nnodes=$NNODES
    data.train_batch_size=$TRAIN_BATCH_SIZE
    data.max_prompt_length=$MAX_PROMPT_LENGTH
    data.max_response_length=$MAX_RESPONSE_LENGTH
    algorithm.adv_estimator=$ADV_ESTIMATOR
)
TRAIN=(
    actor_rollout_ref.model.path="${PATH_MOD}"
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE_ACT}"
    actor_rollout_ref.rollout.name="${NAME_ROL}"
    actor_rollout_ref.rollout.n="${N_ROL}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
    actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION_ROL}"
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
