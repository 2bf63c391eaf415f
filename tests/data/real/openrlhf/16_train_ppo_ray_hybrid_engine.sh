#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_ppo_ray_hybrid_engine.sh; the form is one that public scripts have.
set -e
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename "$0" .sh)_$(date +%m%d)
cd "$HERE"
NUM_NODES=1
NUM_GPUS_PER_NODE=8
NUM_NODES_REW=1
NUM_GPUS_PER_NODE_REW=8
NUM_NODES_CRI=1
NUM_GPUS_PER_NODE_CRI=8
NUM_NODES_ACT=1
NUM_GPUS_PER_NODE_ACT=8
NUM_ENGINES=4
TENSOR_PARALLEL_SIZE=2
GPU_MEMORY_UTILIZATION=0.5
MODEL_NAME_OR_PATH=OpenRLHF/Llama-3-8b-sft-mixture
MODEL_NAME_OR_PATH_REW=OpenRLHF/Llama-3-8b-rm-700k
BATCH_SIZE=128
BATCH_SIZE_ROL=$((1024 * 1))
N_SAMPLES_PER_PROMPT=1
MAX_LEN=$((1024 * 2))
INIT_COEF_KL=0.01
ARGS=""
ARGS+=" --ref.num_nodes ${NUM_NODES}"
ARGS+=" --ref.num_gpus_per_node ${NUM_GPUS_PER_NODE}"
ARGS+=" --reward.num_nodes ${NUM_NODES_REW}"
ARGS+=" --reward.num_gpus_per_node ${NUM_GPUS_PER_NODE_REW}"
ARGS+=" --critic.num_nodes ${NUM_NODES_CRI}"
ARGS+=" --critic.num_gpus_per_node ${NUM_GPUS_PER_NODE_CRI}"
ARGS+=" --actor.num_nodes ${NUM_NODES_ACT}"
ARGS+=" --actor.num_gpus_per_node ${NUM_GPUS_PER_NODE_ACT}"
ARGS+=" --vllm.num_engines ${NUM_ENGINES}"
ARGS+=" --vllm.tensor_parallel_size ${TENSOR_PARALLEL_SIZE}"
ARGS+=" --train.colocate_all"
ARGS+=" --vllm.gpu_memory_utilization ${GPU_MEMORY_UTILIZATION}"
ARGS+=" --actor.model_name_or_path ${MODEL_NAME_OR_PATH}"
ARGS+=" --reward.model_name_or_path ${MODEL_NAME_OR_PATH_REW}"
ARGS+=" --train.batch_size ${BATCH_SIZE}"
ARGS+=" --rollout.batch_size ${BATCH_SIZE_ROL}"
ARGS+=" --rollout.n_samples_per_prompt ${N_SAMPLES_PER_PROMPT}"
ARGS+=" --data.max_len ${MAX_LEN}"
ARGS+=" --algo.kl.init_coef ${INIT_COEF_KL}"
ARGS+=" --vllm.enable_sleep"
for retry in $(seq 3); do
    if ray status; then break; fi
    sleep 1
done
eval python3 -m openrlhf.cli.train_ppo_ray $ARGS
