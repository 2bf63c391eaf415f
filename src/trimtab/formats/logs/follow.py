"""Parses the log of a running job: bytes of its files in, complete steps out.

A step may come in several lines and files; several processes may write into one file, or each log the same steps. Lines
of each process are parsed separately, and a step counts once, as first logged. A step is emitted when the next one
begins, or when nothing was added to it between two calls of `settle`. Incomplete lines and event records wait for the
rest. What must never happen: a half line counts, a step counts twice, or lines of two processes make one step. No file
is opened here and no clock is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.frozen import Frozen
from trimtab.formats.logs.reader import JoinedSteps, disagree, periodic_work
from trimtab.formats.logs.records import LineBytes, LogFramework, LogLine, LogParser, StepRecord
from trimtab.formats.logs.tensorboard import EventBytes, is_event_head

NEAR_LINES = 50
"""Processes without a prefix that log the same step do so within this many lines; a restart takes more."""

MAX_PROCESSES = 256
LATE_STEPS = 1
"""A new process that is further behind than this was restarted."""

CHECKPOINTS = ("save_checkpoint", "checkpointing")


class LoggedStep(Frozen):
    """A complete step.

    `restart`: the run was restarted before it. `extra` is periodic work that made it longer; `saved`: it wrote a
    checkpoint, however quickly.
    """

    number: int
    values: Mapping[str, float]
    restart: bool = False
    extra: tuple[str, ...] = ()
    saved: bool = False


@dataclass
class _LogProcess:
    """A process that logs steps."""

    parser: LogParser
    named: bool  # has a prefix; lines without one may be of several processes
    newest: int = -1  # the last step that it logged; -1: none


@dataclass
class _LogFile:
    """A file, since it was last truncated or replaced."""

    head: bytes = b""  # until the kind of file is known
    lines: LineBytes | None = None
    events: EventBytes | None = None
    processes: dict[str, _LogProcess] = field(default_factory=dict)  # by the prefix of their lines
    open_event: StepRecord | None = None  # the step whose scalars are being read
    at_line: int = 0
    newest_line: int = -NEAR_LINES  # line of the newest step


class RunLog:
    """The log of a run, which may be several files."""

    def __init__(self, framework: LogFramework) -> None:
        self.framework = framework
        self.joined = JoinedSteps(framework)
        self.duplicates = 0  # records that another process logged already
        self._files: dict[str, _LogFile] = {}
        # Not emitted yet, oldest first; whether a restart precedes it.
        self._waiting: list[tuple[StepRecord, bool]] = []
        self._changes = self._changes_seen = 0
        self._arrived = self._arrived_seen = 0  # bytes
        self._leader: _LogProcess | None = None  # which logged the newest step

    # ---- input -----------------------------------------------------------------------------------------------------

    def take(self, name: str, data: bytes) -> list[LoggedStep]:
        """Add bytes of a file; return the steps that are complete now."""
        self._arrived += len(data)
        file = self._files.setdefault(name, _LogFile())
        if file.lines is None and file.events is None:
            file.head += data
            kind = is_event_head(file.head)
            if kind is None:
                return []
            data = self._begin(file, kind)
        self._read(file, data)
        return self._emit(include_newest=False)

    def file_replaced(self, name: str) -> None:
        """The file was truncated or replaced: the next bytes are its beginning. Incomplete input is dropped."""
        file = self._files.get(name)
        if file is None:
            return
        self._end_of(file, cut=True)
        processes = file.processes
        self._files[name] = again = _LogFile()
        # Kept, so that a process that begins again from an earlier step is known to be restarted.
        again.processes = {
            mark: _LogProcess(self.framework.line_parser(), process.named, process.newest)
            for mark, process in processes.items()
        }

    def settle(self) -> list[LoggedStep]:
        """Call periodically: a step to which nothing was added since the last call is complete."""
        if self._arrived == self._arrived_seen:
            for file in self._files.values():
                for mark, line in file.lines.quiet() if file.lines is not None else ():
                    self._take_line(file, mark, line)
        self._arrived_seen = self._arrived
        quiet = self._changes == self._changes_seen
        self._changes_seen = self._changes
        return self._emit(include_newest=quiet)

    def end(self) -> list[LoggedStep]:
        for file in self._files.values():
            if file.head and file.lines is None and file.events is None:
                data = self._begin(file, kind=False)
                self._read(file, data)
            self._end_of(file, cut=False)
        return self._emit(include_newest=True)

    @property
    def lines(self) -> int:
        return sum(file.lines.count for file in self._files.values() if file.lines is not None)

    # ---- files -----------------------------------------------------------------------------------------------------

    def _begin(self, file: _LogFile, kind: bool) -> bytes:
        if kind:
            file.events = EventBytes(self.framework.keeps)
        else:
            file.lines = LineBytes(self.framework.needles_with_json, self.framework.line_start)
        data, file.head = file.head, b""
        return data

    def _read(self, file: _LogFile, data: bytes) -> None:
        if file.events is not None:
            for scalar in file.events.take(data):
                record = file.open_event
                if record is None or scalar.step != record.step or scalar.tag in record.values:
                    self._close_event(file)
                    record = file.open_event = StepRecord(scalar.step)
                record.values[scalar.tag] = scalar.value
        elif file.lines is not None:
            for mark, line in file.lines.take(data):
                self._take_line(file, mark, line)

    def _take_line(self, file: _LogFile, mark: str, line: LogLine) -> None:
        file.at_line = file.lines.count if file.lines is not None else 0
        process = self._process(file, mark)
        for record in process.parser.take(line):
            self._take_record(file, process, record)

    def _process(self, file: _LogFile, mark: str) -> _LogProcess:
        if mark not in file.processes:
            while len(file.processes) >= MAX_PROCESSES:
                del file.processes[next(iter(file.processes))]
            file.processes[mark] = _LogProcess(self.framework.line_parser(), named=bool(mark))
        return file.processes[mark]

    def _close_event(self, file: _LogFile) -> None:
        record, file.open_event = file.open_event, None
        if record is not None:
            self._take_record(file, self._process(file, ""), record)

    def _end_of(self, file: _LogFile, *, cut: bool) -> None:
        """End a file; if it was cut, incomplete records of its processes are not whole."""
        if file.events is not None:
            if file.events.end():
                self.joined.cut_off += 1
            self._close_event(file)
        for mark, line in file.lines.end() if file.lines is not None else ():
            self._take_line(file, mark, line)
        for process in file.processes.values():
            for record in process.parser.end():
                record.whole = record.whole and not cut
                self._take_record(file, process, record)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _take_record(self, file: _LogFile, process: _LogProcess, record: StepRecord) -> None:
        newest = self.joined.newest
        timed = any(name.startswith(self.framework.prefix) for name in record.values)
        if record.whole and timed and newest is not None and self._is_duplicate(file, process, record, newest):
            process.newest = max(process.newest, record.step)
            self.duplicates += 1
            return
        before = dict(newest.values) if newest is not None else {}
        pieces = len(self.joined.pieces)
        if self.joined.take(record):
            process.newest, self._leader = record.step, process
            file.newest_line = file.at_line
            self._waiting.append((record, 0 < pieces < len(self.joined.pieces)))
            self._changes += 1
        elif newest is not None and newest.values != before:
            self._changes += 1

    def _is_duplicate(self, file: _LogFile, process: _LogProcess, record: StepRecord, newest: StepRecord) -> bool:
        """Whether another process logged this step already, and this is no restart."""
        if record.step > newest.step:
            return False
        if process is self._leader:
            near = record.step == newest.step and 0 < file.at_line - file.newest_line <= NEAR_LINES
            return near and not process.named and disagree(self.framework, record, newest)
        if process.newest >= 0:
            return record.step > process.newest  # slightly behind; else it was restarted
        return record.step >= newest.step - LATE_STEPS

    def _emit(self, *, include_newest: bool) -> list[LoggedStep]:
        """The complete steps that were not emitted yet; the newest may still grow."""
        until = len(self._waiting) if include_newest else len(self._waiting) - 1
        steps = []
        for record, restart in self._waiting[: max(until, 0)]:
            values = dict(record.values)
            saved = any(values.get(self.framework.prefix + name, 0.0) > 0 for name in CHECKPOINTS)
            steps.append(LoggedStep(record.step, values, restart, periodic_work(self.framework, values), saved))
        del self._waiting[: len(steps)]
        return steps
