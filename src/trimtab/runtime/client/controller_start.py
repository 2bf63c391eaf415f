"""Creates a controller from a separate process, so that it inherits nothing of the client.

An actor inherits the runtime environment and module paths of the driver that creates it, and passes them on: workers
would run every client's tasks with the code and variables of the first client. So a driver without any creates the
controller and exits: `python -m trimtab.runtime.client.controller_start SETTINGS_JSON`, run by `connection`.
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.controller.rpc import controller_name
from trimtab.runtime.rayapi.connect import NAMESPACE, init
from trimtab.runtime.rayapi.nodes import live_nodes

MAX_CALLS = 4_000  # concurrent; every waiting client holds one
_INHERITED = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_ID", "RAY_RUNTIME_ENV_HOOK")  # would make it part of our job


def start_controller(address: str, name: str, *settings: str | None, timeout_s: float, **more: float) -> None:
    """Create the controller with these settings unless it exists; UnreachableError on failure."""
    settings_json = json.dumps({"address": address, "settings": [name, *settings], "more": more})
    environment = {key: value for key, value in os.environ.items() if key not in _INHERITED}
    with _neutral_directory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, settings_json],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"the controller {name} was not created within {timeout_s:.3g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise UnreachableError(
            f"the controller {name} could not be created: {lines[-1] if lines else f'exit status {done.returncode}'}",
            hint="install trimtab on the nodes of the cluster: a client's runtime_env does not provide it",
        )


@contextlib.contextmanager
def _neutral_directory() -> Iterator[str]:
    """Working directory of the process, which Ray adds to sys.path: that of trimtab, else an empty one."""
    here = Path(__file__).parents[3]
    if str(here) not in {*site.getsitepackages(), site.getusersitepackages()}:
        yield str(here)
        return
    with tempfile.TemporaryDirectory() as empty:
        yield empty


def main(settings_json: str) -> None:
    """Connect, create the controller on the head node, and exit."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trimtab.runtime.controller.actor import Controller

    wanted: dict[str, Any] = json.loads(settings_json)
    init(ray, address=wanted["address"])
    head = next((node.node_id for node in live_nodes(ray) if node.head), None)
    if head is None:
        raise SystemExit("Ray names no head node for the controller to run on")
    controller = (
        ray.remote(Controller)
        .options(
            name=controller_name(wanted["settings"][0]),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,  # `ask` retries calls, knowing that they may have been executed
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
        )
        .remote(*wanted["settings"], **wanted["more"])
    )
    ray.get(controller.__ray_ready__.remote())
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
