#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-nemotron3-super-120BA12B-16n4g-megatron-qa-bf16-300step.sh; the form is one that public scripts have.
EXP_NAME=$(basename $0 .sh)
rm -rf logs/$EXP_NAME
mkdir -p logs/$EXP_NAME
set -eou pipefail
run() {
    uv run coverage run -a --data-file=.coverage --source=nemo_rl \
        examples/run_grpo.py "$@"
}
run --config=configs/15_grpo_nemotron3_super_120ba12b_16n4g_megatron.yaml \
    ++grpo.num_prompts_per_step=16 \
    cluster.num_nodes=$((16 + 0)) \
    logger.wandb_enabled=false 2>&1 | tee logs/$EXP_NAME/run.log
