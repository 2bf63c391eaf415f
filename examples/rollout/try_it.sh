#!/usr/bin/env bash
# Tiny engines behind one door on a machine without a GPU: they start with the load, are drained, scaled and examined.
# Run from the folder that has `examples`. Everything that it starts ends with it.
set -euo pipefail

TRIMTAB_ROLLOUT_DIR=$(mktemp -d)
export TRIMTAB_ROLLOUT_DIR
trimtab engine serve examples/rollout/job.yaml &
served=$!
trap 'kill "$served" 2>/dev/null || true; wait "$served" || true; rm -rf "$TRIMTAB_ROLLOUT_DIR"' EXIT

active() { trimtab engine list --format json | grep -c '"state": "active"' || true; }
wait_for() { # at least so many workers are active
    for _ in $(seq 500); do
        [ "$(active 2>/dev/null)" -ge "$1" ] && return
        kill -0 "$served" || exit 1
        sleep 0.5
    done
    echo "not $1 active in time" >&2
    exit 1
}

wait_for 1                       # min_workers
python examples/rollout/ask.py   # 200 requests at once, and one engine takes 8: others are started
trimtab engine list
trimtab engine scale 2 --for 10m --reason "to show it"
wait_for 2
trimtab engine drain tiny-1 --deadline 5s
trimtab engine show tiny-1
trimtab engine undrain tiny-1
trimtab engine scale --auto
trimtab engine doctor
