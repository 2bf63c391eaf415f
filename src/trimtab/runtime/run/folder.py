"""The run folder: event log (`events.jsonl`), `summary.json`, and checkpoints to resume from.

    lock              one run at a time
    job.yaml          the job
    events.jsonl      one line per event, append-only
    summary.json      figures of the run; replaced atomically
    saved.json        which checkpoint counts; replaced after that checkpoint is complete
    state/00000020/   what the components saved after iteration 20, a folder for each
    asks/QUEUE/       requests of other processes, such as a dashboard: `run` for the run (re-evaluate the plan),
                      `workers-COMPONENT` for a component that brings its own workers (drain or resume one)
    COMPONENT.workers.jsonl, COMPONENT.load.json    state changes of a component's engines, and their load now

A run killed at any moment leaves a complete checkpoint or none. Iterations after the checkpoint are void: they are run
again and counted once. A full disk does not stop a run; unwritten events are retried with the next one, and the summary
reports it. A request is a file that is written atomically and removed before it is acted upon, so nothing is done twice
or by half; those left over from an ended run are deleted when the next one begins.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode
from trimtab.core.errors import InputError, UnreachableError
from trimtab.formats.files import replace
from trimtab.model.run import Iteration
from trimtab.model.run_events import ODD, check_plan, read_event
from trimtab.runtime.procs.locks import DirectoryLock
from trimtab.runtime.procs.processes import born
from trimtab.runtime.run.measurements import Metrics
from trimtab.runtime.store.files import AppendLog, FileTail, read_lines

log = logging.getLogger(__name__)

EmitEvent = Callable[..., None]
"""Writes an event: its name, and its facts as keywords."""

FORMAT = "trimtab-run"
VERSION = 2  # the only one that is read
EVENTS, SUMMARY, SAVED, STATES, JOB = "events.jsonl", "summary.json", "saved.json", "state", "job.yaml"
LOCK = "lock"
MAX_READ_BYTES = 2**23  # of one read of a tail: a large run comes in pieces
REQUESTS = "asks"
RUN_QUEUE = "run"
MAX_REQUEST_BYTES = 4_096  # of a request
MAX_WAITING = 64  # requests not taken yet
STALE_S = 20.0  # after this the writer of a load file is gone


@dataclass
class RunHistory:
    """A run as its events tell it, in order: each iteration once; `saved` is the last checkpoint (0: none)."""

    iterations: list[Iteration] = field(default_factory=list)
    metrics: dict[int, Metrics] = field(default_factory=dict)
    saved: int = 0
    sync_s: dict[int, float] = field(default_factory=dict)
    planned: bool = False  # its costs were measured and planned with
    plans: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # plan facts by iteration
    plan: Mapping[str, Any] = field(default_factory=dict)  # the last plan's
    unclear: list[int] = field(default_factory=list)  # numbers of lines that could not be parsed and are skipped

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "iteration":
            metrics = decode(dict[str, dict[str, float | None]], event.get("metrics", {}))
            self.add(decode(Iteration, event["iteration"]), metrics, decode(float, event.get("sync_s", 0.0)))
        elif kind == "resumed":
            self.void_after(decode(int, event["after"]))
        elif kind == "plan":
            self.plan = check_plan(event)
            self.planned = self.planned or event.get("why") == "measured"

    def add(self, iteration: Iteration, metrics: Metrics, sync_s: float) -> None:
        """Add an iteration; one that is run again replaces the earlier one."""
        number = iteration.number
        again = bool(self.iterations) and number <= self.iterations[-1].number
        if again:
            self.iterations = [each for each in self.iterations if each.number != number]
        self.iterations.append(iteration)
        if again:
            self.iterations.sort(key=lambda each: each.number)
        self.metrics[number], self.sync_s[number], self.plans[number] = metrics, sync_s, self.plan

    def void_after(self, saved: int) -> int:
        """Forget iterations after a checkpoint; returns how many."""
        before = len(self.iterations)
        self.iterations = [iteration for iteration in self.iterations if iteration.number <= saved]
        self.metrics = {number: figures for number, figures in self.metrics.items() if number <= saved}
        return before - len(self.iterations)

    @property
    def left_out(self) -> str:
        many = f"{len(self.unclear)} lines, the first of them {self.unclear[0]}," if len(self.unclear) > 1 else ""
        which = many or f"line {self.unclear[0]}" if self.unclear else ""
        return f"{which} of {EVENTS} could not be understood and is left out" if which else ""


class RunFolder:
    """A run folder being written; locked until `close`."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._fault: str | None = None  # why another file could not be written
        _check_use(path, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            self._events = AppendLog(path / EVENTS)
        except OSError as fault:
            raise InputError(f"cannot write here: {fault.strerror or fault}", where=str(path)) from None
        for unfinished in (path / STATES).glob("*.part"):
            shutil.rmtree(unfinished, ignore_errors=True)

    @property
    def fault(self) -> str | None:
        """Why something cannot be written, while that is so."""
        return f"events cannot be written: {self._events.fault}" if self._events.fault else self._fault

    def append_event(self, event: str, **facts: Any) -> None:
        self._events.append(json.dumps({"event": event, "at": round(time.time(), 3), **facts}, allow_nan=False))
        self._fault = None

    def write_job(self, text: str | None) -> None:
        """Keep the job, to resume without the job file. Never raises on a disk error."""
        if text is not None:
            self._replace(JOB, text)

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Replace the summary. Never raises on a disk error."""
        facts = {"format": FORMAT, "version": VERSION, **summary}
        self._replace(SUMMARY, json.dumps(facts, indent=1, allow_nan=False) + "\n")

    def _replace(self, name: str, text: str) -> None:
        try:
            replace(self.path / name, text)
        except OSError as fault:
            self._fault = f"{name} cannot be written: {fault.strerror or fault}"

    def new_state_folder(self, iteration: int, component: str) -> Path:
        """An empty folder for a component's state after an iteration. Raises OSError."""
        folder = self.path / STATES / f"{iteration:08d}.part" / component
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def commit_state(self, iteration: int) -> None:
        """Make this checkpoint the one that counts and delete older ones. Raises OSError."""
        folder = self.path / STATES / f"{iteration:08d}"
        if folder.exists():  # of an earlier run that was resumed from before it
            shutil.rmtree(folder)
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)  # where no component has anything to save
        os.rename(part, folder)
        replace(self.path / SAVED, json.dumps({"iteration": iteration, "folder": f"{STATES}/{folder.name}"}) + "\n")
        for other in (self.path / STATES).iterdir():
            if other != folder and not other.name.endswith(".part"):
                shutil.rmtree(other, ignore_errors=True)

    def state(self, iteration: int, component: str) -> Path | None:
        """The folder of a component's state after an iteration, if it saved one."""
        folder = self.path / STATES / f"{iteration:08d}" / component
        return folder if folder.is_dir() else None

    def all_written(self) -> bool:
        return self._events.flush()

    def close(self) -> None:
        self._events.close()
        self._lock.release()


