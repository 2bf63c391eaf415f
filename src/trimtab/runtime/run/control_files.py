"""What is asked of a run from outside, by files in its folder: a dashboard of another process has no other way to it.

    asks/run/                 for the run: whether its plan is still right
    asks/workers-COMPONENT/   for a component that brings its own workers: drain one, or have it serve again

An ask is a file that is there whole or not at all, and is gone before anything is done about it: so nothing is done
twice, and nothing half. The run looks when an act or an iteration ends, a component a few times a second. What was left
over when a run ended is nobody's wish any more, and is thrown away when the next one begins.
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
from trimtab.runtime.procs.locks import born
from trimtab.runtime.run.folder import LOCK

REQUESTS = "asks"
RUN = "run"
MAX_BYTES = 4_096  # of an ask
MAX_WAITING = 64  # that nobody has taken yet


def workers_queue(component: str) -> str:
    """Whom to ask about a component's workers."""
    if "/" in component:
        raise InputError(f"there is no component {component}")
    return f"workers-{component}"


def send_request(folder: Path, queue: str, facts: Mapping[str, Any]) -> None:
    """Leave an ask. InputError where it cannot be written, UnreachableError where nobody is there to take it."""
    if is_running(folder) is False:
        raise UnreachableError("the run has ended, or was killed: there is nobody to ask")
    directory = folder / REQUESTS / queue
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if len(_waiting(directory)) >= MAX_WAITING:
            raise UnreachableError(f"{MAX_WAITING} asks wait already, and nobody takes them")
        replace(directory / f"{time.time_ns():020d}-{secrets.token_hex(4)}.json", json.dumps(facts) + "\n")
    except OSError as fault:
        raise InputError(f"it cannot be asked: {fault.strerror or fault}", where=str(directory)) from None


def take_requests(folder: Path, queue: str) -> list[dict[str, Any]]:
    """What is asked, oldest first; it is not there any more. What cannot be understood is an ask for nothing: {}."""
    found: list[dict[str, Any]] = []
    directory = folder / REQUESTS / queue
    for name in _waiting(directory):
        try:
            with open(directory / name, "rb") as file:
                data = file.read(MAX_BYTES)
            os.unlink(directory / name)
        except OSError:  # somebody else has it, or it could not be removed: then it is not done either
            continue
        asked: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            asked = json.loads(data)
        found.append(asked if isinstance(asked, dict) else {})
    return found


def clear_requests(folder: Path) -> None:
    """Throw away whatever is asked."""
    shutil.rmtree(folder / REQUESTS, ignore_errors=True)


def is_running(folder: Path) -> bool | None:
    """Whether the process that last ran here is there; None where nobody knows, as of one on another machine."""
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
