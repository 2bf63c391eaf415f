#!/usr/bin/env bash
# Values of verl/examples/ascend_extras/grpo_trainer/run_qwen3_235b_256k_megatron.sh; the form is one that public scripts have.
cat > job.sh <<'EOF'
set -x
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer data.train_batch_size=4 data.max_prompt_length=1024 data.max_response_length=261120 actor_rollout_ref.model.path=/Qwen3-235B-A22B-Instruct-2507 actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=16 actor_rollout_ref.actor.megatron.context_parallel_size=8 actor_rollout_ref.actor.megatron.expert_model_parallel_size=16 actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.max_num_seqs=16 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.tensor_model_parallel_size=4 algorithm.adv_estimator=grpo trainer.nnodes=16 trainer.n_gpus_per_node=16
EOF
docker exec -w /workspace trainer bash -lc 'ray status'
nohup bash job.sh > train.log 2>&1 &
echo started $!
