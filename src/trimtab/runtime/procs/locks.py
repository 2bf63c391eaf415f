"""Locks on files and directories.

A file lock is `flock`, which ends with its process in any case. The lock of a directory admits one writer, also if
several machines share the directory: without `flock` it is a file created with O_EXCL that names its owner, stale if
its process on this machine is gone, or if another machine has not renewed it for 60 s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.runtime.procs.processes import born

STALE_S = 60.0
_NO_FLOCK = (errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS)


class FileLock:
    """An exclusive lock on a file, which is created and stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def take(self, content: str = "") -> bool:
        """Try to get the lock, and write `content` into the file; whether it is held. OSError without flock."""
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            os.close(descriptor)
            if isinstance(fault, BlockingIOError):
                return False
            raise
        if content:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content.encode(), 0)
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class DirectoryLock:
    """Held from construction until `release`; InputError if another process holds it during `wait_s`."""

    renew_s = 5.0  # period of `renew`

    def __init__(self, directory: Path, owner: str, *, wait_s: float) -> None:
        self._path = directory / "lock"
        self._claim = directory / "lock.owner"
        self._file = FileLock(self._path)
        self._claimed = False
        self._renewed = time.monotonic()
        self._identity = json.dumps(
            {"owner": owner, "host": socket.gethostname(), "pid": os.getpid(), "born": born(os.getpid())}
        )
        deadline = time.monotonic() + wait_s
        while not self._take():
            if time.monotonic() >= deadline:
                raise InputError(
                    f"another controller writes this journal: {self._holder()}",
                    where=str(directory),
                    hint="one controller, one journal: give this one a journal_dir of its own",
                )
            time.sleep(0.05)

    def renew(self) -> None:
        """Renew the claim file; needed only without flock."""
        if self._claimed and time.monotonic() - self._renewed > self.renew_s:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._claim)

    def release(self) -> None:
        self._file.release()
        if self._claimed:
            self._claimed = False
            self._claim.unlink(missing_ok=True)

    def _take(self) -> bool:
        try:
            return self._file.take(self._identity)
        except OSError as fault:
            if fault.errno in _NO_FLOCK:
                return self._take_claim()
            raise

    def _take_claim(self) -> bool:
        try:
            descriptor = os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if self._left_behind():
                self._claim.unlink(missing_ok=True)
            return False  # the next try creates it
        os.write(descriptor, self._identity.encode())
        os.close(descriptor)
        self._claimed = True
        return True

    def _left_behind(self) -> bool:
        try:
            claim = json.loads(self._claim.read_text())
            age_s = time.time() - self._claim.stat().st_mtime
        except (OSError, ValueError):
            return False
        if claim.get("host") == socket.gethostname():
            return bool(born(int(claim["pid"])) != claim["born"])
        return age_s > STALE_S

    def _holder(self) -> str:
        for path in (self._claim, self._path):
            with contextlib.suppress(OSError, ValueError):
                held = json.loads(path.read_text())
                return f"{held['owner'] or 'unnamed'}, process {held['pid']} on {held['host']}"
        return "unknown"
