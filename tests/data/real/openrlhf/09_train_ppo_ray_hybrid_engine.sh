#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_ppo_ray_hybrid_engine.sh; the form is one that public scripts have.
set -x

python3 -m openrlhf.cli.train_ppo_ray \
    --ref.num_nodes 1 \
    --ref.num_gpus_per_node 8 \
    --reward.num_nodes 1 \
    --reward.num_gpus_per_node 8 \
    --critic.num_nodes 1 \
    --critic.num_gpus_per_node 8 \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 8 \
    --vllm.num_engines 4 \
    --vllm.tensor_parallel_size 2 \
    --train.colocate_all \
    --vllm.gpu_memory_utilization 0.5 \
    --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
    --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k \
    --train.batch_size 128 \
    --rollout.batch_size 1024 \
    --rollout.n_samples_per_prompt 1 \
    --data.max_len 2048 \
    --algo.kl.init_coef 0.01 \
    --vllm.enable_sleep \
    $@
