#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_ppo_with_reward_fn.sh; the form is one that public scripts have.
set -x

python3 -m openrlhf.cli.train_ppo_ray \
    --ref.num_nodes 1 \
    --ref.num_gpus_per_node 2 \
    --critic.num_nodes 1 \
    --critic.num_gpus_per_node 2 \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 2 \
    --vllm.num_engines 2 \
    --vllm.tensor_parallel_size 2 \
    --train.colocate_actor_ref \
    --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
    --reward.remote_url /openrlhf/examples/python/reward_func.py \
    --train.micro_batch_size 8 \
    --train.batch_size 128 \
    --rollout.micro_batch_size 16 \
    --rollout.batch_size 1024 \
    --data.max_len 2048 \
    --algo.kl.init_coef 0.01 \
    $@
