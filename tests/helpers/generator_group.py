"""The example of generators that scale, on real Ray nodes and real engines: what it must hold whatever the engine."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab import ElasticGroup
from trimtab.runtime.procs.processes import command, table
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "rollout" / "tiny_engine.py"
WAIT_S = 600.0
PROMPTS = [f"{number} + {number} =" for number in range(12)]


def tiny_command(model: Path) -> str:
    return f"{sys.executable} {TINY} --port {{port}} --model {model}"


def engines(marker: str) -> list[int]:
    """Processes of engines that were started with this word in their command."""
    return [pid for pid in table() if marker in " ".join(command(pid)) and "{port}" not in " ".join(command(pid))]


@contextmanager
def nodes_of_one_gpu() -> Iterator[Any]:
    """A Ray of a head without GPUs, to which nodes of one made-up GPU can be added."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="trimtab")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def follow(engine: str, marker: str, generator: Any) -> None:
    """Joins, a killed engine and a drain change the number of engines and never an answer; nothing is left."""
    with nodes_of_one_gpu() as cluster:
        cluster.add_node(num_cpus=1, num_gpus=1)
        with ElasticGroup(generator, (engine, 8), per_node={"gpu": 1}, start_timeout_s=WAIT_S, wait_s=WAIT_S) as group:

            def answers(size: int) -> list[str]:
                until(lambda: (seen := group.step(PROMPTS, timeout=WAIT_S)).size == size and last.append(seen) is None)
                return [answer for share in last[-1].values for answer in share]

            last: list[Any] = []
            alone = answers(1)
            assert len(alone) == len(PROMPTS)
            assert all(alone)
            second = cluster.add_node(num_cpus=1, num_gpus=1)
            assert answers(2) == alone
            assert all(last[-1].values)  # each had a share
            os.kill(engines(marker)[0], signal.SIGKILL)
            again = group.step(PROMPTS, timeout=WAIT_S)
            assert [answer for share in again.values for answer in share] == alone
            assert answers(2) == alone
            group.session.drain_node(second.node_id, 60.0, "test")
            assert answers(1) == alone
    until(lambda: not engines(marker))
