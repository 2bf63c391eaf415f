#!/usr/bin/env bash
# Values of verl/verl/experimental/fully_async_policy/shell/dapo_30b_a3b_base_math_fsdp.sh; the form is one that public scripts have.
set -x

python3 -m verl.experimental.fully_async_policy.fully_async_main \
    data.max_prompt_length=2048 \
    data.max_response_length=20480 \
    data.train_batch_size=0 \
    actor_rollout_ref.rollout.n=16 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.model.path=/data/verl/shared/models/Qwen3-30B-A3B-Base \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.50 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.name=vllm \
    trainer.nnodes=2 \
    trainer.n_gpus_per_node=8 \
    rollout.nnodes=2 \
    rollout.n_gpus_per_node=8 \
    async_training.require_batches=1 \
    async_training.staleness_threshold=0.6 \
    async_training.trigger_parameter_sync_step=16 \
    $@