def new_folder(base: Path, name: str) -> Path:
    """Create a folder for a run: `runs/NAME-1`, or the next free number. Raises InputError."""
    kept = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "job"
    try:
        base.mkdir(parents=True, exist_ok=True)
        taken = [path.name.rpartition("-")[2] for path in base.glob(f"{glob.escape(kept)}-*")]
        number = max((int(suffix) for suffix in taken if suffix.isdecimal() and len(suffix) < 10), default=0)
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):  # another run may take the same number at the same time
                (base / f"{kept}-{number}").mkdir()
                return base / f"{kept}-{number}"
    except OSError as fault:
        raise InputError(f"cannot write here: {fault.strerror or fault}", where=str(base), hint="--folder") from None


def discard_unused(path: Path) -> None:
    """Remove the folder of a run that never began: it holds no event."""
    with contextlib.suppress(OSError):
        if (path / EVENTS).exists() and (path / EVENTS).stat().st_size:
            return
        for name in (EVENTS, LOCK, JOB):
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def check_free(path: Path, *, resume: bool) -> None:
    """Raise InputError if a run cannot use this folder; changes nothing."""
    _check_use(path, resume)
    if resume:
        _lock(path).release()


def _check_use(path: Path, resume: bool) -> None:
    if resume and not (path / EVENTS).exists():
        raise _no_run(path)
    if not resume and (path / EVENTS).exists():
        raise InputError(
            "there is a run in this folder already",
            where=str(path),
            hint=f"`trimtab run --resume {path}` goes on with it; or name a folder that does not exist yet",
        )
    _check_version(path)


