#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_prorlv2_math_hybrid_engine.sh; the form is one that public scripts have.
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
    --ref.num_nodes 1 \
    --ref.num_gpus_per_node 8 \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 8 \
    --vllm.num_engines 8 \
    --vllm.tensor_parallel_size 1 \
    --train.colocate_all \
    --vllm.gpu_memory_utilization 0.75 \
    --algo.kl.init_coef 1e-4 \
    --algo.advantage.estimator reinforce_baseline \
    --actor.model_name_or_path deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B \
    --reward.remote_url /checkouts/openrlhf/examples/python/math_reward_func.py \
    --train.batch_size 1024 \
    --rollout.batch_size 512 \
    --rollout.n_samples_per_prompt 16 \
    --data.max_len 9216 \
    --vllm.enable_sleep 2>&1 | tee run.log
