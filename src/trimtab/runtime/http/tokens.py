"""Access tokens of HTTP endpoints: from the environment, or generated into a file that only its owner can read.

The token must never be printed or logged, only its location. A generated file is deleted at the end of the run.
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
MIN_LENGTH = 16
_VARIABLE = re.compile(r"TRIMTAB_[A-Z]+_TOKEN")


def checked(token: str, of: str, hint: str = "") -> str:
    """The token, if it is long enough and valid in a header; InputError otherwise."""
    if len(token) < MIN_LENGTH or not token.isascii() or any(map(str.isspace, token)):
        raise InputError(f"{of} must have {MIN_LENGTH} characters or more, without spaces", hint=hint or None)
    return token


def told(kept_in: Path | None, variable: str, called: str = "the token") -> str:
    """A sentence on where the token is."""
    return f"{called} is in {kept_in}" if kept_in else f"{called} is {variable}"


@contextmanager
def token(
    environment: Mapping[str, str], variable: str, path: Path | None, name: str
) -> Iterator[tuple[str, Path | None]]:
    """The token and its file (None: from the environment). `name` distinguishes endpoints of a user on a machine."""
    given = environment.get(variable)
    if given is not None:
        yield checked(given, variable, "without it one is made"), None
        return
    target = path or own_folder() / f"{name}.token"
    made = secrets.token_urlsafe(32)
    write_private(target, made)
    try:
        yield made, target
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without trimtab's tokens, for processes of other software."""
    return {name: value for name, value in environment.items() if not _VARIABLE.fullmatch(name)}


def own_folder() -> Path:
    """This user's folder in the temporary directory; InputError if others can write to it."""
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
    """Write a file that only its owner can read, replacing an old one."""
    try:
        with contextlib.suppress(FileNotFoundError):
            target.unlink()  # of a killed server; created again, so that no old descriptor or mode is kept
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o600), "w", encoding="ascii") as file:
            file.write(text + "\n")
    except OSError as fault:
        raise InputError(
            f"the token cannot be written: {fault.strerror or fault}", where=str(target), hint="--token-file PATH"
        ) from None
