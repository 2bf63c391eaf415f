#!/usr/bin/env bash
# Start a local Ray cluster: a head on GPU 0 and workers on GPUs 1, 2, 3 ... Blocks until Ctrl-C, which ends all of it.
#
#   ./start_ray_cluster.sh [num_workers] [options of `trimtab cluster start`]
#
# Without GPUs: TRIMTAB_FAKE_GPUS=4 ./start_ray_cluster.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
trimtab=$(command -v trimtab || echo "$here/../../.venv/bin/trimtab")
exec "$trimtab" cluster start "$@"
