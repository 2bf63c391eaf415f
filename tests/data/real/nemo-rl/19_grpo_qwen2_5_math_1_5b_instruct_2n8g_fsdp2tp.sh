#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-qwen2.5-math-1.5b-instruct-2n8g-fsdp2tp1-sglang.sh; the form is one that public scripts have.
EXP_NAME=$(basename $0 .sh)
rm -rf logs/$EXP_NAME
mkdir -p logs/$EXP_NAME
set -eou pipefail
run() {
    uv run coverage run -a --data-file=.coverage --source=nemo_rl \
        examples/run_grpo.py "$@"
}
run --config=configs/19_grpo_qwen2_5_math_1_5b_instruct_2n8g_fsdp2tp.yaml \
    ++grpo.num_prompts_per_step=32 \
    cluster.num_nodes=$((2 + 0)) \
    logger.wandb_enabled=false 2>&1 | tee logs/$EXP_NAME/run.log
