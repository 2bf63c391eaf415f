#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-nano-v2-12b-2n4g-fsdp2tp1.sh; the form is one that public scripts have.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
NODES=$SLURM_NNODES
ARGS=(--config configs/12_grpo_nano_v2_12b_2n4g_fsdp2tp1.yaml)
ARGS+=("cluster.num_nodes=$NODES" "grpo.num_prompts_per_step=32")
srun --no-container-mount-home --container-image="$CONTAINER" -N1 -n1 bash -c "cd $PWD && python examples/run_grpo.py ${ARGS[*]}"
