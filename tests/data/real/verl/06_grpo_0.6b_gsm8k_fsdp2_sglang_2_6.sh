#!/usr/bin/env bash
# Values of verl/verl/experimental/one_step_off_policy/shell/grpo_0.6b_gsm8k_fsdp2_sglang_2_6.sh; the form is one that public scripts have.
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
        LAUNCH=(uv run --frozen --extra "$BACKEND" python3 -m verl.experimental.one_step_off_policy.main_ppo)
        ;;
    *)
        echo "DEVICE must be gpu" >&2
        exit 1
        ;;
esac
launch "$BACKEND" "${LAUNCH[@]}" \
        algorithm.adv_estimator=grpo \
        data.train_batch_size=1152 \
        data.max_prompt_length=512 \
        data.max_response_length=1024 \
        actor_rollout_ref.model.path=/data/verl/models/Qwen3-0.6B \
        actor_rollout_ref.hybrid_engine=False \
        actor_rollout_ref.actor.ppo_mini_batch_size=192 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
        actor_rollout_ref.rollout.name=sglang \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
        actor_rollout_ref.rollout.n=5 \
        trainer.nnodes=1 \
        trainer.n_gpus_per_node=6 \
        rollout.nnodes=1 \
        rollout.n_gpus_per_node=2
