#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-moonlight-16ba3b-4n8g-megatron-fp8-e2e.sh; the form is one that public scripts have.
EXP_NAME=$(basename $0 .sh)
rm -rf logs/$EXP_NAME
mkdir -p logs/$EXP_NAME
set -eou pipefail
run() {
    uv run coverage run -a --data-file=.coverage --source=nemo_rl \
        examples/run_grpo.py "$@"
}
run --config=configs/11_grpo_moonlight_16ba3b_4n8g_megatron_fp8_e2e.yaml \
    ++grpo.num_prompts_per_step=32 \
    cluster.num_nodes=$((4 + 0)) \
    logger.wandb_enabled=false 2>&1 | tee logs/$EXP_NAME/run.log
