"""Tails growing log files, also if they are rotated, truncated, replaced or missing for a while.

Read-only and without locks; the writer is not affected. A file is identified by its inode and first bytes, so one that
was started anew is read from its beginning even if it has grown past the old position. Pipes and devices are refused,
because reading would take data from their readers.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.formats.logs import reader as logs

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 256

_RANK = re.compile(r"(?i)(rank|worker|proc|process)[_.-]?(\d+)")


@dataclass
class _OpenFile:
    """One file that is being read."""

    path: Path
    descriptor: int
    inode: tuple[int, int]
    offset: int = 0
    head: bytes = b""
    seen: tuple[int, int] = (-1, -1)  # size and mtime at the last read


@dataclass
class LogTail:
    """The files of one run. A folder stands for the logs in it, including new ones."""

    paths: Sequence[Path]
    restarts: int = 0  # times that a file was started anew
    gone: set[Path] = field(default_factory=set)  # files that are missing at the moment
    skipped_ranks: tuple[Path, ...] = ()  # other ranks' logs of the same steps
    _open: dict[Path, _OpenFile] = field(default_factory=dict)

    def files(self) -> list[Path]:
        """The files in reading order; InputError without any."""
        found: list[Path] = []
        for path in self.paths:
            if path.is_dir():
                found.extend(self._folder(path))
            else:
                found.append(path)
        return list(dict.fromkeys(found))

    def _folder(self, path: Path) -> list[Path]:
        try:
            inside = logs.files_of(path)
        except InputError:
            if any(file.parent == path for file in self._open):
                return [file for file in self._open if file.parent == path]
            raise
        kept = first_ranks(inside)
        self.skipped_ranks = tuple(file for file in inside if file not in kept)
        return kept

    def check(self) -> None:
        """Raise InputError if a path cannot be followed."""
        for path in self.files():
            try:
                mode = path.stat().st_mode
            except OSError as error:
                raise InputError(f"the log {path} cannot be read: {error.strerror}", hint=_HINT) from None
            if not stat.S_ISREG(mode):
                raise InputError(f"{path} is no file that can be followed", hint=_HINT)

    def read(self) -> Iterator[tuple[str, bytes | None]]:
        """(name, bytes) of new data, file by file; None for bytes: the file begins anew."""
        for path in self.files():
            file = self._open.get(path) or self._open_file(path)
            if file is not None:
                yield from self._read_new(file)

    def close(self) -> None:
        for file in self._open.values():
            os.close(file.descriptor)
        self._open.clear()

    def _open_file(self, path: Path) -> _OpenFile | None:
        # Non-blocking: what was a file a moment ago may be a pipe by now.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self.gone.add(path)
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            self.gone.add(path)
            return None
        self.gone.discard(path)
        self._open[path] = file = _OpenFile(path, descriptor, (status.st_dev, status.st_ino))
        return file

    def _read_new(self, file: _OpenFile) -> Iterator[tuple[str, bytes | None]]:
        name = str(file.path)
        if self._truncated(file):
            file.offset, file.head = 0, b""
            self.restarts += 1
            yield name, None
        yield from self._read_rest(file)
        if self._replaced(file):
            # Renamed and created again: read what was written to the old file until then.
            yield from self._read_rest(file)
            os.close(file.descriptor)
            del self._open[file.path]
            self.restarts += 1
            yield name, None
            again = self._open_file(file.path)
            if again is not None:
                yield from self._read_rest(again)

    def _read_rest(self, file: _OpenFile) -> Iterator[tuple[str, bytes | None]]:
        while data := os.pread(file.descriptor, CHUNK_BYTES, file.offset):
            if file.offset < HEAD_BYTES:
                file.head = (file.head + data)[:HEAD_BYTES]
            file.offset += len(data)
            yield str(file.path), data

    def _truncated(self, file: _OpenFile) -> bool:
        """Whether the file was truncated, and perhaps written again."""
        status = os.fstat(file.descriptor)
        seen, file.seen = file.seen, (status.st_size, status.st_mtime_ns)
        if status.st_size < file.offset:
            return True
        return seen != file.seen and os.pread(file.descriptor, len(file.head), 0) != file.head

    def _replaced(self, file: _OpenFile) -> bool:
        try:
            status = file.path.stat()
        except OSError:
            self.gone.add(file.path)
            return False  # it may come back; until then the old file is read on
        self.gone.discard(file.path)
        return (status.st_dev, status.st_ino) != file.inode


_HINT = "name the run's console log, its JSON lines, or the folder of its event files"


def first_ranks(files: Sequence[Path]) -> list[Path]:
    """Of files that differ only in a rank or worker number, the first: the others log the same steps."""
    lowest: dict[str, tuple[int, Path]] = {}
    for path in files:
        found = _RANK.search(path.name)
        key = path.name if found is None else f"{path.name[: found.start(2)]}*{path.name[found.end(2) :]}"
        number = 0 if found is None else int(found[2])
        if key not in lowest or number < lowest[key][0]:
            lowest[key] = number, path
    kept = {path for _, path in lowest.values()}
    return [path for path in files if path in kept]


@contextlib.contextmanager
def open_tail(paths: Sequence[Path]) -> Iterator[LogTail]:
    tail = LogTail(paths)
    try:
        tail.check()
        yield tail
    finally:
        tail.close()
