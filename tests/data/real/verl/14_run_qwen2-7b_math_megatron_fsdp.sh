#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen2-7b_math_megatron_fsdp.sh; the form is one that public scripts have.
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
        LAUNCH=(uv run --frozen --extra "$BACKEND" python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer)
        ;;
    *)
        echo "DEVICE must be gpu" >&2
        exit 1
        ;;
esac
launch "$BACKEND" "${LAUNCH[@]}" \
        data.train_batch_size=32 \
        data.max_prompt_length=512 \
        data.max_response_length=512 \
        algorithm.adv_estimator=grpo \
        actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B \
        actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
        actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
        actor_rollout_ref.rollout.n=2 \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
        trainer.n_gpus_per_node=8 \
        trainer.nnodes=1
