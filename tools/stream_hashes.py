"""Hashes of what the five machines are told and answer, to show that a change left every decision as it was.

`python tools/stream_hashes.py --save before.json` on the old tree, `--compare before.json` on the new one (exit 1 where
a stream differs). Sources: the adversarial worlds of `tests/worlds` with fixed seeds, the scenarios and the recorded
journal of `examples/simulate`, and seven parts of the Philly job table (`philly_jobs.csv.gz` in the folder
TRIMTAB_TRACES). A name as argument restricts them to the sources that contain it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import run_state_machine_as_test

from trimtab.cli.app import run as trimtab
from trimtab.core.codec import encode
from trimtab.core.errors import InputError
from trimtab.machines.elastic.machine import ElasticMachine
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.replay.common.traces import jobs
from trimtab.replay.pool.driver import PoolReality, PoolReplay
from trimtab.replay.pool.policies import PoolPolicy, scheduler
from trimtab.replay.pool.scenario import workload

ROOT = Path(__file__).parents[1]
MACHINES = {
    "pool": PoolMachine,
    "nodes": NodeMachine,
    "elastic": ElasticMachine,
    "rollout": RolloutMachine,
    "replan": ReplanMachine,
}
TRACES = Path(os.environ.get("TRIMTAB_TRACES", "."))
PHILLY_PARTS, PART_JOBS, PART_NODES, NODE_GPUS = 7, 1_200, 12, 8


class Recorder:
    """Counts and hashes the calls of `handle`, by machine, since the last `take`."""

    def __init__(self) -> None:
        self._streams: dict[str, tuple[Any, int]] = {}
        for name, machine in MACHINES.items():
            machine.handle = self._recorded(name, machine.handle)  # type: ignore[method-assign, assignment]

    def _recorded(self, name: str, handle: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(machine: Any, event: Any, now: float) -> Any:
            try:
                out = handle(machine, event, now)
            except InputError as error:
                self._add(name, (now, _plain(event), "InputError", str(error)))
                raise
            self._add(name, (now, _plain(event), [_plain(instruction) for instruction in out]))
            return out

        return recorded

    def _add(self, name: str, entry: Any) -> None:
        stream, count = self._streams.get(name, (hashlib.sha256(), 0))
        stream.update(json.dumps(entry, sort_keys=True).encode())
        self._streams[name] = (stream, count + 1)

    def take(self) -> dict[str, tuple[int, str]]:
        found = {name: (count, stream.hexdigest()[:16]) for name, (stream, count) in self._streams.items()}
        self._streams = {}
        return found


def _plain(fact: Any) -> Any:
    return [type(fact).__name__, encode(fact)]


def _world(test: str, number: int, runs: int, steps: int) -> None:
    """Random runs that depend on the world only: not on constants of imported modules, nor on the test's source."""
    chosen = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    fate = type("Fate", (importlib.import_module(test).Fate,), {})
    run_state_machine_as_test(seed(number)(fate), settings=chosen)


def _command(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert trimtab(list(arguments)) == 0, arguments


def _philly(part: int) -> None:
    """A part of the job table on too few GPUs, with preemption."""
    rows = jobs(TRACES / "philly_jobs.csv.gz")
    first = part * (len(rows) // PHILLY_PARTS)
    submitted = workload(rows[first : first + PART_JOBS], seed=part, node_gpus=NODE_GPUS)
    reality = PoolReality(tuple(f"n{at:05d}" for at in range(PART_NODES)), NODE_GPUS, seed=part)
    machine, before = scheduler(PoolPolicy("trimtab", "trimtab"), NODE_GPUS, PART_NODES * NODE_GPUS)
    PoolReplay(machine, submitted, reality, first=before, check_every=10**9).run()


def sources() -> dict[str, Callable[[], None]]:
    simulate = ROOT / "examples" / "simulate"
    found: dict[str, Callable[[], None]] = {
        "world pool": partial(_world, "test_pool_invariants", 1, 60, 40),
        "world nodes, elastic": partial(_world, "test_fleet_invariants", 1, 180, 50),
        "world rollout": partial(_world, "test_rollout_invariants", 1, 60, 40),
        "world replan": partial(_world, "test_loop_invariants", 1, 60, 40),
        "journal": partial(_command, "simulate", str(simulate / "journal"), "--policy", str(simulate / "policy.yaml")),
        **{
            f"replay {name}": partial(_command, "simulate", str(simulate / f"{name}.yaml"), "--seed", "1")
            for name in ("small", "rollout", "loop")
        },
    }
    if (TRACES / "philly_jobs.csv.gz").exists():
        found |= {f"philly {part + 1}": partial(_philly, part) for part in range(PHILLY_PARTS)}
    else:
        print(f"no job table in {TRACES}: set TRIMTAB_TRACES")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="sources whose name contains this")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests" / "worlds"), str(ROOT / "tests" / "helpers")]
    providers._get_local_constants = lambda: providers.Constants()  # type: ignore[attr-defined]
    before: dict[str, list[Any]] = json.loads(arguments.compare.read_text()) if arguments.compare else {}
    recorder, found = Recorder(), {}
    differ = 0
    for source, run in sources().items():
        if arguments.only not in source:
            continue
        run()
        for machine, (count, digest) in sorted(recorder.take().items()):
            key = f"{source}: {machine}"
            found[key] = [count, digest]
            same = "" if not before else "equal" if before.get(key) == found[key] else f"DIFFERS {before.get(key)}"
            differ += same.startswith("DIFFERS")
            print(f"{key:34} {count:>9,} {digest}  {same}", flush=True)
    missing = [key for key in before if key not in found and arguments.only in key.rpartition(":")[0]]
    print(f"{len(found)} streams, {sum(count for count, _ in found.values()):,} events", end="")
    print(f"; {len(found) - differ} equal, {differ} differ, {len(missing)} missing" if before else "")
    if arguments.save:
        arguments.save.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if differ or missing else 0


if __name__ == "__main__":
    sys.exit(main())
