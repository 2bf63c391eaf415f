#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_reinforce_baseline_hybrid_engine.sh; the form is one that public scripts have.
set -euxo pipefail
MODEL_NAME_OR_PATH=Qwen/Qwen3-4B-Thinking-2507  # actor.model_name_or_path
AGENT_FUNC_PATH=examples/python/agent_func.py  # train.agent_func_path
MAX_LEN=74240  # data.max_len
BATCH_SIZE=128  # rollout.batch_size
N_SAMPLES_PER_PROMPT=8  # rollout.n_samples_per_prompt
BATCH_SIZE_TRA=$((1024 * 1))  # train.batch_size
MICRO_BATCH_SIZE=1  # train.micro_batch_size
MICRO_BATCH_SIZE_ROL=8  # rollout.micro_batch_size
NUM_NODES=1  # ref.num_nodes
NUM_GPUS_PER_NODE=4  # ref.num_gpus_per_node
NUM_NODES_ACT=1  # actor.num_nodes
NUM_GPUS_PER_NODE_ACT=4  # actor.num_gpus_per_node
NUM_ENGINES=2  # vllm.num_engines
TENSOR_PARALLEL_SIZE=2  # vllm.tensor_parallel_size
GPU_MEMORY_UTILIZATION=0.7  # vllm.gpu_memory_utilization
RING_ATTN_SIZE=2  # ds.ring_attn_size
ESTIMATOR_ADV=reinforce_baseline  # algo.advantage.estimator
INIT_COEF_KL=1e-5  # algo.kl.init_coef

COMMON=(
    --actor.model_name_or_path $MODEL_NAME_OR_PATH
    --train.agent_func_path $AGENT_FUNC_PATH
    --data.max_len $MAX_LEN
    --rollout.batch_size $BATCH_SIZE
    --rollout.n_samples_per_prompt $N_SAMPLES_PER_PROMPT
    --train.batch_size $BATCH_SIZE_TRA
    --train.micro_batch_size $MICRO_BATCH_SIZE
    --rollout.micro_batch_size $MICRO_BATCH_SIZE_ROL
    --ref.num_nodes $NUM_NODES
)
TRAIN=(
    --ref.num_gpus_per_node "${NUM_GPUS_PER_NODE}"
    --actor.num_nodes "${NUM_NODES_ACT}"
    --actor.num_gpus_per_node "${NUM_GPUS_PER_NODE_ACT}"
    --vllm.num_engines "${NUM_ENGINES}"
    --vllm.tensor_parallel_size "${TENSOR_PARALLEL_SIZE}"
    --vllm.gpu_memory_utilization "${GPU_MEMORY_UTILIZATION}"
    --train.colocate_all
    --ds.ring_attn_size "${RING_ATTN_SIZE}"
    --algo.advantage.estimator "${ESTIMATOR_ADV}"
    --algo.kl.init_coef "${INIT_COEF_KL}"
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m openrlhf.cli.train_ppo_ray "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
