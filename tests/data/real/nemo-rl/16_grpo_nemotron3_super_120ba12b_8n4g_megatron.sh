#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-nemotron3-super-120BA12B-8n4g-megatron.sh; the form is one that public scripts have.
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
NODES=$SLURM_NNODES
ARGS=(--config configs/16_grpo_nemotron3_super_120ba12b_8n4g_megatron.yaml)
ARGS+=("cluster.num_nodes=$NODES" "grpo.num_prompts_per_step=16")
srun --no-container-mount-home --container-image="$CONTAINER" -N1 -n1 bash -c "cd $PWD && python examples/run_grpo.py ${ARGS[*]}"
