"""Files that are whole at any moment: replaced atomically, or appended to and read by whole lines."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 256  # of a file, to know it again


def write_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file atomically: temporary file, then rename. Readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:  # not supported by some shared file systems
        pass
    finally:
        os.close(descriptor)


def read_lines(path: Path, since: int = 0) -> tuple[list[bytes], int]:
    """Whole lines after byte `since`, and the position after them. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(since)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
    return whole.split(b"\n")[:-1], since + len(whole)


class AppendLog:
    """Appends whole lines to a file. What the disk refuses stays pending and is tried again; `fault` says why.

    A line that a crash left half-written is cut at opening, which raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.fault: str | None = None
        self._unwritten: list[bytes] = []
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.lseek(self._descriptor, 0, os.SEEK_END)
        at = max(0, size - 2**22)
        tail = os.pread(self._descriptor, size - at, at)
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._descriptor, at + tail.rfind(b"\n") + 1)

    def append(self, line: str) -> None:
        self._unwritten.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> bool:
        """Write pending lines; whether none is left."""
        while self._unwritten and self._descriptor is not None:
            end = os.lseek(self._descriptor, 0, os.SEEK_END)
            try:
                if os.write(self._descriptor, self._unwritten[0]) < len(self._unwritten[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as fault:
                with contextlib.suppress(OSError):  # no half line stays behind
                    os.ftruncate(self._descriptor, end)
                self.fault = str(fault.strerror or fault)
                return False
            self._unwritten.pop(0)
        self.fault = None
        return not self._unwritten

    def close(self) -> None:
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class FileTail:
    """Reads a growing file, also if it is rotated, truncated, replaced or missing for a while.

    Read-only and without locks. A file is identified by its inode and first bytes, so one that was started anew is read
    from its beginning even if it has grown past the old position. Pipes and devices count as missing, because reading
    would take data from their readers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gone = False  # missing at the moment
        self._descriptor: int | None = None
        self._inode = (0, 0)
        self._partial = b""  # of a line
        self._forget()

    def read(self) -> Iterator[bytes | None]:
        """New data in pieces; None: the file begins anew. Raises OSError."""
        if self._descriptor is None and not self._open():
            return
        if self._is_truncated():
            self._forget()
            yield None
        yield from self._rest()
        if self._is_replaced():
            yield from self._rest()  # what was written to the old file until then
            self.close()
            yield None
            if self._open():
                yield from self._rest()

    def lines(self, max_bytes: int) -> tuple[bool, list[bytes]]:
        """Whether the file begins anew, and its new whole lines, of about `max_bytes`. A deleted file begins anew."""
        anew, data, size = False, [self._partial], 0
        for piece in self.read():
            if piece is None:
                anew, data, size = True, [], 0
                continue
            data.append(piece)
            size += len(piece)
            if size >= max_bytes:
                break
        if self.gone and self._descriptor is not None:
            self.close()
            return True, []
        *found, self._partial = b"".join(data).split(b"\n")
        return anew, found

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._forget()

    def _forget(self) -> None:
        self._offset, self._head, self._partial = 0, b"", b""
        self._seen = (-1, -1)  # size and mtime at the last read

    def _open(self) -> bool:
        try:  # non-blocking: what was a file a moment ago may be a pipe by now
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self.gone = True
            return False
        status = os.fstat(descriptor)
        self.gone = not stat.S_ISREG(status.st_mode)
        if self.gone:
            os.close(descriptor)
            return False
        self._descriptor, self._inode = descriptor, (status.st_dev, status.st_ino)
        return True

    def _rest(self) -> Iterator[bytes]:
        assert self._descriptor is not None
        while data := os.pread(self._descriptor, CHUNK_BYTES, self._offset):
            if self._offset < HEAD_BYTES:
                self._head = (self._head + data)[:HEAD_BYTES]
            self._offset += len(data)
            yield data

    def _is_truncated(self) -> bool:
        """Whether the file was truncated, and perhaps written again."""
        assert self._descriptor is not None
        status = os.fstat(self._descriptor)
        seen, self._seen = self._seen, (status.st_size, status.st_mtime_ns)
        if status.st_size < self._offset:
            return True
        return seen != self._seen and os.pread(self._descriptor, len(self._head), 0) != self._head

    def _is_replaced(self) -> bool:
        try:
            status = self.path.stat()
        except OSError:
            self.gone = True
            return False  # it may come back; until then the old file is read on
        self.gone = False
        return (status.st_dev, status.st_ino) != self._inode
