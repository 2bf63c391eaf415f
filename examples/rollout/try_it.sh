#!/usr/bin/env bash
# Tiny engines behind one door on a machine without a GPU: they start with the load, are drained, scaled and examined.
# Run from the folder that has `examples`. Everything that it starts ends with it.
set -euo pipefail

TRIMTAB_ROLLOUT_DIR=$(mktemp -d)
export TRIMTAB_ROLLOUT_DIR
trimtab rollout serve examples/rollout/job.yaml &
served=$!
trap 'kill "$served" 2>/dev/null || true; wait "$served" || true; rm -rf "$TRIMTAB_ROLLOUT_DIR"' EXIT

active() { trimtab rollout status --format json | grep -c '"state": "active"' || true; }
wait_for() { # so many workers are active
    for _ in $(seq 100); do
        [ "$(active 2>/dev/null)" = "$1" ] && return
        kill -0 "$served" || exit 1
        sleep 0.5
    done
    echo "not $1 active in time" >&2
    exit 1
}

wait_for 1                       # min_workers
python examples/rollout/ask.py   # 200 requests at once, and one engine takes 8: others are started
trimtab rollout status
trimtab rollout scale 2 --for 10m --why "to show it"
wait_for 2
trimtab rollout drain tiny-1 --deadline 5s
trimtab rollout status tiny-1
trimtab rollout resume tiny-1
trimtab rollout scale --release
trimtab rollout doctor
