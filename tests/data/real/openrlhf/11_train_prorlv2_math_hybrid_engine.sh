#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_prorlv2_math_hybrid_engine.sh; the form is one that public scripts have.
set -euxo pipefail
NUM_NODES=1  # ref.num_nodes
NUM_GPUS_PER_NODE=8  # ref.num_gpus_per_node
NUM_NODES_ACT=1  # actor.num_nodes
NUM_GPUS_PER_NODE_ACT=8  # actor.num_gpus_per_node
NUM_ENGINES=8  # vllm.num_engines
TENSOR_PARALLEL_SIZE=1  # vllm.tensor_parallel_size
GPU_MEMORY_UTILIZATION=0.75  # vllm.gpu_memory_utilization
INIT_COEF_KL=1e-4  # algo.kl.init_coef
ESTIMATOR_ADV=reinforce_baseline  # algo.advantage.estimator
MODEL_NAME_OR_PATH=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B  # actor.model_name_or_path
REMOTE_URL=/checkouts/openrlhf/examples/python/math_reward_func.py  # reward.remote_url
BATCH_SIZE=$((1024 * 1))  # train.batch_size
BATCH_SIZE_ROL=512  # rollout.batch_size
N_SAMPLES_PER_PROMPT=16  # rollout.n_samples_per_prompt
MAX_LEN=$((1024 * 9))  # data.max_len

COMMON=(
    --ref.num_nodes $NUM_NODES
    --ref.num_gpus_per_node $NUM_GPUS_PER_NODE
    --actor.num_nodes $NUM_NODES_ACT
    --actor.num_gpus_per_node $NUM_GPUS_PER_NODE_ACT
    --vllm.num_engines $NUM_ENGINES
    --vllm.tensor_parallel_size $TENSOR_PARALLEL_SIZE
    --train.colocate_all
    --vllm.gpu_memory_utilization $GPU_MEMORY_UTILIZATION
)
TRAIN=(
    --algo.kl.init_coef "${INIT_COEF_KL}"
    --algo.advantage.estimator "${ESTIMATOR_ADV}"
    --actor.model_name_or_path "${MODEL_NAME_OR_PATH}"
    --reward.remote_url "${REMOTE_URL}"
    --train.batch_size "${BATCH_SIZE}"
    --rollout.batch_size "${BATCH_SIZE_ROL}"
    --rollout.n_samples_per_prompt "${N_SAMPLES_PER_PROMPT}"
    --data.max_len "${MAX_LEN}"
    --vllm.enable_sleep
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m openrlhf.cli.train_ppo_ray "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
