#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-glm5.1-64n8g-megatron.sh; the form is one that public scripts have.
#SBATCH --nodes=64
#SBATCH --gpus-per-node=8
NODES=$SLURM_NNODES
ARGS=(--config configs/04_grpo_glm5_1_64n8g_megatron.yaml)
ARGS+=("cluster.num_nodes=$NODES" "grpo.num_prompts_per_step=8")
srun --no-container-mount-home --container-image="$CONTAINER" -N1 -n1 bash -c "cd $PWD && python examples/run_grpo.py ${ARGS[*]}"
