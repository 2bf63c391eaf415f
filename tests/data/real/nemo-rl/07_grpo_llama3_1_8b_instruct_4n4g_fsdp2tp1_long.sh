#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-llama3.1-8b-instruct-4n4g-fsdp2tp1-long.v3.sh; the form is one that public scripts have.
EXP_NAME=$(basename $0 .sh)
rm -rf logs/$EXP_NAME
mkdir -p logs/$EXP_NAME
set -eou pipefail
run() {
    uv run coverage run -a --data-file=.coverage --source=nemo_rl \
        examples/run_grpo.py "$@"
}
run --config=configs/07_grpo_llama3_1_8b_instruct_4n4g_fsdp2tp1_long.yaml \
    ++grpo.num_prompts_per_step=64 \
    cluster.num_nodes=$((4 + 0)) \
    logger.wandb_enabled=false 2>&1 | tee logs/$EXP_NAME/run.log
