"""The token of a door: the one in the environment, or one made for this run in a file that only its owner can read.

The token itself is never printed or logged; where it is, is. A file that was made here goes with the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trimtab.core.errors import InputError

HOOK = "TRIMTAB_HOOK_TOKEN"
DASHBOARD = "TRIMTAB_DASHBOARD_TOKEN"
SHORTEST = 16
_VARIABLE = re.compile(r"TRIMTAB_[A-Z]+_TOKEN")


def checked(token: str, of: str, hint: str = "") -> str:
    """The token, if nobody can guess it and it can stand in a header; InputError otherwise."""
    if len(token) < SHORTEST or not token.isascii() or any(map(str.isspace, token)):
        raise InputError(f"{of} must have {SHORTEST} characters or more, without spaces", hint=hint or None)
    return token


@contextmanager
def token(
    environment: Mapping[str, str], variable: str, path: Path | None, name: str, called: str = "the token"
) -> Iterator[tuple[str, str]]:
    """The token, and a sentence on where it is. `name` tells the doors of one user on one machine apart."""
    given = environment.get(variable)
    if given is not None:
        yield checked(given, variable, "without it one is made"), f"{called} is {variable}"
        return
    target = path or own_folder() / f"{name}.token"
    made = secrets.token_urlsafe(32)
    write_private(target, made)
    try:
        yield made, f"{called} is in {target}"
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that run other software: no token of trimtab's in it."""
    return {name: value for name, value in environment.items() if not _VARIABLE.fullmatch(name)}


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
            target.unlink()  # of a door that was killed; made anew, so that no other's descriptor or mode is kept
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o600), "w", encoding="ascii") as file:
            file.write(text + "\n")
    except OSError as fault:
        raise InputError(
            f"the token cannot be written: {fault.strerror or fault}", where=str(target), hint="--token-file PATH"
        ) from None
