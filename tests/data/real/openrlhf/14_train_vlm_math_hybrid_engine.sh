#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_vlm_math_hybrid_engine.sh; the form is one that public scripts have.
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
        LAUNCH=(uv run --frozen --extra "$BACKEND" python3 -m openrlhf.cli.train_ppo_ray)
        ;;
    *)
        echo "DEVICE must be gpu" >&2
        exit 1
        ;;
esac
launch "$BACKEND" "${LAUNCH[@]}" \
        --ref.num_nodes 1 \
        --ref.num_gpus_per_node 4 \
        --actor.num_nodes 1 \
        --actor.num_gpus_per_node 4 \
        --vllm.num_engines 4 \
        --vllm.tensor_parallel_size 1 \
        --train.colocate_all \
        --vllm.gpu_memory_utilization 0.7 \
        --algo.kl.init_coef 0 \
        --algo.advantage.estimator reinforce_baseline \
        --actor.model_name_or_path Qwen/Qwen3.5-2B \
        --reward.remote_url /checkouts/openrlhf/examples/python/math_reward_func.py \
        --train.micro_batch_size 1 \
        --rollout.micro_batch_size 1 \
        --train.batch_size 1024 \
        --rollout.batch_size 128 \
        --rollout.n_samples_per_prompt 8 \
        --data.max_len 4096 \
        --vllm.enable_sleep
