"""Files beside the journal: payloads, saved states and results of tasks; handlers and environments of pools.

Contents are never unpickled here. Files are written atomically. The files of a task are deleted when it is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import urllib.parse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.store.files import write_file

KINDS = ("payloads", "results", "states", "handlers", "environments")
NO_ROOM_HINT = "make room there, or connect with a journal_dir on a disk that has some"
_STATE = re.compile(r"(.+)\.(\d+)\.(\d+)\.state")


class BlobStore:
    """The folders of a controller; `states` may be elsewhere (`state_dir`). Files are readable by their owner only."""

    def __init__(self, directory: Path, state_dir: str | None = None) -> None:
        self._folders = {kind: directory / kind for kind in KINDS}
        if state_dir:
            self._folders["states"] = Path(state_dir)
        self.make_folders()

    def make_folders(self) -> None:
        for folder in self._folders.values():
            folder.mkdir(parents=True, exist_ok=True)

    def stage(self, kind: str, task: str, data: bytes) -> StagedBlob:
        """Write data under a temporary name; `StagedBlob.commit` renames it. UnreachableError if the disk refuses."""
        folder = self._folders[kind]
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=folder)
            staged = StagedBlob(Path(temporary), folder / file_name(task))
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except BaseException:
                staged.discard()
                raise
        except OSError as fault:
            raise UnreachableError(f"{folder} cannot be written: {fault.strerror}", hint=NO_ROOM_HINT) from fault
        return staged

    def put(self, kind: str, task: str, data: bytes) -> None:
        self.stage(kind, task, data).commit()

    def get(self, kind: str, task: str) -> bytes | None:
        try:
            return (self._folders[kind] / file_name(task)).read_bytes()
        except FileNotFoundError:
            return None

    def header(self, kind: str, task: str) -> dict[str, Any] | None:
        """Header of the packed data of a task, without reading the rest; None if there is none."""
        try:
            with open(self._folders[kind] / file_name(task), "rb") as file:
                return header_of(file.readline())
        except FileNotFoundError:
            return None

    def state_path(self, task: str, attempt: int, rank: int) -> Path:
        """File of a member's state, one per attempt, so that a gang never mixes two saves."""
        return self._folders["states"] / state_name(task, attempt, rank)

    def put_state(self, task: str, attempt: int, rank: int, data: bytes) -> None:
        """Write a member's state, synced to disk."""
        write_file(self.state_path(task, attempt, rank), data, sync=True)

    def latest_state(self, task: str, world: int) -> list[Path] | None:
        """Newest state that exists for every member, by rank."""
        by_attempt: dict[int, dict[int, Path]] = {}
        for path, attempt, rank in self._states(task):
            by_attempt.setdefault(attempt, {})[rank] = path
        for _, by_rank in sorted(by_attempt.items(), reverse=True):
            if all(rank in by_rank for rank in range(world)):
                return [by_rank[rank] for rank in range(world)]
        return None

    def drop_old_states(self, task: str, attempt: int) -> None:
        """Delete states of earlier attempts."""
        for path, saved_in, _ in self._states(task):
            if saved_in < attempt:
                path.unlink(missing_ok=True)

    def forget_previous_run(self, task: str) -> None:
        """Delete result and states of an ended task whose id is submitted again."""
        (self._folders["results"] / file_name(task)).unlink(missing_ok=True)
        for path, _, _ in self._states(task):
            path.unlink(missing_ok=True)

    def keep_only(self, tasks: Collection[str], before: float | None = None) -> None:
        """Delete the files of all other tasks, if written before `before`.

        A `state_dir` is the user's and may be shared: files in it are deleted only with a payload of this controller.
        """
        names = {file_name(task) for task in tasks}
        forgotten = set()
        for kind in ("payloads", "results"):
            for entry in os.scandir(self._folders[kind]):
                with contextlib.suppress(FileNotFoundError):  # renamed by a commit
                    if entry.name not in names and (before is None or entry.stat().st_mtime < before - 1.0):
                        forgotten.add(entry.name)
                        os.unlink(entry.path)
        for entry in os.scandir(self._folders["states"]) if forgotten else ():
            if (matched := _STATE.fullmatch(entry.name)) and matched[1] in forgotten:
                os.unlink(entry.path)

    def _states(self, task: str) -> list[tuple[Path, int, int]]:
        name = file_name(task)
        matches = [(entry.path, _STATE.fullmatch(entry.name)) for entry in os.scandir(self._folders["states"])]
        return [(Path(path), int(m[2]), int(m[3])) for path, m in matches if m and m[1] == name]


class StagedBlob:
    """A file under a temporary name."""

    def __init__(self, temporary: Path, path: Path) -> None:
        self._temporary = temporary
        self.path = path

    def commit(self) -> None:
        os.replace(self._temporary, self.path)

    def discard(self) -> None:
        self._temporary.unlink(missing_ok=True)


def file_name(task: str) -> str:
    """File name of a task id: readable, unique, never hidden, of limited length."""
    quoted = urllib.parse.quote(task, safe=" -_@=+,.")
    if len(quoted) <= 120 and not quoted.startswith("."):
        return quoted
    return f"{quoted[:80].lstrip('.')}~{hashlib.sha256(task.encode()).hexdigest()[:16]}"


def state_name(task: str, attempt: int, rank: int) -> str:
    """File name of a member's state."""
    return f"{file_name(task)}.{attempt}.{rank}.state"


def read_state_name(name: str) -> tuple[str, int, int] | None:
    """(task file name, attempt, rank); None if the name does not match."""
    matched = _STATE.fullmatch(name)
    return (matched[1], int(matched[2]), int(matched[3])) if matched else None


def pack(header: dict[str, Any], parts: Sequence[bytes | None]) -> bytes:
    """Pack a JSON header and byte strings; None stays None."""
    sizes = [None if part is None else len(part) for part in parts]
    text = json.dumps({**header, "sizes": sizes}, separators=(",", ":")).encode()
    return b"\n".join((text, b"".join(part for part in parts if part is not None)))


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[: data.index(b"\n")])
    return header


def unpack(data: bytes) -> tuple[dict[str, Any], list[bytes | None]]:
    text, _, rest = data.partition(b"\n")
    header = json.loads(text)
    parts: list[bytes | None] = []
    at = 0
    for size in header.pop("sizes"):
        parts.append(None if size is None else rest[at : at + size])
        at += size or 0
    return header, parts
