#!/usr/bin/env bash
# Values of verl-recipe/dapo/run_dapo_qwen3_vl_30b_fsdp2_npu.sh; the form is one that public scripts have.
cat > job.sh <<'EOF'
set -x
python3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=2048 data.train_batch_size=64 actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.model.path=/data/verl/models/Qwen3-VL-30B-A3B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.70 actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.strategy=fsdp2 trainer.n_gpus_per_node=16 trainer.nnodes=1
EOF
docker exec -w /workspace trainer bash -lc 'ray status'
nohup bash job.sh > train.log 2>&1 &
echo started $!
