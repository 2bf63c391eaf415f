#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_dapo_ray_hybrid_engine.sh; the form is one that public scripts have.
set -e
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename "$0" .sh)_$(date +%m%d)
cd "$HERE"
NUM_NODES=1
NUM_GPUS_PER_NODE=8
NUM_NODES_ACT=1
NUM_GPUS_PER_NODE_ACT=8
NUM_ENGINES=4
TENSOR_PARALLEL_SIZE=2
GPU_MEMORY_UTILIZATION=0.6
INIT_COEF_KL=1e-3
ESTIMATOR_ADV=group_norm
MODEL_NAME_OR_PATH=OpenRLHF/Llama-3-8b-sft-mixture
REMOTE_URL=/openrlhf/examples/python/reward_func.py
MICRO_BATCH_SIZE=8
BATCH_SIZE=128
MICRO_BATCH_SIZE_ROL=16
BATCH_SIZE_ROL=128
N_SAMPLES_PER_PROMPT=8
MAX_LEN=$((1024 * 2))
ARGS=""
ARGS+=" --ref.num_nodes ${NUM_NODES}"
ARGS+=" --ref.num_gpus_per_node ${NUM_GPUS_PER_NODE}"
ARGS+=" --actor.num_nodes ${NUM_NODES_ACT}"
ARGS+=" --actor.num_gpus_per_node ${NUM_GPUS_PER_NODE_ACT}"
ARGS+=" --vllm.num_engines ${NUM_ENGINES}"
ARGS+=" --vllm.tensor_parallel_size ${TENSOR_PARALLEL_SIZE}"
ARGS+=" --train.colocate_all"
ARGS+=" --vllm.gpu_memory_utilization ${GPU_MEMORY_UTILIZATION}"
ARGS+=" --algo.kl.init_coef ${INIT_COEF_KL}"
ARGS+=" --algo.advantage.estimator ${ESTIMATOR_ADV}"
ARGS+=" --actor.model_name_or_path ${MODEL_NAME_OR_PATH}"
ARGS+=" --reward.remote_url ${REMOTE_URL}"
ARGS+=" --train.micro_batch_size ${MICRO_BATCH_SIZE}"
ARGS+=" --train.batch_size ${BATCH_SIZE}"
ARGS+=" --rollout.micro_batch_size ${MICRO_BATCH_SIZE_ROL}"
ARGS+=" --rollout.batch_size ${BATCH_SIZE_ROL}"
ARGS+=" --rollout.n_samples_per_prompt ${N_SAMPLES_PER_PROMPT}"
ARGS+=" --data.max_len ${MAX_LEN}"
ARGS+=" --vllm.enable_sleep"
for retry in $(seq 3); do
    if ray status; then break; fi
    sleep 1
done
eval python3 -m openrlhf.cli.train_ppo_ray $ARGS
