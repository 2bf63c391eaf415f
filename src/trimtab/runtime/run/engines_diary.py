"""What became of a rollout's engines, written down as it happens: a line for each change of state, with its reason.

That all of them get new weights after an iteration is no news. The component is busy with a step for as long as one
takes, and cannot be asked meanwhile; whoever follows the run reads the file instead, as far as it has got. A disk that
is full loses lines, never the run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.model.reason import Code

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

LEFT = "left"
NO_NEWS = (Code.joined, Code.refitting)  # it is started in the same moment; and gets weights after every iteration


def diary_of(folder: Path, component: str) -> Path:
    """Where a component's engines are written about."""
    return folder / f"{component}.workers.jsonl"


def read_diary(path: Path, since: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines behind so many bytes, and how many bytes there are now: `at`, `worker`, `state`, `code`, `reason`."""
    try:
        with path.open("rb") as file:
            file.seek(since)
            new = file.read()
    except OSError:
        return [], since
    whole = new[: new.rfind(b"\n") + 1]  # the last line may be half there
    return [json.loads(line) for line in whole.splitlines()], since + len(whole)


class Diary:
    """Writes down what the pool tells of its workers."""

    def __init__(self, pool: RolloutPool, path: Path | None) -> None:
        self._pool = pool
        self._path = path
        self._seen: dict[str, tuple[float, str]] = {}  # by worker: when, and which state

    def look(self, last: str = "") -> None:
        """Write what is new. `last`: why all of them are gone, where they are."""
        lines: list[dict[str, Any]] = []
        now, clock = time.time(), time.monotonic()
        there = {one.worker for one in self._pool.workers()} if not last else set()
        for worker in there:
            since, state = self._seen.get(worker, (0.0, ""))
            for chapter in self._pool.story(worker):
                if chapter.at <= since:
                    continue
                since = chapter.at
                if chapter.reason.code in NO_NEWS:
                    continue
                if chapter.state != state or chapter.reason.code is Code.returned:
                    state = str(chapter.state)
                    code, reason = chapter.reason.code.value, chapter.reason.sentence
                    lines.append(_line(now - clock + chapter.at, worker, state, code, reason))
            self._seen[worker] = since, state
        for worker in [one for one in self._seen if one not in there]:
            del self._seen[worker]
            code = Code.completed if last else Code.by_hand
            lines.append(_line(now, worker, LEFT, code.value, last or "it was removed"))
        self._write(sorted(lines, key=lambda one: float(one["at"])))

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(line)}\n" for line in lines))
        except OSError:
            return  # the run goes on without its diary


def _line(at: float, worker: str, state: str, code: str, reason: str) -> dict[str, Any]:
    return {"at": round(at, 3), "worker": worker, "state": state, "code": code, "reason": reason}
