#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-qwen3-1.7b-2n4g-fsdp2-trtllm.sh; the form is one that public scripts have.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
NODES=$SLURM_NNODES
ARGS=(--config configs/20_grpo_qwen3_1_7b_2n4g_fsdp2_trtllm.yaml)
ARGS+=("cluster.num_nodes=$NODES" "grpo.num_prompts_per_step=4")
srun --no-container-mount-home --container-image="$CONTAINER" -N1 -n1 bash -c "cd $PWD && python examples/run_grpo.py ${ARGS[*]}"
