"""The common form of all training logs: numbered records of named values.

A `LogFramework` describes how its lines are parsed and what its timers mean; the readers treat all frameworks alike.
Lines are cleaned here (colours, Ray's prefixes, carriage returns of progress bars). Garbage is never an error: a line
that is not understood is not a record.

A console line of metrics, separated by ` - `, is often copied from a window of 80 or 120 columns: it then continues in
lines of the same width without the prefix of its process, broken anywhere, also inside a name or a number. So is a
dictionary of metrics, which goes on until its brace closes. What must never happen: half a number is read, or an
unrelated line is joined. So a line that may continue is held back until the next one decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from trimtab.core.frozen import Frozen
from trimtab.formats.files import unreadable

MAX_LINE_BYTES = 1 << 20

_BARE_COLOURS = re.compile(r"\[\d{0,3}(?:;\d{1,3}){0,4}m")
"""Colours copied from a web page, which drops the escape character."""

_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_RAY_PREFIX = re.compile(r"^\((?:[^()]|\([^()]*\))*\bpid=\d+[^()]*\) ?")
_LABEL = re.compile(r"\[(?:rank|default)_?\d+\]:? ?|\s{0,6}\d{1,6}: ")
_PROCESS = re.compile(rf"(?:{_RAY_PREFIX.pattern})|(?:{_LABEL.pattern})")
_RAY_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_PREFIX_CHARACTERS = 300
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WRAPPED = re.compile(r"[A-Za-z][\w.]*\(([^(),]*)(?:,[^()]*)?\)")

_LABELS_BEGIN = frozenset("[ 0123456789")

MAX_STEP_DIGITS = 12
MAX_NUMBER_CHARACTERS = 80
LARGEST_VALUE = 1e15
"""Larger values are garbage: no time or token count is larger."""


@dataclass
class StepRecord:
    """The values that a step logged, by the framework's names. `whole` is false if the line was cut off."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
    whole: bool = True


class LogParser(Protocol):
    """Parses the lines of one process, in order, into records."""

    def take(self, line: LogLine) -> Iterable[StepRecord]:
        """The records completed by this line."""
        ...

    def end(self) -> Iterable[StepRecord]:
        """The incomplete record, if any: no more lines follow."""
        ...


class LineParser(Frozen):
    """The parser of a framework that logs each step in a line."""

    read: Callable[[LogLine], StepRecord | None]

    def take(self, line: LogLine) -> tuple[StepRecord, ...]:
        record = self.read(line)
        return () if record is None else (record,)

    def end(self) -> tuple[StepRecord, ...]:
        return ()


class Wait(Frozen):
    """A component's time is a wait in a run that logs one of `timers` (a prefix if it ends in /), but no `unless`."""

    component: str
    timers: tuple[str, ...]
    reason: str
    unless: tuple[str, ...] = ()

    def applies(self, names: frozenset[str]) -> bool:
        starts = tuple(timer for timer in self.timers if timer.endswith("/"))
        logged = not names.isdisjoint(self.timers) or any(name.startswith(starts) for name in names if starts)
        return logged and names.isdisjoint(self.unless)


