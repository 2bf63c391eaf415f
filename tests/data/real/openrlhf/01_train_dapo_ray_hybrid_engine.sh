#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_dapo_ray_hybrid_engine.sh; the form is one that public scripts have.
set -x

python3 -m openrlhf.cli.train_ppo_ray \
    --ref.num_nodes 1 \
    --ref.num_gpus_per_node 8 \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 8 \
    --vllm.num_engines 4 \
    --vllm.tensor_parallel_size 2 \
    --train.colocate_all \
    --vllm.gpu_memory_utilization 0.6 \
    --algo.kl.init_coef 1e-3 \
    --algo.advantage.estimator group_norm \
    --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
    --reward.remote_url /openrlhf/examples/python/reward_func.py \
    --train.micro_batch_size 8 \
    --train.batch_size 128 \
    --rollout.micro_batch_size 16 \
    --rollout.batch_size 128 \
    --rollout.n_samples_per_prompt 8 \
    --data.max_len 2048 \
    --vllm.enable_sleep \
    $@
