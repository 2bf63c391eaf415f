"""One run's log while it grows: bytes of its files in, whole steps out.

A step may come in several lines, and in several files; several processes may write into one file, or each log the same
steps. Every process's lines are read on their own, so that a block of one is never mixed with another's, and a step
counts once, as the process that told it first told it. A step is given out when the next one begins, or when nothing
was added to it between two calls of `settle`. What must never happen: that a half line counts, that a step counts
twice, or that lines of two processes make one step. No file is opened here and no clock is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.formats.logs.follow_bytes import EventBytes, LineBytes, is_event_head
from trimtab.formats.logs.reader import JoinedSteps, disagree, periodic_work
from trimtab.formats.logs.records import LogFramework, LogLine, LogParser, StepRecord

NEAR_LINES = 50
"""Two processes that log the same step without a mark of their own do so within so many lines; a restart takes more."""

MAX_PROCESSES = 256
LATE_STEPS = 1
"""A process seen for the first time that is further behind than this was started anew."""

CHECKPOINTS = ("save_checkpoint", "checkpointing")


@dataclass(frozen=True)
class LoggedStep:
    """One whole step.

    `restart`: the run was started anew before it. `extra` is periodic work that made it longer; `saved`: a checkpoint
    was written in it, however quickly.
    """

    number: int
    values: Mapping[str, float]
    restart: bool = False
    extra: tuple[str, ...] = ()
    saved: bool = False


@dataclass
class _LogProcess:
    """One process that logs steps."""

    parser: LogParser
    named: bool  # it has a mark; lines without one may be of several
    newest: int = -1  # the last step that it told; -1: none


@dataclass
class _LogFile:
    """One file, from where it was last started anew."""

    head: bytes = b""  # until it is known what kind of file it is
    lines: LineBytes | None = None
    events: EventBytes | None = None
    processes: dict[str, _LogProcess] = field(default_factory=dict)  # by the mark before their lines
    open_event: StepRecord | None = None  # the step whose scalars are coming
    at_line: int = 0
    told_at: int = -NEAR_LINES  # the line of the newest step


class RunLog:
    """The log of one run, which may be several files."""

    def __init__(self, framework: LogFramework) -> None:
        self.framework = framework
        self.joined = JoinedSteps(framework)
        self.duplicates = 0  # records that another process told already
        self._files: dict[str, _LogFile] = {}
        self._waiting: list[
            tuple[StepRecord, bool]
        ] = []  # not given out yet, oldest first; whether a restart is before it
        self._changes = self._changes_seen = 0
        self._arrived = self._arrived_seen = 0  # bytes
        self._leader: _LogProcess | None = None  # who told the newest step

    # ---- what comes ------------------------------------------------------------------------------------------------

    def take(self, name: str, data: bytes) -> list[LoggedStep]:
        """More bytes of a file; the steps that are whole now."""
        self._arrived += len(data)
        file = self._files.setdefault(name, _LogFile())
        if file.lines is None and file.events is None:
            file.head += data
            kind = is_event_head(file.head)
            if kind is None:
                return []
            data = self._begin(file, kind)
        self._read(file, data)
        return self._given(all_of=False)

    def file_replaced(self, name: str) -> None:
        """The file was truncated or replaced: what follows is its beginning. What was half there is lost."""
        file = self._files.get(name)
        if file is None:
            return
        self._end_of(file, cut=True)
        processes = file.processes
        self._files[name] = again = _LogFile()
        # They are remembered, so that one which begins again from an earlier step is known to have been restarted.
        again.processes = {
            mark: _LogProcess(self.framework.parser(), process.named, process.newest)
            for mark, process in processes.items()
        }

    def settle(self) -> list[LoggedStep]:
        """To be called now and then: a step to which nothing was added since the last call is whole."""
        if self._arrived == self._arrived_seen:
            for file in self._files.values():
                for at, mark, line in file.lines.quiet() if file.lines is not None else ():
                    self._take_line(file, at, mark, line)
        self._arrived_seen = self._arrived
        quiet = self._changes == self._changes_seen
        self._changes_seen = self._changes
        return self._given(all_of=quiet)

    def end(self) -> list[LoggedStep]:
        """Nothing more will come."""
        for file in self._files.values():
            if file.head and file.lines is None and file.events is None:
                data = self._begin(file, kind=False)
                self._read(file, data)
            self._end_of(file, cut=False)
        return self._given(all_of=True)

    @property
    def lines(self) -> int:
        """Lines of text that were read, of the files as they are now."""
        return sum(file.lines.count for file in self._files.values() if file.lines is not None)

    # ---- files -----------------------------------------------------------------------------------------------------

    def _begin(self, file: _LogFile, kind: bool) -> bytes:
        if kind:
            file.events = EventBytes(self.framework.keeps)
        else:
            file.lines = LineBytes(self.framework.needles, self.framework.starts)
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
            for at, mark, line in file.lines.take(data):
                self._take_line(file, at, mark, line)

    def _take_line(self, file: _LogFile, at: int, mark: str, line: LogLine) -> None:
        file.at_line = at
        process = self._process(file, mark)
        for record in process.parser.take(line):
            self._take_record(file, process, record)

    def _process(self, file: _LogFile, mark: str) -> _LogProcess:
        if mark not in file.processes:
            while len(file.processes) >= MAX_PROCESSES:
                del file.processes[next(iter(file.processes))]
            file.processes[mark] = _LogProcess(self.framework.parser(), named=bool(mark))
        return file.processes[mark]

    def _close_event(self, file: _LogFile) -> None:
        record, file.open_event = file.open_event, None
        if record is not None:
            self._take_record(file, self._process(file, ""), record)

    def _end_of(self, file: _LogFile, *, cut: bool) -> None:
        """A file has ended; where it was cut, what its processes had begun is not whole."""
        if file.events is not None:
            if file.events.end():
                self.joined.cut_off += 1
            self._close_event(file)
        for at, mark, line in file.lines.end() if file.lines is not None else ():
            self._take_line(file, at, mark, line)
        for process in file.processes.values():
            for record in process.parser.end():
                record.whole = record.whole and not cut
                self._take_record(file, process, record)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _take_record(self, file: _LogFile, process: _LogProcess, record: StepRecord) -> None:
        newest = self.joined.newest
        timed = any(name.startswith(self.framework.prefix) for name in record.values)
        if record.whole and timed and newest is not None and self._told_already(file, process, record, newest):
            process.newest = max(process.newest, record.step)
            self.duplicates += 1
            return
        before = dict(newest.values) if newest is not None else {}
        pieces = len(self.joined.pieces)
        if self.joined.take(record):
            process.newest, self._leader = record.step, process
            file.told_at = file.at_line
            self._waiting.append((record, 0 < pieces < len(self.joined.pieces)))
            self._changes += 1
        elif newest is not None and newest.values != before:
            self._changes += 1

    def _told_already(self, file: _LogFile, process: _LogProcess, record: StepRecord, newest: StepRecord) -> bool:
        """Whether another process told this step, and this is not the run started anew."""
        if record.step > newest.step:
            return False
        if process is self._leader:
            near = record.step == newest.step and 0 < file.at_line - file.told_at <= NEAR_LINES
            return near and not process.named and disagree(self.framework, record, newest)
        if process.newest >= 0:
            return record.step > process.newest  # it goes on, a little behind; else it has begun again
        return record.step >= newest.step - LATE_STEPS

    def _given(self, *, all_of: bool) -> list[LoggedStep]:
        """The steps that are whole and were not given out yet; of the newest one more may come."""
        until = len(self._waiting) if all_of else len(self._waiting) - 1
        given = [_step(self.framework, record, restart) for record, restart in self._waiting[: max(until, 0)]]
        del self._waiting[: len(given)]
        return given


def _step(framework: LogFramework, record: StepRecord, restart: bool) -> LoggedStep:
    saved = any(record.values.get(framework.prefix + name, 0.0) > 0 for name in CHECKPOINTS)
    return LoggedStep(record.step, dict(record.values), restart, periodic_work(framework, record.values), saved)
