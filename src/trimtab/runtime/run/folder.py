"""The folder of a run: what happened (`events.jsonl`), where it stands (`summary.json`), and states to go on from.

    lock              one run at a time
    job.yaml          what it was asked to do
    events.jsonl      one line for each thing that happened, appended
    summary.json      the run in figures; replaced whole
    saved.json        which state counts; replaced whole, after that state is
    state/00000020/   what the components saved after iteration 20, a folder for each

A run killed at any moment finds a whole state here or none. Iterations after the saved one are void: they are run again
and counted once. A disk that takes no more events does not stop a run; what could not be written is tried again with
the next event, and the summary says so.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.formats.files import replace
from trimtab.model.run import Iteration
from trimtab.model.run_events import ODD, check_plan, read_event
from trimtab.runtime.procs.locks import DirectoryLock

FORMAT = "trimtab-run"
VERSION = 2  # the only one that is read
EVENTS, SUMMARY, SAVED, STATES, JOB = "events.jsonl", "summary.json", "saved.json", "state", "job.yaml"
LOCK = "lock"


@dataclass(frozen=True)
class PastRun:
    """What a folder tells of a run: each iteration once, and the last one that there is a state of (0: none)."""

    iterations: tuple[Iteration, ...] = ()
    metrics: Mapping[int, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    saved: int = 0
    sync_s: Mapping[int, float] = field(default_factory=dict)
    planned: bool = False  # whether its costs had been measured and planned with
    plans: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # facts of the plan of each iteration
    unclear: tuple[int, ...] = ()  # lines that could not be understood, and are left out

    @property
    def left_out(self) -> str:
        """A sentence on lines that could not be understood; empty where there are none."""
        many = f"{len(self.unclear)} lines, the first of them {self.unclear[0]}," if len(self.unclear) > 1 else ""
        which = many or f"line {self.unclear[0]}" if self.unclear else ""
        return f"{which} of {EVENTS} could not be understood and is left out" if which else ""


class RunFolder:
    """A folder that a run writes; held with a lock until `close`."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.fault: str | None = None  # why events could not be written, as long as that is so
        self._unwritten: list[str] = []
        self._descriptor: int | None = None
        there = (path / EVENTS).exists()
        if there and not resume:
            raise _taken(path)
        if resume and not there:
            raise _no_run(path)
        _check_version(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            self._descriptor = os.open(path / EVENTS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _cut_torn_line(self._descriptor)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as fault:
            raise InputError(f"cannot write here: {fault.strerror or fault}", where=str(path)) from None
        self._drop_unfinished()

    def tell(self, event: str, **facts: Any) -> None:
        """Append an event."""
        line = json.dumps({"event": event, "at": round(time.time(), 3), **facts}, allow_nan=False)
        self._unwritten.append(line + "\n")
        self._flush()

    def keep_job(self, text: str | None) -> None:
        """Keep what the run was asked to do, to go on from here without the file. Never raises for the disk's sake."""
        if text is None:
            return
        try:
            replace(self.path / JOB, text)
        except OSError as fault:
            self.fault = f"job.yaml cannot be written: {fault.strerror or fault}"

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Replace the summary. Never raises for the disk's sake."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **summary}, indent=1, allow_nan=False) + "\n"
        try:
            replace(self.path / SUMMARY, text)
        except OSError as fault:
            self.fault = f"summary.json cannot be written: {fault.strerror or fault}"

    def state_being_saved(self, iteration: int, component: str) -> Path:
        """An empty folder for a component's state after an iteration. Raises OSError."""
        folder = self.path / STATES / f"{iteration:08d}.part" / component
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def state_is_whole(self, iteration: int) -> None:
        """All components have saved: this state counts from now on, and older ones go. Raises OSError."""
        folder = self.path / STATES / f"{iteration:08d}"
        if folder.exists():  # of a run that went on from before it: not this story
            shutil.rmtree(folder)
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)  # where nobody has anything to save
        os.rename(part, folder)
        replace(self.path / SAVED, json.dumps({"iteration": iteration, "folder": f"{STATES}/{folder.name}"}) + "\n")
        for other in (self.path / STATES).iterdir():
            if other != folder and not other.name.endswith(".part"):
                shutil.rmtree(other, ignore_errors=True)

    def state(self, iteration: int, component: str) -> Path | None:
        """Where a component's state after an iteration is, if it saved one."""
        folder = self.path / STATES / f"{iteration:08d}" / component
        return folder if folder.is_dir() else None

    def is_written(self) -> bool:
        """Whether all events are; tries again where they are not."""
        self._flush()
        return not self._unwritten

    def close(self) -> None:
        """Let others in."""
        self._flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._lock.release()

    def _flush(self) -> None:
        """Hand over what is not written yet; what the disk refuses stays."""
        if self._descriptor is None:
            return
        while self._unwritten:
            data = self._unwritten[0].encode()
            end = os.lseek(self._descriptor, 0, os.SEEK_END)
            try:
                written = os.write(self._descriptor, data)
                if written < len(data):
                    raise OSError(28, os.strerror(28))
            except OSError as fault:
                with contextlib.suppress(OSError):  # no half line stays behind
                    os.ftruncate(self._descriptor, end)
                self.fault = f"events cannot be written: {fault.strerror or fault}"
                return
            self._unwritten.pop(0)
        self.fault = None

    def _drop_unfinished(self) -> None:
        states = self.path / STATES
        if states.is_dir():
            for folder in states.glob("*.part"):
                shutil.rmtree(folder, ignore_errors=True)


def new_folder(base: Path, name: str) -> Path:
    """A folder of its own for a run, made now: `runs/NAME-1`, or the next number that nobody has. InputError."""
    kept = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "job"
    try:
        base.mkdir(parents=True, exist_ok=True)
        taken = [one.name.rpartition("-")[2] for one in base.glob(f"{glob.escape(kept)}-*")]
        number = max((int(one) for one in taken if one.isdecimal() and len(one) < 10), default=0)
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):  # another run may take the same number at the same time
                (base / f"{kept}-{number}").mkdir()
                return base / f"{kept}-{number}"
    except OSError as fault:
        raise InputError(f"cannot write here: {fault.strerror or fault}", where=str(base), hint="--folder") from None


