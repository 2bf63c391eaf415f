"""Makes a controller from a process of its own, so that it has nothing of the client that wanted it.

What a driver makes inherits its runtime environment and its module paths, and so does all that is made by that: hosts
would run every client's tasks with the first client's code and variables. A driver without any makes the controller
and leaves. `python -m trimtab.runtime.client.controller_start`, with the settings as JSON; the link runs it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.controller.rpc import NAMESPACE, controller_name

MOST_CALLS = 4_000  # at once; a client that waits holds one
_INHERITED = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_ID", "RAY_RUNTIME_ENV_HOOK")  # would make it a part of our job


def found(address: str, name: str, *settings: str | None, timeout_s: float, **more: float) -> None:
    """Have the controller made with these settings, or there already; else UnreachableError."""
    asked = json.dumps({"address": address, "settings": [name, *settings], "more": more})
    environment = {key: value for key, value in os.environ.items() if key not in _INHERITED}
    with _neutral_place() as place:
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, asked],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"the controller {name} was not made within {timeout_s:.3g} s") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise UnreachableError(
            f"the controller {name} could not be made: {said[-1] if said else f'exit status {done.returncode}'}",
            hint="trimtab has to be installed on the nodes of the cluster: a client's runtime_env does not bring it",
        )


@contextlib.contextmanager
def _neutral_place() -> Iterator[str]:
    """Where the process runs, which Ray makes a path of modules: where trimtab is, else an empty directory."""
    here = Path(__file__).parents[3]
    if str(here) not in {*site.getsitepackages(), site.getusersitepackages()}:
        yield str(here)
        return
    with tempfile.TemporaryDirectory() as empty:
        yield empty


def main(asked: str) -> None:
    """Runs in a process of its own: connect, make the controller on the head node, leave when it is there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trimtab.runtime.controller.actor import Controller

    wanted: dict[str, Any] = json.loads(asked)
    ray.init(wanted["address"], log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE)
    head = next((n["NodeID"] for n in ray.nodes() if n["Alive"] and "node:__internal_head__" in n["Resources"]), None)
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
            max_task_retries=0,  # calls are repeated by `ask`, which knows that they may have been heard
            max_concurrency=MOST_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
        )
        .remote(*wanted["settings"], **wanted["more"])
    )
    ray.get(controller.__ray_ready__.remote())
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
