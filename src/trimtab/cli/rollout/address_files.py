"""Where a gateway that runs here is found: a file for each, in a folder of this user's, with its address and its token.

`serve` writes both and takes them away; the other commands read them. A file whose process is gone is of one that was
killed: it is taken away when it is seen. The token is in a file of its own that only its owner can read, and is neither
printed nor in the other file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.http.tokens import own_folder, write_private
from trimtab.runtime.procs.processes import ProcessIdentity, this

TOKEN = "TRIMTAB_ROLLOUT_TOKEN"
URL = "TRIMTAB_ROLLOUT_URL"
PLACE = "TRIMTAB_ROLLOUT_DIR"
START_ONE = "start one: trimtab rollout serve JOB"


@dataclass(frozen=True)
class RunningGateway:
    """A gateway of this user on this machine."""

    url: str
    pid: int
    born: float
    job: str
    token_file: str  # empty: its token is in the environment of whoever started it

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return ProcessIdentity(self.pid, self.born).alive


@dataclass(frozen=True)
class GatewayTarget:
    """A gateway to talk to: where, and with which token."""

    url: str
    token: str | None
    job: str = ""


def folder(environment: Mapping[str, str]) -> Path:
    """Of this user; TRIMTAB_ROLLOUT_DIR names another one."""
    named = environment.get(PLACE)
    if not named:
        return own_folder()
    place = Path(named)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as fault:
        raise InputError(f"no folder for the gateway: {fault.strerror}", where=f"{PLACE}={named}") from None
    return place


@contextmanager
def token(environment: Mapping[str, str], path: Path | None, name: str) -> Iterator[tuple[str, str]]:
    """The token, and its file (empty: it came from the environment). A file that was made here goes with the run."""
    given = environment.get(TOKEN)
    if given is not None:
        yield given, ""
        return
    target = path or folder(environment) / f"rollout-{name}.token"
    made = secrets.token_urlsafe(32)
    write_private(target, made)
    try:
        yield made, str(target.resolve())
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


@contextmanager
def said(environment: Mapping[str, str], url: str, job: Path, token_file: str) -> Iterator[Path]:
    """Others can find the gateway as long as the block lasts."""
    me = this()
    target = folder(environment) / f"rollout-{urlsplit(url).port}.json"
    record = RunningGateway(url, me.pid, me.born, str(job.resolve()), token_file)
    write_private(target, json.dumps(asdict(record)))
    try:
        yield target
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


def running(environment: Mapping[str, str]) -> list[RunningGateway]:
    """The gateways that run here, by their ports."""
    found = []
    for path in sorted(folder(environment).glob("rollout-*.json")):
        try:
            one = RunningGateway(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # half written, or of another release
        if one.alive:
            found.append(one)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def reached(environment: Mapping[str, str], url: str | None, token_file: Path | None) -> GatewayTarget:
    """The gateway that is meant: the one named, or the only one of this user here."""
    url = url or environment.get(URL)
    there = running(environment)
    if url is None:
        if not there:
            raise UnreachableError("no rollout gateway of yours runs here", hint=f"{START_ONE}, or --url of another")
        if len(there) > 1:
            which = ", ".join(f"{one.url} ({Path(one.job).name})" for one in there)
            raise InputError("several rollout gateways run here", where="command line: --url", hint=f"one of {which}")
        (chosen,) = there
    else:
        url = url.rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"'{url}' is no address of a gateway", where="command line: --url", hint="http://HOST:PORT"
            )
        found = [one for one in there if one.url == url]
        chosen = found[0] if found else RunningGateway(url, 0, 0.0, "", "")
    return GatewayTarget(chosen.url, _secret(environment, token_file, chosen), chosen.job)


def _secret(environment: Mapping[str, str], token_file: Path | None, chosen: RunningGateway) -> str | None:
    if token_file is None and environment.get(TOKEN):
        return environment[TOKEN]
    path = token_file or (Path(chosen.token_file) if chosen.token_file else None)
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as fault:
        if token_file is None:
            return None  # it ended in this moment, or the file is another user's: reading needs no token
        raise InputError(
            f"the token cannot be read: {getattr(fault, 'strerror', None) or fault}", where=os.fspath(path)
        ) from None