class LogFramework(Frozen):
    """How a training framework logs.

    - A line without any of the `needles` is skipped.
    - `parts` maps a component to alternatives, each a set of timers to add up; the first one with any timer counts.
    - `waits` are the times that contain waiting; of several reasons for a component the first counts.
    - `lengths` are names of the mean response length, `answers` the number of responses; `tokens` counts all tokens.
    - `reward` is the name of a step's mean reward; `kept` are prefixes of further values that are used.
    - `timers_exclude_waits`: timers contain no waiting, even where components run side by side.
    - `last` is the component whose timer may start before its input is there.
    - `other_timers` are timers of no component that are part of a step.
    - `line_start` finds the start of a console line that a narrow window may have wrapped.
    - `late_total` is a timer of runs that log with each step the total of the step before.
    - `complete` adds to a step's values what follows from them.
    - `named` gives a name in JSON lines, W&B and TensorBoard as the console has it; `rows_add_up`: rows without a step
      are of calls, and belong to the next row with one.
    - `supported_logs` lists the supported kinds of logs, for messages.
    """

    name: str
    supported_logs: str
    prefix: str
    marker: re.Pattern[str]
    parser: Callable[[], LogParser]
    needles: tuple[bytes, ...]
    parts: Mapping[str, tuple[tuple[str, ...], ...]]
    total: str
    periodic: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    waits: tuple[Wait, ...] = ()
    lengths: tuple[str, ...] = ()
    answers: str = ""
    tokens: Callable[[Mapping[str, float]], float | None] | None = None
    reward: str = ""
    kept: tuple[str, ...] = ()
    timers_exclude_waits: bool = False
    last: str = ""
    other_timers: tuple[str, ...] = ()
    line_start: re.Pattern[str] | None = None
    late_total: str = ""
    complete: Callable[[dict[str, float]], None] | None = None
    named: Callable[[str], str] = str
    rows_add_up: bool = False

    @cached_property
    def needles_with_json(self) -> tuple[bytes, ...]:
        """What a line of the console, or of JSON, has one of."""
        return (
            (*self.needles, f'"{self.prefix}'.encode(), b"profiling/Time taken", b'"train/step_time')
            if self.prefix
            else self.needles
        )

    @cached_property
    def timers(self) -> frozenset[str]:
        """The names of the components' timers."""
        return frozenset(self.prefix + t for ways in self.parts.values() for timers in ways for t in timers)

    @cached_property
    def _kept(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, *self.lengths, self.answers, self.reward, *self.kept)))

    def keeps(self, name: str) -> bool:
        """Whether a logged value is used; the rest is dropped early, as logs are large."""
        return name.startswith(self._kept)

    def parse(self, path: Path) -> Iterator[StepRecord]:
        """The records of a text log. Raises InputError."""
        parser = self.line_parser()
        for line in read_lines(path, self.needles_with_json, self.line_start):
            yield from parser.take(line)
        yield from parser.end()

    def line_parser(self) -> LogParser:
        """The parser of a text log's lines: those of the console, and JSON lines."""
        return _JsonFirst(self, self.parser())

    def metrics(self, text: str, between: str, sign: str, named: Callable[[str], str] = str) -> dict[str, float]:
        """The used values of a line of `name<sign>number`, under the names that `named` gives them."""
        values = {}
        for item in text.split(between):
            name, found, value = item.rpartition(sign)
            key = named(name.strip())
            if found and self.keeps(key) and (read := number(value)) is not None:
                values[key] = read
        return values

    def waiting(self, names: frozenset[str]) -> dict[str, str]:
        """The components whose times are waits in a run that logs these names, with the reason."""
        return {wait.component: wait.reason for wait in reversed(self.waits) if wait.applies(names)}

    def token_counts(self, values: Mapping[str, float]) -> tuple[float | None, float | None]:
        """(response tokens of the step, mean response length), each None if unknown."""
        length = next((found for name in self.lengths if (found := values.get(name, 0.0)) > 0), None)
        if self.tokens is not None:
            return self.tokens(values), length
        answers = values.get(self.answers, 0.0)
        return length * answers if length and answers > 0 else None, length


STEP_KEYS = ("train/global_step", "training/global_step", "rollout/step", "train/step", "global_step", "step", "_step")
"""Names under which loggers keep a step, the most telling first."""


def values_of(framework: LogFramework, data: Mapping[str, Any]) -> tuple[int | None, dict[str, float]]:
    """(the step, the used values) of a row of named values, also if they are below `data` or `metrics`."""
    row = dict(data)
    for key in ("data", "metrics"):
        if isinstance(inner := row.get(key), dict):
            row |= inner
    step = next((n for key in STEP_KEYS if (n := step_number(str(row.get(key)).removesuffix(".0"))) is not None), None)
    values = {}
    for name, value in row.items():
        key = framework.named(str(name))
        if framework.keeps(key) and isinstance(value, int | float) and not isinstance(value, bool):
            read = number(repr(value))
            if read is not None:
                values[key] = read
    return step, values