def _check_version(path: Path) -> None:
    """InputError if the summary is of another version."""
    try:
        summary = plain.loads((path / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(summary, dict) and summary.get("format") == FORMAT and summary.get("version") != VERSION:
        raise InputError(
            f"this run has format {summary.get('version')}, and {VERSION} is the only one that is read here",
            where=str(path),
            hint="use the version of trimtab that wrote it, or begin a new run in another folder",
        )


def _no_run(path: Path) -> InputError:
    return InputError("there is no run in this folder", where=str(path), hint="name the folder of a run")


def _lock(path: Path) -> DirectoryLock:
    try:
        return DirectoryLock(path, "run", wait_s=0.0)
    except InputError as error:
        holder = error.what.partition(": ")[2]
        raise InputError(
            f"another run writes this folder: {holder}", where=str(path), hint="wait for it, or end it"
        ) from None


def read_events(path: Path, take: Callable[[dict[str, Any]], None]) -> tuple[int, list[int], str]:
    """Pass a folder's events to `take`: number of lines, those that could not be parsed, and why the first could not.

    Raises OSError.
    """
    lines, _ = read_lines(path / EVENTS)
    unclear, why = [], ""
    for number, line in enumerate(lines, 1):
        try:
            take(read_event(line))
        except ODD as fault:  # noqa: PERF203
            unclear.append(number)
            why = why or str(getattr(fault, "what", fault))
    return len(lines), unclear, why


def read_run(path: Path) -> RunHistory:
    """Read a run folder; changes nothing. InputError if it is none, or none of its lines can be parsed."""
    _check_version(path)
    history = RunHistory()
    try:
        count, history.unclear, why = read_events(path, history.take)
        if (path / SAVED).exists():
            history.saved = int(plain.loads((path / SAVED).read_bytes())["iteration"])
    except FileNotFoundError:
        raise _no_run(path) from None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InputError(f"the folder cannot be read: {fault}", where=str(path)) from None
    if history.unclear and len(history.unclear) == count:
        raise InputError(f"the line cannot be understood: {why}", where=f"{path / EVENTS}:1")
    return history


def read_saved(path: Path) -> tuple[int, str | None]:
    """The iteration of the checkpoint (0: none), and the write fault that the summary reports."""
    saved, fault = 0, None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = int(plain.loads((path / SAVED).read_bytes())["iteration"])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        fault = plain.loads((path / SUMMARY).read_bytes()).get("fault")
    return saved, fault


class EventTail:
    """Tails the events of a run, which may not have begun. A malformed line is None, so that it can be counted."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        if not folder.exists():
            raise InputError("there is no such folder", where=str(folder), hint="name the folder of a run")
        if not folder.is_dir():
            raise InputError("this is a file, not the folder of a run", where=str(folder), hint="name its folder")
        self._tail = FileTail(self.path)

    def read(self) -> tuple[bool, list[dict[str, Any] | None]]:
        """Whether it begins anew, and the new events. Raises InputError if it cannot be read."""
        try:
            anew, lines = self._tail.lines(MAX_READ_BYTES)
        except OSError as fault:
            raise InputError(f"it cannot be read: {fault.strerror or fault}", where=str(self.path)) from None
        return anew, [_event(line) for line in lines]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return read_event(line)
    except ValueError:
        return None


def workers_queue(component: str) -> str:
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
                data = file.read(MAX_REQUEST_BYTES)
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


# ---- engines of components ------------------------------------------------------------------------------------------


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
