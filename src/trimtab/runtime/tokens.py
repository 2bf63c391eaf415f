"""The hook's token: the one in the environment, or one made for this run in a file that only its owner can read.

The token itself is never printed or logged; where it is, is. A file that was made here goes with the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trimtab.model.errors import InputError

VARIABLE = "TRIMTAB_HOOK_TOKEN"


@contextmanager
def token(environment: Mapping[str, str], path: Path | None, port: int) -> Iterator[tuple[str, str]]:
    """The token, and a sentence on where it is. `port` tells hooks of one user on one machine apart."""
    given = environment.get(VARIABLE)
    if given is not None:
        yield given, f"the token is {VARIABLE}"
        return
    target = path or own_folder() / f"hook-{port}.token"
    made = secrets.token_urlsafe(32)
    write_private(target, made)
    try:
        yield made, f"the token is in {target}"
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


def own_folder() -> Path:
    """A folder of this user's among the machine's temporary files; refused where it is somebody else's."""
    folder = Path(tempfile.gettempdir()) / f"trimtab-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as fault:
        raise InputError(f"no folder for the token: {fault.strerror}", where=str(folder), hint="--token-file") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InputError(
            "others can write to the folder for the token", where=str(folder), hint="remove it, or --token-file PATH"
        )
    return folder


def write_private(target: Path, text: str) -> None:
    """A file that only its owner can read; whatever was there before is gone first."""
    try:
        with contextlib.suppress(FileNotFoundError):
            target.unlink()  # of a hook that was killed; made anew, so that no other's descriptor or mode is kept
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o600), "w", encoding="ascii") as file:
            file.write(text + "\n")
    except OSError as fault:
        raise InputError(
            f"the token cannot be written: {fault.strerror or fault}", where=str(target), hint="--token-file PATH"
        ) from None
