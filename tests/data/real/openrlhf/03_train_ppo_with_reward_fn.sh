#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_ppo_with_reward_fn.sh; the form is one that public scripts have.
set -euxo pipefail
NUM_NODES=1  # ref.num_nodes
NUM_GPUS_PER_NODE=2  # ref.num_gpus_per_node
NUM_NODES_CRI=1  # critic.num_nodes
NUM_GPUS_PER_NODE_CRI=2  # critic.num_gpus_per_node
NUM_NODES_ACT=1  # actor.num_nodes
NUM_GPUS_PER_NODE_ACT=2  # actor.num_gpus_per_node
NUM_ENGINES=2  # vllm.num_engines
TENSOR_PARALLEL_SIZE=2  # vllm.tensor_parallel_size
MODEL_NAME_OR_PATH=OpenRLHF/Llama-3-8b-sft-mixture  # actor.model_name_or_path
REMOTE_URL=/openrlhf/examples/python/reward_func.py  # reward.remote_url
MICRO_BATCH_SIZE=8  # train.micro_batch_size
BATCH_SIZE=128  # train.batch_size
MICRO_BATCH_SIZE_ROL=16  # rollout.micro_batch_size
BATCH_SIZE_ROL=$((1024 * 1))  # rollout.batch_size
MAX_LEN=$((1024 * 2))  # data.max_len
INIT_COEF_KL=0.01  # algo.kl.init_coef

COMMON=(
    --ref.num_nodes $NUM_NODES
    --ref.num_gpus_per_node $NUM_GPUS_PER_NODE
    --critic.num_nodes $NUM_NODES_CRI
    --critic.num_gpus_per_node $NUM_GPUS_PER_NODE_CRI
    --actor.num_nodes $NUM_NODES_ACT
    --actor.num_gpus_per_node $NUM_GPUS_PER_NODE_ACT
    --vllm.num_engines $NUM_ENGINES
    --vllm.tensor_parallel_size $TENSOR_PARALLEL_SIZE
)
TRAIN=(
    --train.colocate_actor_ref
    --actor.model_name_or_path "${MODEL_NAME_OR_PATH}"
    --reward.remote_url "${REMOTE_URL}"
    --train.micro_batch_size "${MICRO_BATCH_SIZE}"
    --train.batch_size "${BATCH_SIZE}"
    --rollout.micro_batch_size "${MICRO_BATCH_SIZE_ROL}"
    --rollout.batch_size "${BATCH_SIZE_ROL}"
    --data.max_len "${MAX_LEN}"
    --algo.kl.init_coef "${INIT_COEF_KL}"
)
EXTRA=()
if [ "${MACHINE:-}" = gb200 ]; then
    EXTRA+=(unused=1)
fi
python3 -m openrlhf.cli.train_ppo_ray "${COMMON[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
