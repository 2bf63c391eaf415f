#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen3_vl_235b_a22b_megatron.sh; the form is one that public scripts have.
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
        algorithm.adv_estimator=grpo \
        data.train_batch_size=512 \
        data.max_prompt_length=1024 \
        data.max_response_length=2048 \
        actor_rollout_ref.model.path=/models/Qwen3-VL-235B-A22B-Instruct \
        actor_rollout_ref.actor.ppo_mini_batch_size=128 \
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
        actor_rollout_ref.actor.megatron.context_parallel_size=2 \
        actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
        actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.rollout.tensor_model_parallel_size=16 \
        actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
        actor_rollout_ref.rollout.n=5 \
        trainer.n_gpus_per_node=8 \
        trainer.nnodes=8
