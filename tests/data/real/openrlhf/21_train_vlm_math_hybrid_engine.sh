#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_vlm_math_hybrid_engine.sh; the form is one that public scripts have.
#SBATCH --job-name=train
#SBATCH --exclusive
export NUM_NODES=1
export NUM_GPUS_PER_NODE=4
export NUM_NODES_ACT=1
export NUM_GPUS_PER_NODE_ACT=4
export NUM_ENGINES=4
export TENSOR_PARALLEL_SIZE=1
export GPU_MEMORY_UTILIZATION=0.7
export INIT_COEF_KL=0
export ESTIMATOR_ADV=reinforce_baseline
export MODEL_NAME_OR_PATH=Qwen/Qwen3.5-2B
export REMOTE_URL=/checkouts/openrlhf/examples/python/math_reward_func.py
export MICRO_BATCH_SIZE=1
export MICRO_BATCH_SIZE_ROL=1
export BATCH_SIZE=$((1024 * 1))
export BATCH_SIZE_ROL=128
export N_SAMPLES_PER_PROMPT=8
export MAX_LEN=$((1024 * 4))

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
head_ip=$(srun --nodes=1 -w "$head_node" hostname --ip-address)
srun --nodes=1 --ntasks=1 -w "$head_node" ray start --head --node-ip-address="$head_ip" --block &
sleep 10
srun --overlap --nodes=1 --ntasks=1 -w "$head_node" bash -c "python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes $NUM_NODES --ref.num_gpus_per_node $NUM_GPUS_PER_NODE --actor.num_nodes $NUM_NODES_ACT --actor.num_gpus_per_node $NUM_GPUS_PER_NODE_ACT --vllm.num_engines $NUM_ENGINES --vllm.tensor_parallel_size $TENSOR_PARALLEL_SIZE --train.colocate_all --vllm.gpu_memory_utilization $GPU_MEMORY_UTILIZATION --algo.kl.init_coef $INIT_COEF_KL --algo.advantage.estimator $ESTIMATOR_ADV --actor.model_name_or_path $MODEL_NAME_OR_PATH --reward.remote_url $REMOTE_URL --train.micro_batch_size $MICRO_BATCH_SIZE --rollout.micro_batch_size $MICRO_BATCH_SIZE_ROL --train.batch_size $BATCH_SIZE --rollout.batch_size $BATCH_SIZE_ROL --rollout.n_samples_per_prompt $N_SAMPLES_PER_PROMPT --data.max_len $MAX_LEN --vllm.enable_sleep"
