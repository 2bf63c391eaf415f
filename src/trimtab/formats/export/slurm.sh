# Ray's head requires a token if there is one; all other processes need the same mode.
token_file="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
if [[ -z "${RAY_AUTH_MODE:-}" ]] && [[ -n "${RAY_AUTH_TOKEN:-}" || -s "$token_file" ]]; then
    export RAY_AUTH_MODE=token
fi
# This script drains nodes itself; Ray's own drain would only take time.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

steps=()
run=""
ends_at=0 # in seconds of this script; 0: not known

# shellcheck disable=SC2329 # called by a trap
stop() { # stops everything that this script started
    trap - EXIT
    trap '' USR1 TERM INT
    if [[ -n "$run" ]]; then kill -TERM "$run" 2>/dev/null || true; fi
    if ((${#steps[@]})); then kill -TERM "${steps[@]}" 2>/dev/null || true; fi
    wait || true
}

# shellcheck disable=SC2329 # called by a trap
drain() { # the time limit is near: tasks on the workers checkpoint
    trap '' USR1
    ends_at=$((SECONDS + drain_s))
    echo "the time limit is near: draining the workers within $drain_s s" >&2
    local host drains=()
    for host in "${hosts[@]:1}"; do
        timeout "$drain_s" trimtab node drain "$host" --address "$RAY_ADDRESS" --deadline "$drain_s" >&2 &
        drains+=("$!")
    done
    if ((${#drains[@]})); then wait "${drains[@]}" || true; fi
}

trap stop EXIT
trap 'exit 143' TERM
trap 'exit 138' USR1 # until there is something to drain
trap 'exit 130' INT

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${hosts[0]}"
head_ip="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address |
    awk '{ for (i = 1; i <= NF; i++) if (ip == "" && $i !~ /^127[.]|:/) ip = $i } END { print ip }')"
head_ip="${head_ip:-$head}"
export RAY_ADDRESS="$head_ip:$port"

on_node() { # on_node HOST ray start arguments ...: a step per node, so that the end of a node does not end the others
    local host="$1"
    shift
    srun --nodes=1 --ntasks=1 --nodelist="$host" --overlap --no-kill \
        ray start --node-name="$host" --num-gpus="$gpus_per_node" --disable-usage-stats --block "$@" >&2 &
    steps+=("$!")
}

on_node "$head" --head --node-ip-address="$head_ip" --port="$port"
python3 - "$head_ip" "$port" "$join_s" <<'PYTHON'
import socket, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + seconds
while True:
    try:
        socket.create_connection((host, port), timeout=2).close()
        break
    except OSError as fault:
        if time.monotonic() > end:
            sys.exit(f"no Ray at {host}:{port} after {seconds:g} s: {fault}")
        time.sleep(0.5)
PYTHON
for host in "${hosts[@]:1}"; do
    on_node "$host" --address="$RAY_ADDRESS"
done

python3 - "$min_nodes" "$join_s" "${hosts[@]}" <<'PYTHON'
import logging, sys, time
import ray
min_nodes, seconds, hosts = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
end = time.monotonic() + seconds
ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
while True:
    there = {node["NodeName"] for node in ray.nodes() if node["Alive"]}
    missing = [host for host in hosts if host not in there]
    if not missing or time.monotonic() > end:
        break
    time.sleep(0.5)
ray.shutdown()
if missing:
    print(f"not there after {seconds:g} s: {', '.join(missing)}", file=sys.stderr)
if len(hosts) - len(missing) < min_nodes:
    sys.exit(4)
PYTHON

echo "$nodes nodes at $RAY_ADDRESS: ${command[*]}" >&2
"${command[@]}" &
run="$!"
trap drain USR1

status=0
wait "$run" || status="$?"
if ((ends_at)); then # the signal ended `wait`, not the command
    while kill -0 "$run" 2>/dev/null && ((SECONDS < ends_at)); do sleep 1; done
    kill -TERM "$run" 2>/dev/null || true
    status=0
    wait "$run" || status="$?"
fi
run=""
exit "$status"
