#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_prorlv2_math_hybrid_engine.sh; the form is one that public scripts have.
set -xeuo pipefail

num_nodes=${NUM_NODES:-1}
num_gpus_per_node=${NUM_GPUS_PER_NODE:-8}
num_nodes_act=${NUM_NODES_ACT:-1}
num_gpus_per_node_act=${NUM_GPUS_PER_NODE_ACT:-8}
num_engines=${NUM_ENGINES:-8}
tensor_parallel_size=${TENSOR_PARALLEL_SIZE:-1}
gpu_memory_utilization=${GPU_MEMORY_UTILIZATION:-0.75}
init_coef_kl=${INIT_COEF_KL:-1e-4}
estimator_adv=${ESTIMATOR_ADV:-reinforce_baseline}
model_name_or_path=${MODEL_NAME_OR_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
remote_url=${REMOTE_URL:-/checkouts/openrlhf/examples/python/math_reward_func.py}
batch_size=${BATCH_SIZE:-$((1024 * 1))}
batch_size_rol=${BATCH_SIZE_ROL:-512}
n_samples_per_prompt=${N_SAMPLES_PER_PROMPT:-16}
max_len=${MAX_LEN:-$((1024 * 9))}

python3 -m openrlhf.cli.train_ppo_ray \
    --ref.num_nodes ${num_nodes} \
    --ref.num_gpus_per_node ${num_gpus_per_node} \
    --actor.num_nodes ${num_nodes_act} \
    --actor.num_gpus_per_node ${num_gpus_per_node_act} \
    --vllm.num_engines ${num_engines} \
    --vllm.tensor_parallel_size ${tensor_parallel_size} \
    --train.colocate_all \
    --vllm.gpu_memory_utilization ${gpu_memory_utilization} \
    --algo.kl.init_coef ${init_coef_kl} \
    --algo.advantage.estimator ${estimator_adv} \
    --actor.model_name_or_path ${model_name_or_path} \
    --reward.remote_url ${remote_url} \
    --train.batch_size ${batch_size} \
    --rollout.batch_size ${batch_size_rol} \
    --rollout.n_samples_per_prompt ${n_samples_per_prompt} \
    --data.max_len ${max_len} \
    --vllm.enable_sleep \
    "$@"
