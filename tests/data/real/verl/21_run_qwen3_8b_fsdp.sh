#!/usr/bin/env bash
# Values of verl/examples/grpo_trainer/run_qwen3_8b_fsdp.sh; the form is one that public scripts have.
#SBATCH --job-name=train
#SBATCH --exclusive
export ADV_ESTIMATOR=grpo
export TRAIN_BATCH_SIZE=$((1024 * 1))
export MAX_PROMPT_LENGTH=$((1024 * 1))
export MAX_RESPONSE_LENGTH=$((1024 * 2))
export PATH_MOD=Qwen/Qwen3-8B
export PPO_MINI_BATCH_SIZE_ACT=256
export USE_DYNAMIC_BSZ_ACT=True
export NAME_ROL=vllm
export TENSOR_MODEL_PARALLEL_SIZE_ROL=2
export GPU_MEMORY_UTILIZATION_ROL=0.6
export N_ROL=5
export N_GPUS_PER_NODE=8
export NNODES=1

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
head_ip=$(srun --nodes=1 -w "$head_node" hostname --ip-address)
srun --nodes=1 --ntasks=1 -w "$head_node" ray start --head --node-ip-address="$head_ip" --block &
sleep 10
srun --overlap --nodes=1 --ntasks=1 -w "$head_node" bash -c "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ADV_ESTIMATOR data.train_batch_size=$TRAIN_BATCH_SIZE data.max_prompt_length=$MAX_PROMPT_LENGTH data.max_response_length=$MAX_RESPONSE_LENGTH actor_rollout_ref.model.path=$PATH_MOD actor_rollout_ref.actor.ppo_mini_batch_size=$PPO_MINI_BATCH_SIZE_ACT actor_rollout_ref.actor.use_dynamic_bsz=$USE_DYNAMIC_BSZ_ACT actor_rollout_ref.rollout.name=$NAME_ROL actor_rollout_ref.rollout.tensor_model_parallel_size=$TENSOR_MODEL_PARALLEL_SIZE_ROL actor_rollout_ref.rollout.gpu_memory_utilization=$GPU_MEMORY_UTILIZATION_ROL actor_rollout_ref.rollout.n=$N_ROL trainer.n_gpus_per_node=$N_GPUS_PER_NODE trainer.nnodes=$NNODES"
