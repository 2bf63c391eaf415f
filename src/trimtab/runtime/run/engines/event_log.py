"""Event log of a rollout's engines: a line for each state change, with its reason.

Refits after every iteration are not logged. A component cannot be called during a step, so the run reads this file
instead. Load figures change all the time and are kept in a file of their own, which holds only the latest. A full disk
delays lines, never the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode
from trimtab.core.reasons import ReasonCode
from trimtab.runtime.store.files import AppendLog, read_lines, write_file

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger(__name__)

LEFT = "left"
LOAD_S = 0.5  # between two writes of the load file
HEARTBEAT_S = 5.0  # the load file is rewritten even if unchanged, so that one of a dead process is recognised
STALE_S = 20.0  # after this the writer is gone
NOT_LOGGED = (ReasonCode.joined, ReasonCode.refitting)  # a start follows at once; a refit comes after every iteration


def event_log_path(folder: Path, component: str) -> Path:
    return folder / f"{component}.workers.jsonl"


def read_event_log(path: Path, since: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Lines after byte `since`, and the new position.

    A line has `at`, `worker`, `state`, `running` (requests), `code` and `reason`.
    """
    try:
        lines, end = read_lines(path, since)
    except OSError:
        return [], since
    found = []
    for line in lines:
        try:
            facts = plain.loads(line)
            words = {key: decode(str, facts[key]) for key in ("worker", "state", "code", "reason")}
            found.append({"at": decode(float, facts["at"]), "running": decode(int, facts["running"]), **words})
        except (ValueError, KeyError, TypeError):  # noqa: PERF203
            log.warning("a line of %s cannot be understood and is left out: %.80r", path, line)
    return found, end


def load_path(folder: Path, component: str) -> Path:
    return folder / f"{component}.load.json"


def read_load(path: Path) -> dict[str, tuple[int, int]]:
    """By worker: running requests and the limit. Empty if the file is stale."""
    try:
        if time.time() - path.stat().st_mtime > STALE_S:
            return {}
        found = plain.loads(path.read_bytes())
        return {str(worker): (int(running), int(limit)) for worker, (running, limit) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class EngineEventLog:
    """Writes state changes of the pool's workers."""

    def __init__(self, pool: RolloutPool, folder: Path | None, component: str) -> None:
        self._pool = pool
        self._path = None if folder is None else event_log_path(folder, component)
        self._log: AppendLog | None = None
        self._load_path = None if folder is None else load_path(folder, component)
        self._seen: dict[str, tuple[float, str]] = {}  # by worker: when, and which state
        self._load = ""
        self._load_at = float("-inf")

    def write_changes(self, last: str = "") -> None:
        """Write what is new. `last`: why all of them are gone, if they are."""
        lines: list[dict[str, Any]] = []
        now, clock = time.time(), time.monotonic()
        views = {view.worker: view for view in self._pool.workers()} if not last else {}
        for worker, view in views.items():
            since, state = self._seen.get(worker, (0.0, ""))
            for entry in self._pool.story(worker):
                if entry.at <= since:
                    continue
                since = entry.at
                if entry.reason.code in NOT_LOGGED:
                    continue
                if entry.state != state or entry.reason.code is ReasonCode.returned:
                    state = str(entry.state)
                    code, reason = entry.reason.code.value, entry.reason.sentence
                    lines.append(_line(now - clock + entry.at, worker, state, code, reason, view.running))
            self._seen[worker] = since, state
        for worker in [name for name in self._seen if name not in views]:
            del self._seen[worker]
            code = ReasonCode.completed if last else ReasonCode.by_hand
            lines.append(_line(now, worker, LEFT, code.value, last or "it was removed"))
        self._write(sorted(lines, key=lambda line: float(line["at"])))
        self._write_load(
            {} if last else {view.worker: [view.running, view.spec.limit] for view in views.values()}, clock
        )

    def write_refusal(self, worker: str, reason: str) -> None:
        for view in self._pool.workers():
            if view.worker == worker:
                self._write(
                    [_line(time.time(), worker, view.state.value, ReasonCode.refused.value, reason, view.running)]
                )

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        with contextlib.suppress(OSError):  # the run goes on without its event log
            self._log = self._log or AppendLog(self._path)
            for line in lines:
                self._log.append(json.dumps(line))

    def _write_load(self, loads: dict[str, list[int]], clock: float) -> None:
        """Replace the load figures if they changed, at most every LOAD_S."""
        text, past_s = json.dumps(loads), clock - self._load_at
        wait_s = HEARTBEAT_S if text == self._load else LOAD_S
        if self._load_path is None or (loads and past_s < wait_s):
            return
        self._load, self._load_at = text, clock
        with contextlib.suppress(OSError):
            if loads:
                write_file(self._load_path, text.encode())
            else:
                self._load_path.unlink()


def _line(at: float, worker: str, state: str, code: str, reason: str, running: int = 0) -> dict[str, Any]:
    return {
        "at": round(at, 3), "worker": worker, "state": state, "running": running, "code": code, "reason": reason
    }  # fmt: skip
