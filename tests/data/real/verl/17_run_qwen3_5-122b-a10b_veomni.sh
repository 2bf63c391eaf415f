#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen3_5-122b-a10b_veomni.sh; the form is one that public scripts have.
set -x

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=8 \
    actor_rollout_ref.model.path=/data/model/Qwen3.5-122B-A10B \
    actor_rollout_ref.actor.use_dynamic_bsz=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=8 \
    $@