def discard_unused(path: Path) -> None:
    """Remove the folder of a run that never began: there is nothing in it but a lock, and no event."""
    with contextlib.suppress(OSError):
        if (path / EVENTS).exists() and (path / EVENTS).stat().st_size:
            return
        for name in (EVENTS, LOCK, JOB):
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def check_free(path: Path, *, resume: bool) -> None:
    """Raise InputError where a run cannot have this folder; what is there stays as it is."""
    if not resume and (path / EVENTS).exists():
        raise _taken(path)
    if resume and not (path / EVENTS).exists():
        raise _no_run(path)
    _check_version(path)
    if (path / EVENTS).exists():
        _lock(path).release()


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


def _taken(path: Path) -> InputError:
    return InputError(
        "there is a run in this folder already",
        where=str(path),
        hint=f"`trimtab run --resume {path}` goes on with it; or name a folder that does not exist yet",
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


def _cut_torn_line(descriptor: int) -> None:
    """A line that a crash left half-written goes."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    at = max(0, size - 2**22)
    tail = os.pread(descriptor, size - at, at)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, at + tail.rfind(b"\n") + 1)


def read_run(path: Path) -> PastRun:
    """What the folder of a run tells; changes nothing. InputError where it is none, or no line of it is understood."""
    _check_version(path)
    try:
        lines = (path / EVENTS).read_bytes().split(b"\n")[:-1]
        saved = 0
        if (path / SAVED).exists():
            saved = int(plain.loads((path / SAVED).read_bytes())["iteration"])
    except FileNotFoundError:
        raise _no_run(path) from None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InputError(f"the folder cannot be read: {fault}", where=str(path)) from None
    past, unclear, why = _EventReader(), [], ""
    for number, line in enumerate(lines, 1):
        try:
            past.take(read_event(line))
        except ODD as fault:  # noqa: PERF203
            unclear.append(number)
            why = why or str(getattr(fault, "what", fault))
    if unclear and len(unclear) == len(lines):
        raise InputError(f"the line cannot be understood: {why}", where=f"{path / EVENTS}:1")
    iterations = tuple(past.iterations[number] for number in sorted(past.iterations))
    return PastRun(iterations, past.metrics, saved, past.sync_s, past.planned, past.plans, tuple(unclear))


def read_saved(path: Path) -> tuple[int, str | None]:
    """The last iteration that a folder has a state of (0: none), and what its summary says could not be written."""
    saved, fault = 0, None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = int(plain.loads((path / SAVED).read_bytes())["iteration"])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        fault = plain.loads((path / SUMMARY).read_bytes()).get("fault")
    return saved, fault


@dataclass
class _EventReader:
    """The events of a run, one after another: what is run again takes the place of what was before."""

    iterations: dict[int, Iteration] = field(default_factory=dict)
    metrics: dict[int, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    sync_s: dict[int, float] = field(default_factory=dict)
    planned: bool = False
    plans: dict[int, dict[str, Any]] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "iteration":
            iteration = decode(Iteration, event["iteration"])
            metrics = decode(dict[str, dict[str, float | None]], event.get("metrics", {}))
            sync_s = decode(float, event.get("sync_s", 0.0))
            self.iterations[iteration.number] = iteration
            self.metrics[iteration.number], self.sync_s[iteration.number] = metrics, sync_s
            self.plans[iteration.number] = self.plan
        elif kind == "resumed":
            after = decode(int, event["after"])
            self.iterations = {number: one for number, one in self.iterations.items() if number <= after}
            self.metrics = {number: one for number, one in self.metrics.items() if number <= after}
        elif kind == "plan":
            self.plan = check_plan(event)
            self.planned = self.planned or event.get("why") == "measured"


def iteration_facts(iteration: Iteration) -> Any:
    """An iteration as it stands in an event."""
    return encode(iteration)