class Rows:
    """Makes records of rows of named values. Rows of calls add up until the next row with a step of the run."""

    def __init__(self, framework: LogFramework) -> None:
        self._framework = framework
        self._calls: dict[str, float] = {}

    def take(self, row: Mapping[str, Any], at: int | None = None) -> Iterator[StepRecord]:
        """The record that a row completes; `at` is the logger's own step."""
        step, values = values_of(self._framework, row)
        if not self._framework.rows_add_up:
            if (number := at if step is None else step) is not None:
                yield StepRecord(number, values)
        elif step is None or not any(key in row for key in STEP_KEYS[:-1]):
            for name, value in values.items():
                self._calls[name] = self._calls.get(name, 0.0) + value
        else:
            yield StepRecord(step, {**self._calls, **values})
            self._calls = {}


class _JsonFirst:
    """Parses a line that is a JSON object of metrics as such, and gives every other one to the console's parser."""

    def __init__(self, framework: LogFramework, console: LogParser) -> None:
        self._framework = framework
        self._console = console
        self._rows = Rows(framework)

    def take(self, line: LogLine) -> Iterable[StepRecord]:
        own = list(self._console.take(line))
        if own or not line.text.lstrip().startswith("{"):
            return own
        try:
            data = json.loads(line.text)
        except (ValueError, RecursionError):
            return own
        found = list(self._rows.take(data)) if isinstance(data, dict) else []
        return [one for one in found if any(name.startswith(self._framework.prefix) for name in one.values)]

    def end(self) -> Iterable[StepRecord]:
        return self._console.end()


class LogLine(Frozen):
    """A cleaned line. `whole` is false for a last line without a newline: it may be cut off."""

    text: str
    whole: bool = True


def uncoloured(text: str) -> str:
    """A line without colours, also those without their escape character."""
    text = _COLOURS.sub("", text) if "\x1b" in text else text
    return _BARE_COLOURS.sub("", text) if "[0m" in text else text


def clean(text: str) -> str:
    """A line without colours and without prefixes of Ray, torchrun or srun."""
    text = uncoloured(text)
    if text.startswith("("):
        # Only the start is searched: bounds the time for odd lines.
        text = _RAY_PREFIX.sub("", text[:_PREFIX_CHARACTERS], count=1) + text[_PREFIX_CHARACTERS:]
    elif text[:1] in _LABELS_BEGIN and (label := _LABEL.match(text)):
        text = text[label.end() :]
    return _RAY_REPEATED.sub("", text) if "[repeated " in text else text


def process_of(text: str) -> str:
    """The process that wrote a line: the prefix of Ray, torchrun or srun; empty without one."""
    text = uncoloured(text[:_PREFIX_CHARACTERS])
    found = _PROCESS.match(text[:_PREFIX_CHARACTERS])
    return found[0].strip() if found else ""


def number(text: str) -> float | None:
    """A finite number, plain or wrapped as in `np.float64(1.5)`; `None` for anything else."""
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    if text.endswith(")") and (inside := _WRAPPED.fullmatch(text)):
        text = inside[1].strip()
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if abs(value) <= LARGEST_VALUE else None


def step_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_STEP_DIGITS else None


NARROWEST, WIDEST = 40, 320
"""Widths of windows from which logs are copied; wider lines were not wrapped."""

MAX_PIECES = 1_000
TRIMMED = 2
"""Columns that a wrapped line may lack, where trailing blanks were lost."""

_WORDS = frozenset(("nan", "inf", "-inf", "True", "False", "None"))


