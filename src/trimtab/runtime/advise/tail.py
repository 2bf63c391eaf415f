"""Files that grow, read as they grow: also where they are rotated, truncated, replaced, or not there for a while.

Reads only, and holds no lock; the writer never notices. A file is known by its inode and its first bytes, so that one
that was started anew is read from its beginning even if it has already grown past where the old one ended. A pipe or
a device is refused, because reading it would take from others what it gives.
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
    seen: tuple[int, int] = (-1, -1)  # size and time of the last change, when it was last looked at


@dataclass
class LogTail:
    """The files of one run. A folder stands for the logs in it, new ones among them."""

    paths: Sequence[Path]
    anew: int = 0  # times that a file was started anew
    gone: set[Path] = field(default_factory=set)  # files that are not there at the moment
    skipped_ranks: tuple[Path, ...] = ()  # other ranks' logs of the same steps
    _open: dict[Path, _OpenFile] = field(default_factory=dict)

    def files(self) -> list[Path]:
        """The files there are, in the order in which they are read; InputError where there is none at all."""
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
        """Raise InputError where something that was named cannot be followed."""
        for path in self.files():
            try:
                mode = path.stat().st_mode
            except OSError as error:
                raise InputError(f"the log {path} cannot be read: {error.strerror}", hint=_HINT) from None
            if not stat.S_ISREG(mode):
                raise InputError(f"{path} is no file that can be followed", hint=_HINT)

    def read(self) -> Iterator[tuple[str, bytes | None]]:
        """(name, bytes) of whatever is new, file by file, to its present end; None for bytes: the file begins anew."""
        for path in self.files():
            file = self._open.get(path) or self._opened(path)
            if file is not None:
                yield from self._new_in(file)

    def close(self) -> None:
        """Let go of all files."""
        for file in self._open.values():
            os.close(file.descriptor)
        self._open.clear()

    def _opened(self, path: Path) -> _OpenFile | None:
        # Without waiting: what was a file a moment ago may be a pipe by now.
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

    def _new_in(self, file: _OpenFile) -> Iterator[tuple[str, bytes | None]]:
        name = str(file.path)
        if self._began_anew(file):
            file.offset, file.head = 0, b""
            self.anew += 1
            yield name, None
        yield from self._rest_of(file)
        if self._replaced(file):
            # Renamed away and made again: what was written before the change of names has been read by now.
            yield from self._rest_of(file)
            os.close(file.descriptor)
            del self._open[file.path]
            self.anew += 1
            yield name, None
            again = self._opened(file.path)
            if again is not None:
                yield from self._rest_of(again)

    def _rest_of(self, file: _OpenFile) -> Iterator[tuple[str, bytes | None]]:
        while data := os.pread(file.descriptor, CHUNK_BYTES, file.offset):
            if file.offset < HEAD_BYTES:
                file.head = (file.head + data)[:HEAD_BYTES]
            file.offset += len(data)
            yield str(file.path), data

    def _began_anew(self, file: _OpenFile) -> bool:
        """Whether the file was truncated, and written again perhaps."""
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
            return False  # it may come back; until then the old one is read on
        self.gone.discard(file.path)
        return (status.st_dev, status.st_ino) != file.inode


_HINT = "name the run's console log, its JSON lines, or the folder of its event files"


def first_ranks(files: Sequence[Path]) -> list[Path]:
    """Of files that differ only in the number of a rank or worker, the first one: the others log the same steps."""
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
def following(paths: Sequence[Path]) -> Iterator[LogTail]:
    """A tail of these files, let go of in the end."""
    tail = LogTail(paths)
    try:
        tail.check()
        yield tail
    finally:
        tail.close()
