#!/bin/sh
# Finds the best placement for a config in ./config: ./run_placement_autotune.sh [config_name] [plan options, overrides]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
config=${1:-qwen2.5-1.5b-grpo-megatron}
[ $# -gt 0 ] && shift
if [ -x "$here/../../.venv/bin/trimtab" ]; then
    trimtab="$here/../../.venv/bin/trimtab"
elif command -v trimtab >/dev/null; then
    trimtab=trimtab
else
    echo "trimtab is not installed: run \`make setup\` at the top of the repository, or \`pip install trimtab\`" >&2
    exit 2
fi
exec "$trimtab" plan "$here/config/${config%.yaml}.yaml" "$@"
