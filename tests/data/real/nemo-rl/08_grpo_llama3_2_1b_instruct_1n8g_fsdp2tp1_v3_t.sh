#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-llama3.2-1b-instruct-1n8g-fsdp2tp1.v3-tq_simple.sh; the form is one that public scripts have.
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
NODES=$SLURM_NNODES
ARGS=(--config configs/08_grpo_llama3_2_1b_instruct_1n8g_fsdp2tp1_v3_t.yaml)
ARGS+=("cluster.num_nodes=$NODES" "grpo.num_prompts_per_step=32")
srun --no-container-mount-home --container-image="$CONTAINER" -N1 -n1 bash -c "cd $PWD && python examples/run_grpo.py ${ARGS[*]}"
