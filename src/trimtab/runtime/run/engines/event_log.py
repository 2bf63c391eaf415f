"""What became of a rollout's engines, written down as it happens: a line for each change of state, with its reason.

That all of them get new weights after an iteration is no news. The component is busy with a step for as long as one
takes, and cannot be asked meanwhile; whoever follows the run reads the file instead, as far as it has got. How much
each has to do changes all the time: that stands in a file of its own, which has the newest figures alone. A disk that
is full loses lines, never the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode
from trimtab.core.reasons import ReasonCode

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger(__name__)

LEFT = "left"
LOAD_S = 0.5  # between two writings of loads
HEARTBEAT_S = 5.0  # they are written again when nothing has changed, so that those of a process that is gone are known
STALE_S = 20.0  # then nobody writes them any more
NOT_LOGGED = (
    ReasonCode.joined,
    ReasonCode.refitting,
)  # it is started in the same moment; and gets weights after every iteration


def event_log_path(folder: Path, component: str) -> Path:
    """Where a component's engines are written about."""
    return folder / f"{component}.workers.jsonl"


def read_event_log(path: Path, since: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines behind so many bytes, and how many bytes there are now.

    A line has `at`, `worker`, `state`, `running` (requests it has to do), `code` and `reason`.
    """
    try:
        with path.open("rb") as file:
            file.seek(since)
            new = file.read()
    except OSError:
        return [], since
    whole = new[: new.rfind(b"\n") + 1]  # the last line may be half there
    found = []
    for line in whole.splitlines():
        try:
            found.append(_checked(plain.loads(line)))
        except (ValueError, KeyError, TypeError):  # noqa: PERF203
            log.warning("a line of %s cannot be understood and is left out: %.80r", path, line)
    return found, since + len(whole)


def _checked(line: Any) -> dict[str, Any]:
    words = {key: decode(str, line[key]) for key in ("worker", "state", "code", "reason")}
    return {"at": decode(float, line["at"]), "running": decode(int, line["running"]), **words}


def load_path(folder: Path, component: str) -> Path:
    """Where it stands how much a component's engines have to do."""
    return folder / f"{component}.load.json"


def read_load(path: Path) -> dict[str, tuple[int, int]]:
    """By worker: requests that it has, and how many it takes at most. Empty where nobody writes it now."""
    try:
        if time.time() - path.stat().st_mtime > STALE_S:
            return {}
        found = plain.loads(path.read_bytes())
        return {str(worker): (int(running), int(limit)) for worker, (running, limit) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class EngineEventLog:
    """Writes down what the pool tells of its workers."""

    def __init__(self, pool: RolloutPool, folder: Path | None, component: str) -> None:
        self._pool = pool
        self._path = None if folder is None else event_log_path(folder, component)
        self._load_path = None if folder is None else load_path(folder, component)
        self._seen: dict[str, tuple[float, str]] = {}  # by worker: when, and which state
        self._load = ""
        self._load_at = float("-inf")

    def write_changes(self, last: str = "") -> None:
        """Write what is new. `last`: why all of them are gone, where they are."""
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
        self._write_load({} if last else {view.worker: [view.running, view.spec.limit] for view in views.values()}, clock)

    def write_refusal(self, worker: str, reason: str) -> None:
        """Something that was asked of a worker is not done; why."""
        for view in self._pool.workers():
            if view.worker == worker:
                self._write(
                    [_line(time.time(), worker, view.state.value, ReasonCode.refused.value, reason, view.running)]
                )

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(line)}\n" for line in lines))
        except OSError:
            return  # the run goes on without its diary

    def _write_load(self, loads: dict[str, list[int]], clock: float) -> None:
        """Replace the figures where they have changed; not again and again within a moment."""
        text, past_s = json.dumps(loads), clock - self._load_at
        wait_s = HEARTBEAT_S if text == self._load else LOAD_S
        if self._load_path is None or (loads and past_s < wait_s):
            return
        self._load, self._load_at = text, clock
        aside = self._load_path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            if not loads:
                self._load_path.unlink()
                return
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self._load_path)


def _line(at: float, worker: str, state: str, code: str, reason: str, running: int = 0) -> dict[str, Any]:
    return {
        "at": round(at, 3), "worker": worker, "state": state, "running": running, "code": code, "reason": reason
    }  # fmt: skip
