#!/usr/bin/env bash
# Values of verl-recipe/fapo/run_baseline_7b.sh; the form is one that public scripts have.
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
    -- python3 -m verl.trainer.main_ppo \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    data.train_batch_size=512 \
    actor_rollout_ref.rollout.n=8 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.model.path=/data/verl/models/Qwen2.5-Math-7B \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=4 2>&1 | tee run.log
