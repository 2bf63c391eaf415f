#!/usr/bin/env bash
# Values of verl/examples/ascend_extras/ppo_trainer/run_qwen3_8b_fsdp.sh; the form is one that public scripts have.
set -x

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_batch_size=64 \
    data.max_prompt_length=2000 \
    data.max_response_length=2000 \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9 \
    actor_rollout_ref.rollout.max_num_seqs=64 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    $@
