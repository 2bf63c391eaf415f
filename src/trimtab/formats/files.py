"""Writes files atomically; one wording for unreadable files."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from trimtab.core.errors import InputError


def unreadable(path: Path, error: OSError | ValueError) -> InputError:
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path} is a folder, not a file", hint="name the file inside it")
    if isinstance(error, FileNotFoundError):
        return InputError(f"there is no file {path}", hint="check the path; relative paths start here")
    return InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def is_folder(path: Path) -> bool:
    """Whether it is a folder; a name that no file can have is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically. Raises InputError."""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not stat.S_ISREG(target.stat().st_mode) and not target.is_dir():
            # A pipe or a terminal cannot be replaced.
            target.write_text(text, encoding="utf-8")
            return
        replace(target, text)
    except (OSError, ValueError) as fault:
        raise InputError(
            f"cannot write {path}: {getattr(fault, 'strerror', None) or fault}",
            where=str(path),
            hint="name a file in a folder that exists and that you may write to",
        ) from None


def replace(target: Path, text: str) -> None:
    """Replace a regular file, or create it, in a single step. Raises OSError."""
    if target.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    aside = target.with_name(f".{target.name[:200]}.{os.getpid()}.tmp")
    try:
        # Opened as a new file so that the umask applies, unlike with tempfile.
        with open(aside, "x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            aside.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(aside, target)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
