#!/bin/bash
# Values of nemo-rl/tests/test_suites/llm/grpo-llama3.1-8b-instruct-1n8g-megatron-fp8-rollouts.v3-tq_simple.sh; the form is one that public scripts have.
SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd)
source $SCRIPT_DIR/common.env
NUM_NODES=1
MAX_STEPS=20
NUM_RUNS=$(((MAX_STEPS + 19) / 20))
exit_if_done
cd $PROJECT_ROOT
uv run examples/run_grpo.py \
    --config $CONFIG_PATH \
    grpo.max_num_steps=$MAX_STEPS \
    grpo.num_prompts_per_step=32 \
    cluster.num_nodes=$NUM_NODES \
    $@ \
    2>&1 | tee run.log
if [[ $(jq .steps metrics.json) -ge $MAX_STEPS ]]; then
    uv run tests/check_metrics.py metrics.json
fi