class WrappedLines:
    """Joins wrapped lines. `line_start` finds the start of a line that may be wrapped."""

    def __init__(self, line_start: re.Pattern[str] | None) -> None:
        self._starts = line_start
        self._open = ""
        self._pieces = 0
        self._width = self._last = 0

    @property
    def holds(self) -> bool:
        return self._pieces > 0

    def take(self, raw: str, whole: bool = True) -> Iterator[tuple[str, LogLine]]:
        """The lines that are complete now, each with its process."""
        if self._pieces and self._continues(raw):
            self._join(raw)
            if whole and self._pieces < MAX_PIECES and self._last >= self._width - TRIMMED and not self._closed:
                return
            yield from self._release(whole)
            return
        yield from self._release(whole=True)
        text = uncoloured(raw)
        if whole and self._starts and NARROWEST <= len(text) <= WIDEST and self._starts.search(text):
            self._open, self._pieces, self._width, self._last = text, 1, len(text), len(text)
            if self._closed:
                yield from self._release(whole)
        else:
            yield process_of(raw), LogLine(clean(raw), whole)

    def end(self) -> Iterator[tuple[str, LogLine]]:
        """The line held back: nothing follows."""
        yield from self._release(whole=True)

    def _release(self, whole: bool) -> Iterator[tuple[str, LogLine]]:
        if self._pieces:
            raw, self._open, self._pieces = self._open, "", 0
            yield process_of(raw), LogLine(clean(raw), whole)

    @property
    def _is_dict(self) -> bool:
        return "{'" in self._open or '{"' in self._open

    @property
    def _closed(self) -> bool:
        """Whether a dictionary of metrics is complete."""
        return self._is_dict and self._open.count("}") >= self._open.count("{")

    def _continues(self, raw: str) -> bool:
        text = uncoloured(raw)
        if not text.strip() or len(text) > self._width or process_of(raw) or self._last < self._width - TRIMMED:
            return False
        if self._is_dict:
            return not self._closed and not (self._starts and self._starts.search(text))
        before = self._open.rpartition(" - ")[2]
        cut = not _is_item(before)
        if not cut and self._starts and (begun := self._starts.search(text)) and not begun.start():
            return False  # the next step
        if self._pieces == 1 and not cut and " - " not in f" {text} ":
            return False  # a lone number or word: not a continuation
        items = _joined(before, text).split(" - ")
        if len(text) >= self._width - TRIMMED:
            items.pop()  # it may itself be cut
        return all(_is_item(item) for item in items if item.strip(" -"))

    def _join(self, raw: str) -> None:
        text = uncoloured(raw)
        if self._is_dict and self._open.endswith((",", ":")) and not text.startswith(" "):
            self._open += " "  # lost at the end of the line
        self._open = self._open + text if self._is_dict else _joined(self._open, text)
        self._pieces += 1
        self._last = len(text)


def _joined(before: str, after: str) -> str:
    """Two pieces of a line, with the lost blank between them restored."""
    lost = (before.endswith(" -") and not after.startswith(" ")) or (
        after.startswith("- ") and not before.endswith(" ")
    )
    return f"{before} {after}" if lost else before + after


def _is_item(text: str) -> bool:
    name, colon, value = text.strip().rpartition(":")
    return (
        bool(colon and name) and not any(c.isspace() for c in name) and (number(value) is not None or value in _WORDS)
    )


class LineBytes:
    """Splits a text file into lines that contain a needle, each with its process; `count` is its number."""

    def __init__(self, needles: tuple[bytes, ...], line_start: re.Pattern[str] | None = None) -> None:
        self.count = 0
        self._needles = needles
        self._wraps = WrappedLines(line_start)
        self._rest = b""

    def take(self, data: bytes) -> Iterator[tuple[str, LogLine]]:
        """The lines completed by these bytes. A carriage return ends a line too: progress bars use it."""
        # A file truncated under its writer begins with zeros.
        data = data.replace(b"\r", b"\n").replace(b"\0", b"")
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            # No log has such lines: dropped, so that no file fills the memory.
            self._rest = b""
        for line in whole:
            self.count += 1
            # A line after one that may be wrapped is always checked.
            if self._wraps.holds or any(needle in line for needle in self._needles):
                yield from self._wraps.take(_decoded(line[:MAX_LINE_BYTES]))

    def quiet(self) -> Iterator[tuple[str, LogLine]]:
        """Nothing came for a while: release the line held back."""
        yield from self._wraps.end()

    def end(self) -> Iterator[tuple[str, LogLine]]:
        """The last line if it has no newline: it may be cut off."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self.count += 1
            yield from self._wraps.take(_decoded(rest), whole=False)
        yield from self._wraps.end()


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def read_lines(
    path: Path, needles: tuple[bytes, ...] = (b"",), line_start: re.Pattern[str] | None = None
) -> Iterator[LogLine]:
    """The lines of a log that contain a needle, with wrapped ones joined. Raises InputError."""
    lines = LineBytes(needles, line_start)
    try:
        with path.open("rb") as file:
            while data := file.read(MAX_LINE_BYTES):
                yield from (line for _, line in lines.take(data))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    yield from (line for _, line in lines.end())
