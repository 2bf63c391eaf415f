"""Control files of a run: requests of other processes, such as a dashboard, left as files in the run folder.

    asks/run/                 for the run: re-evaluate the plan
    asks/workers-COMPONENT/   for a component that brings its own workers: drain or resume one

A request is a file that is written atomically and removed before it is acted upon, so nothing is done twice or by half.
The run polls when an action or an iteration ends, a component a few times a second. Requests left over from an ended
run are deleted when the next one begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.formats.files import replace
from trimtab.runtime.procs.processes import born
from trimtab.runtime.run.folder import LOCK

REQUESTS = "asks"
RUN = "run"
MAX_BYTES = 4_096  # of a request
MAX_WAITING = 64  # requests not taken yet


def workers_queue(component: str) -> str:
    """Name of the queue for a component's workers."""
    if "/" in component:
        raise InputError(f"there is no component {component}")
    return f"workers-{component}"


def send_request(folder: Path, queue: str, facts: Mapping[str, Any]) -> None:
    """Leave a request. InputError if it cannot be written, UnreachableError if the run has ended."""
    if is_running(folder) is False:
        raise UnreachableError("the run has ended, or was killed, and takes no requests")
    directory = folder / REQUESTS / queue
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if len(_waiting(directory)) >= MAX_WAITING:
            raise UnreachableError(f"{MAX_WAITING} requests wait already, and the run takes none")
        replace(directory / f"{time.time_ns():020d}-{secrets.token_hex(4)}.json", json.dumps(facts) + "\n")
    except OSError as fault:
        raise InputError(f"the request cannot be written: {fault.strerror or fault}", where=str(directory)) from None


def take_requests(folder: Path, queue: str) -> list[dict[str, Any]]:
    """Pending requests, oldest first, removed from the queue. One that cannot be parsed is {}."""
    found: list[dict[str, Any]] = []
    directory = folder / REQUESTS / queue
    for name in _waiting(directory):
        try:
            with open(directory / name, "rb") as file:
                data = file.read(MAX_BYTES)
            os.unlink(directory / name)
        except OSError:  # taken by another process, or not removable: then it is not acted upon either
            continue
        request: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(data)
        found.append(request if isinstance(request, dict) else {})
    return found


def clear_requests(folder: Path) -> None:
    shutil.rmtree(folder / REQUESTS, ignore_errors=True)


def is_running(folder: Path) -> bool | None:
    """Whether the process that last ran here is alive; None if unknown, as for one on another machine."""
    try:
        held = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return bool(born(int(held["pid"])) == held["born"]) if held["host"] == socket.gethostname() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _waiting(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(".json") and not name.startswith("."))
    except OSError:
        return []
