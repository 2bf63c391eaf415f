#!/usr/bin/env bash
# Values of verl-recipe/dapo/run_dapo_qwen2.5_vl_7b_fsdp2_npu.sh; the form is one that public scripts have.
#SBATCH --job-name=train
#SBATCH --exclusive
export MAX_PROMPT_LENGTH=$((1024 * 1))
export MAX_RESPONSE_LENGTH=$((1024 * 2))
export TRAIN_BATCH_SIZE=128
export N_ROL=8
export ADV_ESTIMATOR=grpo
export USE_DYNAMIC_BSZ_ACT=True
export PATH_MOD=/data/verl/models/Qwen2.5-VL-7B-Instruct
export PPO_MINI_BATCH_SIZE_ACT=16
export ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT=1
export GPU_MEMORY_UTILIZATION_ROL=0.60
export TENSOR_MODEL_PARALLEL_SIZE_ROL=1
export NAME_ROL=vllm
export STRATEGY_ACT=fsdp2
export N_GPUS_PER_NODE=8
export NNODES=1

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
head_ip=$(srun --nodes=1 -w "$head_node" hostname --ip-address)
srun --nodes=1 --ntasks=1 -w "$head_node" ray start --head --node-ip-address="$head_ip" --block &
sleep 10
srun --overlap --nodes=1 --ntasks=1 -w "$head_node" bash -c "python3 -m verl.trainer.main_ppo data.max_prompt_length=$MAX_PROMPT_LENGTH data.max_response_length=$MAX_RESPONSE_LENGTH data.train_batch_size=$TRAIN_BATCH_SIZE actor_rollout_ref.rollout.n=$N_ROL algorithm.adv_estimator=$ADV_ESTIMATOR actor_rollout_ref.actor.use_dynamic_bsz=$USE_DYNAMIC_BSZ_ACT actor_rollout_ref.model.path=$PATH_MOD actor_rollout_ref.actor.ppo_mini_batch_size=$PPO_MINI_BATCH_SIZE_ACT actor_rollout_ref.actor.ulysses_sequence_parallel_size=$ULYSSES_SEQUENCE_PARALLEL_SIZE_ACT actor_rollout_ref.rollout.gpu_memory_utilization=$GPU_MEMORY_UTILIZATION_ROL actor_rollout_ref.rollout.tensor_model_parallel_size=$TENSOR_MODEL_PARALLEL_SIZE_ROL actor_rollout_ref.rollout.name=$NAME_ROL actor_rollout_ref.actor.strategy=$STRATEGY_ACT trainer.n_gpus_per_node=$N_GPUS_PER_NODE trainer.nnodes=$NNODES"
