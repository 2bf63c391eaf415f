#!/usr/bin/env bash
# Add one worker on the next free GPU to the cluster that runs here; returns when the worker runs. Safe to run at once.
#
#   ./add_ray_worker.sh [options of `trimtab node add`]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
trimtab=$(command -v trimtab || echo "$here/../../.venv/bin/trimtab")
exec "$trimtab" node add "$@"
