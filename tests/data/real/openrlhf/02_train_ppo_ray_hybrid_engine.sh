#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_ppo_ray_hybrid_engine.sh; the form is one that public scripts have.
set -xeuo pipefail

num_nodes=${NUM_NODES:-1}
num_gpus_per_node=${NUM_GPUS_PER_NODE:-8}
num_nodes_rew=${NUM_NODES_REW:-1}
num_gpus_per_node_rew=${NUM_GPUS_PER_NODE_REW:-8}
num_nodes_cri=${NUM_NODES_CRI:-1}
num_gpus_per_node_cri=${NUM_GPUS_PER_NODE_CRI:-8}
num_nodes_act=${NUM_NODES_ACT:-1}
num_gpus_per_node_act=${NUM_GPUS_PER_NODE_ACT:-8}
num_engines=${NUM_ENGINES:-4}
tensor_parallel_size=${TENSOR_PARALLEL_SIZE:-2}
gpu_memory_utilization=${GPU_MEMORY_UTILIZATION:-0.5}
model_name_or_path=${MODEL_NAME_OR_PATH:-OpenRLHF/Llama-3-8b-sft-mixture}
model_name_or_path_rew=${MODEL_NAME_OR_PATH_REW:-OpenRLHF/Llama-3-8b-rm-700k}
batch_size=${BATCH_SIZE:-128}
batch_size_rol=${BATCH_SIZE_ROL:-$((1024 * 1))}
n_samples_per_prompt=${N_SAMPLES_PER_PROMPT:-1}
max_len=${MAX_LEN:-$((1024 * 2))}
init_coef_kl=${INIT_COEF_KL:-0.01}

python3 -m openrlhf.cli.train_ppo_ray \
    --ref.num_nodes ${num_nodes} \
    --ref.num_gpus_per_node ${num_gpus_per_node} \
    --reward.num_nodes ${num_nodes_rew} \
    --reward.num_gpus_per_node ${num_gpus_per_node_rew} \
    --critic.num_nodes ${num_nodes_cri} \
    --critic.num_gpus_per_node ${num_gpus_per_node_cri} \
    --actor.num_nodes ${num_nodes_act} \
    --actor.num_gpus_per_node ${num_gpus_per_node_act} \
    --vllm.num_engines ${num_engines} \
    --vllm.tensor_parallel_size ${tensor_parallel_size} \
    --train.colocate_all \
    --vllm.gpu_memory_utilization ${gpu_memory_utilization} \
    --actor.model_name_or_path ${model_name_or_path} \
    --reward.model_name_or_path ${model_name_or_path_rew} \
    --train.batch_size ${batch_size} \
    --rollout.batch_size ${batch_size_rol} \
    --rollout.n_samples_per_prompt ${n_samples_per_prompt} \
    --data.max_len ${max_len} \
    --algo.kl.init_coef ${init_coef_kl} \
    --vllm.enable_sleep \
    "$@"
