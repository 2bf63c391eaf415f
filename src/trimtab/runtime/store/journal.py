"""The journal of a machine: all its events on disk, from which a controller recovers after a crash at any time.

An append-only file of JSON lines `[now, "EventType", {fields}]` after a header with the format version; a fourth
element lists the resulting instructions, for display and `trimtab simulate` only. An event is written to the operating
system before it is executed, and synced to disk within 100 ms. From time to time the machine's whole state is written
as a snapshot (temporary file, fsync, rename), and older segments are deleted. Reading must never run code from the
file: it only decodes known event types. A lock admits one writer.

    journal-00000000.jsonl     events from the beginning
    snapshot-00000001.json     the state at the end of segment 0
    journal-00000001.jsonl     events after that snapshot

`python -m trimtab.runtime.store.journal DIRECTORY SEGMENT` compacts a journal: it replays the closed segments and
writes the resulting snapshot. A separate process: the state of 10,000 tasks takes a second to write, during which the
controller would not answer. The controller continues in a new segment meanwhile. Killed half way, it changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.machines.nodes import events as node_events
from trimtab.machines.pool import events as pool_events
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.rollout import events as rollout_events
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background
from trimtab.runtime.procs.locks import DirectoryLock
from trimtab.runtime.store.files import sync_directory, write_file

FORMAT = "trimtab-journal"
VERSION = 2  # the only one that is read
SYNC_EVERY_S = 0.1
LATEST = 1e12  # seconds; later times are refused
SYNC_AGAIN_S = 5.0  # maximum pause between retries of a failed sync
EventKinds = dict[str, type[Any]]
POOL_EVENTS: EventKinds = {kind.__name__: kind for kind in pool_events.PoolEvent.__subclasses__()}
NODE_EVENTS: EventKinds = {kind.__name__: kind for kind in node_events.NodeEvent.__subclasses__()}
ROLLOUT_EVENTS: EventKinds = {kind.__name__: kind for kind in rollout_events.RolloutEvent.__subclasses__()}
_NAMES = re.compile(r"(journal|snapshot)-(\d{8})\.jsonl?")


class JournalVersionError(InputError):
    """A journal of another format version; its files are left unchanged."""


class DamagedError(InputError):
    """A journal that cannot be read: lines, a segment or a snapshot are damaged or missing."""


class JournalContents(Frozen):
    """Contents of a journal: a snapshot, if there is one, and the events after it."""

    snapshot: dict[str, Any] | None
    events: tuple[tuple[float, Any], ...]
    last_time: float  # of the last event or the snapshot; 0 if none
    notes: tuple[str, ...] = ()  # about the journal as a whole, copied to every segment
    torn: str | None = None  # describes a half-written last line, which is left out
    segment: int = 0  # to continue with
    length: int = 0  # bytes of its complete lines
    instructions: tuple[tuple[str, ...] | None, ...] = ()  # by event; None: not recorded
    began: float = 0.0  # time of the snapshot; 0 if none

    @property
    def empty(self) -> bool:
        return self.snapshot is None and not self.events


def read_journal(
    directory: str | Path, *, before: int | None = None, kinds: EventKinds = POOL_EVENTS
) -> JournalContents:
    """Read a journal, or its part before a segment. Changes nothing, takes no lock."""
    try:
        return _read_journal(directory, before, kinds)
    except FileNotFoundError:  # a new snapshot replaced files meanwhile
        return _read_journal(directory, before, kinds)


def _read_journal(directory: str | Path, before: int | None, kinds: EventKinds) -> JournalContents:
    segments, snapshots = _files(Path(directory))
    if before is not None:
        segments = {number: path for number, path in segments.items() if number < before}
        snapshots = {number: path for number, path in snapshots.items() if number < before}
    snapshot, last_time, first = None, 0.0, 0
    if snapshots:
        first = max(snapshots)
        snapshot, last_time = _read_snapshot(snapshots[first])
    wanted = [number for number in sorted(segments) if number >= first]
    if wanted and wanted != list(range(first, wanted[-1] + 1)):
        missing = next(number for number in range(first, wanted[-1] + 1) if number not in segments)
        raise DamagedError(
            f"a part of the journal is missing: {_segment_name(missing)}",
            where=str(directory),
            hint="put it back, or start with another journal_dir",
        )
    parts = [read_segment(segments[number], kinds=kinds, last=number == wanted[-1]) for number in wanted]
    events = tuple(event for part in parts for event in part.events)
    return JournalContents(
        snapshot,
        events,
        max(last_time, events[-1][0]) if events else last_time,
        next((part.notes for part in reversed(parts) if part.notes), ()),
        parts[-1].torn if parts else None,
        wanted[-1] if wanted else first,
        parts[-1].length if parts else 0,
        tuple(each for part in parts for each in part.instructions),
        last_time,
    )


class Journal:
    """A journal open for writing: locked, read once, then appended to.

    `append`, `rotate` and `snapshot` belong to one thread. A failing disk does not stop the machine: unwritten data is
    kept and retried with the next event, and `fault` says so. Data whose sync failed is kept and written again before
    the next sync, as the kernel drops pages that it failed to write.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        kinds: EventKinds = POOL_EVENTS,
        owner: str = "",
        lock_wait_s: float = 15.0,
        background: Background | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._kinds = kinds
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(self.directory, owner, wait_s=lock_wait_s)
        try:
            found = read_journal(self.directory, kinds=kinds)
            self._write_fault: str | None = None
            self._sync_fault: str | None = None
            self.notes = found.notes
            self.since_snapshot = len(found.events)
            self._found: JournalContents | None = found
            self._unwritten = bytearray()  # not yet accepted by the operating system
            self._segment = found.segment
            self._fd, self._unsynced = self._open_segment(self._segment, found.length)
            self._synced = found.length  # bytes of the segment that are on disk; `_unsynced` are those after them
        except BaseException:
            self._lock.release()
            raise
        self._dirty = threading.Event()
        self._writing = threading.Lock()  # guards the descriptor and the buffers
        self._syncing = threading.Lock()  # held during a sync
        self._closed = threading.Event()
        self._sync_first: list[Path] = []  # files to sync before the events that refer to them
        self._syncer = (background or Background()).start_thread(
            f"sync journal {owner}".rstrip(), self._sync_forever, policy=NEVER_GIVE_UP
        )

    @property
    def fault(self) -> str | None:
        """Why data is not on disk; None if all is, or will be within 100 ms."""
        return self._write_fault or self._sync_fault

    @property
    def synced(self) -> bool:
        """Whether all appended data is on disk."""
        return not self._unwritten and not self._unsynced and self.fault is None

    def take_contents(self) -> JournalContents:
        """Contents at opening; once, as they are large."""
        found, self._found = self._found, None
        return found if found is not None else read_journal(self.directory, kinds=self._kinds)

    def append(self, now: float, event: Any, instructions: list[str] | None = None) -> None:
        """Append an event and its instructions; on return the operating system has it, or `fault` is set."""
        line = [now, type(event).__name__, encode(event)]
        self._write(_line(line if instructions is None else [*line, instructions]))
        self.since_snapshot += 1

    def catch_up(self) -> bool:
        """Retry refused writes; whether all data is written."""
        with self._writing:
            if self._unwritten:
                self._flush()
            return not self._unwritten

    def note(self, sentence: str) -> None:
        """Add a note about the journal; written with the next snapshot."""
        self.notes = (*self.notes, sentence)

    def sync_first(self, path: Path) -> None:
        """Sync this file before the next event, which refers to it."""
        with self._writing:
            self._sync_first.append(path)

    def rotate(self) -> int:
        """Continue in a new segment; returns its number. Older segments can be compacted."""
        with self._writing:
            self._flush()
        self._sync()
        with self._writing:
            self.since_snapshot = 0
            if self.fault is None:  # unwritten data must stay in this segment
                try:
                    self._next_segment()
                except OSError as fault:
                    self._write_fault = f"no new segment in {self.directory}: {fault.strerror}"
        return self._segment

    def snapshot(self, now: float, state: dict[str, Any]) -> None:
        """Write a snapshot and continue in a new segment."""
        with self._writing:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                write_snapshot(self.directory, self._segment + 1, now, state)
                self._unwritten.clear()  # included in the state
                self._next_segment()
                self._write_fault = self._sync_fault = None
            except OSError as fault:
                self._write_fault = f"no snapshot in {self.directory}: {fault.strerror}"

    def _next_segment(self) -> None:
        fresh, header = self._open_segment(self._segment + 1, 0)
        os.close(self._fd)
        self._fd, self._unsynced, self._synced = fresh, header, 0
        self._segment += 1
        self.since_snapshot = 0
        self._dirty.set()

    @property
    def vanished(self) -> bool:
        """Whether the current segment was deleted; a snapshot restores the journal."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:
            return True

    def close(self) -> None:
        """Sync everything and release the lock."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._dirty.set()
        self._syncer.join(timeout=10)
        with self._writing:
            self._flush()
        self._sync()
        with self._writing:
            os.close(self._fd)
        self._lock.release()

    def _open_segment(self, number: int, length: int) -> tuple[int, bytearray]:
        """Open a segment at `length`; returns the descriptor, and the header written to a new one."""
        path = self.directory / _segment_name(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        written = bytearray()
        try:
            os.ftruncate(descriptor, length)
            os.lseek(descriptor, length, os.SEEK_SET)
            if length == 0:
                header = {"format": FORMAT, "version": VERSION, "segment": number, "notes": list(self.notes)}
                written += _line(header)
                os.write(descriptor, written)
                sync_directory(self.directory)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, written

    def _write(self, line: bytes) -> None:
        with self._writing:
            self._unwritten += line
            self._flush()
        self._dirty.set()

    def _flush(self) -> None:
        try:
            while self._unwritten:
                written = os.write(self._fd, self._unwritten)
                self._unsynced += self._unwritten[:written]
                del self._unwritten[:written]
            self._write_fault = None
        except OSError as fault:
            self._write_fault = f"the journal in {self.directory} cannot be written: {fault.strerror}"

    def _sync(self) -> bool:
        """Sync the segment and the files before it; whether that succeeded."""
        files: list[Path] = []
        with self._syncing:
            again = self._sync_fault is not None
            try:
                with self._writing:
                    segment, end = self._segment, self._synced + len(self._unsynced)
                    if again:
                        _write_at(self._fd, self._unsynced, self._synced)
                    copy = os.dup(self._fd)
                    files, self._sync_first = self._sync_first, []
                try:  # on a duplicate: a snapshot may close the original meanwhile
                    for path in files:
                        _sync_file(path, again)
                    os.fsync(copy)
                finally:
                    os.close(copy)
            except OSError as fault:
                with self._writing:
                    self._sync_first = files + self._sync_first
                    self._sync_fault = f"the journal in {self.directory} cannot be forced to disk: {fault.strerror}"
                return False
            with self._writing:
                if segment == self._segment:  # else a snapshot has replaced it
                    del self._unsynced[: end - self._synced]
                    self._synced = end
                self._sync_fault = None
            return True

    def _sync_forever(self) -> None:
        failures = 0
        while not self._closed.is_set():
            if not self._dirty.wait(timeout=self._lock.renew_s):
                self._lock.renew()
                continue
            self._dirty.clear()
            failures = 0 if self._sync() else failures + 1
            if failures:
                self._dirty.set()
            self._lock.renew()
            self._closed.wait(min(SYNC_AGAIN_S, SYNC_EVERY_S * 2.0 ** min(failures, 10)))


def write_snapshot(directory: Path, number: int, now: float, state: dict[str, Any]) -> None:
    """Write the state at the beginning of a segment, then delete the older files."""
    text = _line({"format": FORMAT, "version": VERSION, "time": now, "machine": state})
    write_file(directory / f"snapshot-{number:08d}.json", text, sync=True)
    segments, snapshots = _files(directory)
    for older, path in (*segments.items(), *snapshots.items()):
        if older < number:
            path.unlink(missing_ok=True)


# ---- reading ----------------------------------------------------------------------------------------------------


def _files(directory: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    segments: dict[int, Path] = {}
    snapshots: dict[int, Path] = {}
    if directory.is_dir():
        for path in directory.iterdir():
            if matched := _NAMES.fullmatch(path.name):
                (segments if matched[1] == "journal" else snapshots)[int(matched[2])] = path
    return segments, snapshots


def _read_snapshot(path: Path) -> tuple[dict[str, Any], float]:
    try:
        data = plain.loads(path.read_bytes())
        _same_format(data, path)
        return decode(dict[str, Any], data["machine"]), _time(data["time"])
    except (ValueError, KeyError, TypeError) as fault:
        raise DamagedError(
            f"the snapshot is damaged: {_why(fault)}",
            where=str(path),
            hint="put it back from a copy, or start with another journal_dir",
        ) from None


def read_segment(path: Path, *, kinds: EventKinds = POOL_EVENTS, last: bool = True) -> JournalContents:
    """Read a single segment file; only the last one may end with a half-written line."""
    events: list[tuple[float, Any]] = []
    instructions: list[tuple[str, ...] | None] = []
    notes: tuple[str, ...] = ()
    torn, length = None, 0
    with open(path, "rb") as file:
        lines = list(file)
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("the line is cut short")
            if number == 1:
                data = plain.loads(line)
                _same_format(data, path)
                notes = decode(tuple[str, ...], data.get("notes", []))
            else:
                now, event, done = _event(plain.loads(line), kinds)
                events.append((now, event))
                instructions.append(done)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as fault:
            if last and number == len(lines):
                torn = f"line {number} of {path} was half written and is left out"
                break
            raise DamagedError(
                f"the journal is damaged: {_why(fault)}",
                where=f"{path}, line {number}",
                hint="put the file back from a copy, or start with another journal_dir",
            ) from None
        length += len(line)
    last_time = events[-1][0] if events else 0.0
    return JournalContents(None, tuple(events), last_time, notes, torn, length=length, instructions=tuple(instructions))


def _event(data: Any, kinds: EventKinds) -> tuple[float, Any, tuple[str, ...] | None]:
    """(time, event, instructions), type-checked; every number is finite."""
    if not isinstance(data, list) or len(data) not in (3, 4):
        raise ValueError("an event is a time, a type and its fields")
    instructions = decode(tuple[str, ...], data[3]) if len(data) > 3 else None
    return _time(data[0]), decode(kinds[data[1]], data[2]), instructions


def _time(data: Any) -> float:
    at = decode(float, data)
    if not abs(at) <= LATEST:
        raise ValueError(f"the time {at:g} is beyond {LATEST:g} s")
    return at


def _why(fault: Exception) -> str:
    return f"{fault} is not known" if isinstance(fault, KeyError) else str(fault)


def _same_format(data: Any, path: Path) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("no header")
    version = decode(int, data.get("version", 0))
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise JournalVersionError(
            f"the journal has format {version}, {age} than {VERSION}, the only one that is read here",
            where=str(path),
            hint="use the version of trimtab that wrote it, or start with another journal_dir",
        )


def _segment_name(number: int) -> str:
    return f"journal-{number:08d}.jsonl"


def _line(data: Any) -> bytes:
    # A lone surrogate in a name becomes "?", so that the line can be read again.
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _write_at(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _sync_file(path: Path, again: bool) -> None:
    """Sync a file; after a failed sync it is rewritten, as its pages count as clean."""
    with contextlib.suppress(FileNotFoundError):  # its task was forgotten
        if again:
            write_file(path, path.read_bytes(), sync=True)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def compact(directory: Path, before: int) -> None:
    """Write the snapshot of everything before a segment, and delete the older files."""
    found = read_journal(directory, before=before)
    machine = PoolMachine.load(found.snapshot) if found.snapshot is not None else PoolMachine()
    for now, event in found.events:
        machine.handle(event, now)
    write_snapshot(directory, before, found.last_time, machine.dump())


if __name__ == "__main__":
    os.nice(10)
    gc.disable()  # all data stays alive
    compact(Path(sys.argv[1]), int(sys.argv[2]))
