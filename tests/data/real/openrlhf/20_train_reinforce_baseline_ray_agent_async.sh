#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_reinforce_baseline_ray_agent_async.sh; the form is one that public scripts have.
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
    -- python3 -m openrlhf.cli.train_ppo_ray \
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
    --algo.kl.init_coef 1e-5 2>&1 | tee run.log
