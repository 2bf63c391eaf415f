#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_ppo_with_reward_fn.sh; the form is one that public scripts have.
set -xeuo pipefail

num_nodes=${NUM_NODES:-1}
num_gpus_per_node=${NUM_GPUS_PER_NODE:-2}
num_nodes_cri=${NUM_NODES_CRI:-1}
num_gpus_per_node_cri=${NUM_GPUS_PER_NODE_CRI:-2}
num_nodes_act=${NUM_NODES_ACT:-1}
num_gpus_per_node_act=${NUM_GPUS_PER_NODE_ACT:-2}
num_engines=${NUM_ENGINES:-2}
tensor_parallel_size=${TENSOR_PARALLEL_SIZE:-2}
model_name_or_path=${MODEL_NAME_OR_PATH:-OpenRLHF/Llama-3-8b-sft-mixture}
remote_url=${REMOTE_URL:-/openrlhf/examples/python/reward_func.py}
micro_batch_size=${MICRO_BATCH_SIZE:-8}
batch_size=${BATCH_SIZE:-128}
micro_batch_size_rol=${MICRO_BATCH_SIZE_ROL:-16}
batch_size_rol=${BATCH_SIZE_ROL:-$((1024 * 1))}
max_len=${MAX_LEN:-$((1024 * 2))}
init_coef_kl=${INIT_COEF_KL:-0.01}

python3 -m openrlhf.cli.train_ppo_ray \
    --ref.num_nodes ${num_nodes} \
    --ref.num_gpus_per_node ${num_gpus_per_node} \
    --critic.num_nodes ${num_nodes_cri} \
    --critic.num_gpus_per_node ${num_gpus_per_node_cri} \
    --actor.num_nodes ${num_nodes_act} \
    --actor.num_gpus_per_node ${num_gpus_per_node_act} \
    --vllm.num_engines ${num_engines} \
    --vllm.tensor_parallel_size ${tensor_parallel_size} \
    --train.colocate_actor_ref \
    --actor.model_name_or_path ${model_name_or_path} \
    --reward.remote_url ${remote_url} \
    --train.micro_batch_size ${micro_batch_size} \
    --train.batch_size ${batch_size} \
    --rollout.micro_batch_size ${micro_batch_size_rol} \
    --rollout.batch_size ${batch_size_rol} \
    --data.max_len ${max_len} \
    --algo.kl.init_coef ${init_coef_kl} \
    "$@"
