#!/usr/bin/env bash
# Values of verl-recipe/infigui-g1/run_7b.sh; the form is one that public scripts have.
cat > job.sh <<'EOF'
set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo data.train_batch_size=128 data.max_prompt_length=7168 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8 trainer.nnodes=1
EOF
docker exec -w /workspace trainer bash -lc 'ray status'
nohup bash job.sh > train.log 2>&1 &
echo started $!
