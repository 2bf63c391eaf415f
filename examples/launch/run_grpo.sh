#!/usr/bin/env bash
# GRPO of Qwen2.5-7B with verl: the form that launch scripts have.
set -xeuo pipefail
pkill -9 python || true
ray stop --force || true

NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
max_response_length=$((1024 * 4))
rollout_tp=2

DATA=(
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=${max_response_length}
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=${rollout_tp}
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
)
if [ "${ASYNC:-0}" = 1 ]; then
    ROLLOUT+=(actor_rollout_ref.rollout.mode=async)
fi

ray job submit --address="${RAY_ADDRESS:-http://localhost:8265}" -- \
    python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path="${MODEL}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    "${ROLLOUT[@]}" \
    trainer.experiment_name="grpo_$(date +%Y%m%d)" \
    trainer.nnodes="${NNODES}" \
    trainer.n_gpus_per_node="${GPUS_PER_NODE}" "$@"
