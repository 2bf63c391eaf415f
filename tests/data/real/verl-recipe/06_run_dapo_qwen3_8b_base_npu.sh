#!/usr/bin/env bash
# Values of verl-recipe/dapo/run_dapo_qwen3_8b_base_npu.sh; the form is one that public scripts have.
set -eu
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
BACKEND=${1:-vllm}
launch() {
    local name=$1
    shift
    echo "starting $name"
    "$@"
}
case "$DEVICE" in
    gpu)
        LAUNCH=(uv run --frozen --extra "$BACKEND" python3 -m verl.trainer.main_ppo)
        ;;
    *)
        echo "DEVICE must be gpu" >&2
        exit 1
        ;;
esac
launch "$BACKEND" "${LAUNCH[@]}" \
        data.max_prompt_length=2048 \
        data.max_response_length=20480 \
        data.train_batch_size=16 \
        actor_rollout_ref.rollout.n=16 \
        algorithm.adv_estimator=grpo \
        actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.model.path=/data/verl/models/Qwen3-8B-Base \
        actor_rollout_ref.actor.ppo_mini_batch_size=1 \
        actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.90 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
        actor_rollout_ref.rollout.name=vllm \
        trainer.n_gpus_per_node=8 \
        trainer.nnodes=1
