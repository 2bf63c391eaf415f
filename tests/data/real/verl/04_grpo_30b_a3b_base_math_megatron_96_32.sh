#!/usr/bin/env bash
# Values of verl/verl/experimental/fully_async_policy/shell/grpo_30b_a3b_base_math_megatron_96_32.sh; the form is one that public scripts have.
pkill -9 sglang
sleep 3
ray stop --force
pkill -9 ray
pkill -9 python
set -ex
export PYTHONUNBUFFERED=1
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV_JSON="{\"env_vars\": {\"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}"
ray job submit --address="http://127.0.0.1:8265" --no-wait \
    --runtime-env-json="${RUNTIME_ENV_JSON}" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m verl.experimental.fully_async_policy.fully_async_main --config-name=fully_async_ppo_megatron_trainer \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    data.train_batch_size=0 \
    actor_rollout_ref.rollout.n=16 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=/data/verl/models/Qwen3-30B-A3B-Base \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.hybrid_engine=False \
    trainer.nnodes=4 \
    trainer.n_gpus_per_node=8 \
    rollout.nnodes=12 \
    rollout.n_gpus_per_node=8 \
    async_training.staleness_threshold=0.5 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=1 2>&1 | tee run.log
