#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-gemma3-1b-it-1n8g-fsdp2tp1-tq_simple.sh; the form is one that public scripts have.
EXP_NAME=$(basename $0 .sh)
rm -rf logs/$EXP_NAME
mkdir -p logs/$EXP_NAME
set -eou pipefail
run() {
    uv run coverage run -a --data-file=.coverage --source=nemo_rl \
        examples/run_grpo.py "$@"
}
run --config=configs/03_grpo_gemma3_1b_it_1n8g_fsdp2tp1_tq_simple.yaml \
    ++grpo.num_prompts_per_step=32 \
    cluster.num_nodes=$((1 + 0)) \
    logger.wandb_enabled=false 2>&1 | tee logs/$EXP_NAME/run.log
