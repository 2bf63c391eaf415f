#!/usr/bin/env bash
# Values of openrlhf/examples/scripts/train_reinforce_baseline_ray_agent_async.sh; the form is one that public scripts have.
#SBATCH --job-name=train
#SBATCH --exclusive
export MODEL_NAME_OR_PATH=Qwen/Qwen3-4B-Thinking-2507
export AGENT_FUNC_PATH=examples/python/agent_func.py
export MAX_LEN=74240
export BATCH_SIZE=128
export N_SAMPLES_PER_PROMPT=8
export BATCH_SIZE_TRA=$((1024 * 1))
export MICRO_BATCH_SIZE=1
export MICRO_BATCH_SIZE_ROL=8
export NUM_NODES=1
export NUM_GPUS_PER_NODE=4
export NUM_NODES_ACT=1
export NUM_GPUS_PER_NODE_ACT=4
export NUM_ENGINES=2
export TENSOR_PARALLEL_SIZE=2
export GPU_MEMORY_UTILIZATION=0.95
export RING_ATTN_SIZE=2
export ESTIMATOR_ADV=reinforce_baseline
export INIT_COEF_KL=1e-5

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
head_ip=$(srun --nodes=1 -w "$head_node" hostname --ip-address)
srun --nodes=1 --ntasks=1 -w "$head_node" ray start --head --node-ip-address="$head_ip" --block &
sleep 10
srun --overlap --nodes=1 --ntasks=1 -w "$head_node" bash -c "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path $MODEL_NAME_OR_PATH --train.agent_func_path $AGENT_FUNC_PATH --data.max_len $MAX_LEN --rollout.batch_size $BATCH_SIZE --rollout.n_samples_per_prompt $N_SAMPLES_PER_PROMPT --train.batch_size $BATCH_SIZE_TRA --train.micro_batch_size $MICRO_BATCH_SIZE --rollout.micro_batch_size $MICRO_BATCH_SIZE_ROL --train.async_enable --ref.num_nodes $NUM_NODES --ref.num_gpus_per_node $NUM_GPUS_PER_NODE --actor.num_nodes $NUM_NODES_ACT --actor.num_gpus_per_node $NUM_GPUS_PER_NODE_ACT --vllm.num_engines $NUM_ENGINES --vllm.tensor_parallel_size $TENSOR_PARALLEL_SIZE --vllm.gpu_memory_utilization $GPU_MEMORY_UTILIZATION --train.colocate_all --ds.ring_attn_size $RING_ATTN_SIZE --algo.advantage.estimator $ESTIMATOR_ADV --algo.kl.init_coef $INIT_COEF_KL"
