#!/usr/bin/env bash
# Values of verl/verl/experimental/fully_async_policy/shell/geo3k_qwen25vl_7b_megatron_4_4.sh; the form is one that public scripts have.
set -euxo pipefail
ADV_ESTIMATOR=grpo  # algorithm.adv_estimator
TRAIN_BATCH_SIZE=0  # data.train_batch_size
MAX_PROMPT_LENGTH=$((1024 * 1))  # data.max_prompt_length
MAX_RESPONSE_LENGTH=$((1024 * 2))  # data.max_response_length
PATH_MOD=/models/Qwen2.5-VL-7B-Instruct  # actor_rollout_ref.model.path
HYBRID_ENGINE=False  # actor_rollout_ref.hybrid_engine
PPO_MINI_BATCH_SIZE_ACT=128  # actor_rollout_ref.actor.ppo_mini_batch_size
PIPELINE_MODEL_PARALLEL_SIZE_MEG=1  # actor_rollout_ref.actor.megatron.pipeline_model_parallel_size
TENSOR_MODEL_PARALLEL_SIZE_MEG=2  # actor_rollout_ref.actor.megatron.tensor_model_parallel_size
TENSOR_MODEL_PARALLEL_SIZE_ROL=1  # actor_rollout_ref.rollout.tensor_model_parallel_size
USE_DYNAMIC_BSZ_ACT=True  # actor_rollout_ref.actor.use_dynamic_bsz
NAME_ROL=vllm  # actor_rollout_ref.rollout.name

COMMON=(
    algorithm.adv_estimator=$ADV_ESTIMATOR
    data.train_batch_size=$TRAIN_BATCH_SIZE
    data.max_prompt_length=$MAX_PROMPT_LENGTH
    data.max_response_length=$MAX_RESPONSE_LENGTH
    actor_rollout_ref.model.path=$PATH_MOD
    actor_rollout_ref.hybrid_engine=$HYBRID_ENGINE
)
TRAIN=(
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE_ACT}"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="${PIPELINE_MODEL_PARALLEL_SIZE_MEG}"
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="${TENSOR_MODEL_PARALLEL_SIZE_MEG}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_MODEL_PARALLEL_SIZE_ROL}"
    actor_rollout_ref.actor.use_dynamic_bsz="${USE_DYNAMIC_BSZ_ACT}"
    actor_rollout_ref.rollout.name="${NAME_ROL}"
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m verl.experimental.fully_async_policy.fully_async_main --config-name=fully_async_ppo_megatron_trainer "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
