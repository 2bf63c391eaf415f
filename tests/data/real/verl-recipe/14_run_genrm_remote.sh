#!/usr/bin/env bash
# Values of verl-recipe/genrm_remote/run_genrm_remote.sh; the form is one that public scripts have.
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
        data.train_batch_size=1024 \
        data.max_prompt_length=1024 \
        data.max_response_length=2048 \
        actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
        actor_rollout_ref.actor.ppo_mini_batch_size=256 \
        actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
        actor_rollout_ref.rollout.n=8 \
        trainer.n_gpus_per_node=4 \
        trainer.nnodes=1
