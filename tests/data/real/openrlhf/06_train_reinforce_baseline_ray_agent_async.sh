#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_reinforce_baseline_ray_agent_async.sh; the form is one that public scripts have.
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
        --actor.model_name_or_path Qwen/Qwen3-4B-Thinking-2507 \
        --train.agent_func_path examples/python/agent_func.py \
        --data.max_len 74240 \
        --rollout.batch_size 128 \
        --rollout.n_samples_per_prompt 8 \
        --train.batch_size 1024 \
        --train.micro_batch_size 1 \
        --rollout.micro_batch_size 8 \
        --train.async_enable \
        --ref.num_nodes 1 \
        --ref.num_gpus_per_node 4 \
        --actor.num_nodes 1 \
        --actor.num_gpus_per_node 4 \
        --vllm.num_engines 2 \
        --vllm.tensor_parallel_size 2 \
        --vllm.gpu_memory_utilization 0.95 \
        --train.colocate_all \
        --ds.ring_attn_size 2 \
        --algo.advantage.estimator reinforce_baseline \
        --algo.kl.init_coef 1e-5
