"""Tails the log files of a run that another program writes; `FileTail` reads each."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.formats.logs import reader as logs
from trimtab.runtime.store.files import FileTail

_RANK = re.compile(r"(?i)(rank|worker|proc|process)[_.-]?(\d+)")


@dataclass
class LogTail:
    """The files of one run. A folder stands for the logs in it, including new ones."""

    paths: Sequence[Path]
    restarts: int = 0  # times that a file was started anew
    skipped_ranks: tuple[Path, ...] = ()  # other ranks' logs of the same steps
    _tails: dict[Path, FileTail] = field(default_factory=dict)

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
            if any(file.parent == path for file in self._tails):
                return [file for file in self._tails if file.parent == path]
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

    @property
    def gone(self) -> set[Path]:
        """Files that are missing at the moment."""
        return {path for path, tail in self._tails.items() if tail.gone}

    def read(self) -> Iterator[tuple[str, bytes | None]]:
        """(name, bytes) of new data, file by file; None for bytes: the file begins anew."""
        for path in self.files():
            tail = self._tails.setdefault(path, FileTail(path))
            try:
                for data in tail.read():
                    self.restarts += data is None
                    yield str(path), data
            except OSError:
                tail.gone = True

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


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
