"""Discovery of local gateways: a file per gateway in a per-user folder, with its address and token file.

`serve` writes and removes both files; the other commands read them. Files of dead processes are removed when found. The
token is in its own file that only its owner can read; it is never printed nor in the other file.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    token_file: str  # empty: its token is in the environment of its process

    @property
    def is_alive(self) -> bool:
        return ProcessIdentity(self.pid, self.born).alive


@dataclass(frozen=True)
class GatewayTarget:
    """A gateway to call: address and token."""

    url: str
    token: str | None
    job: str = ""


def folder(environment: Mapping[str, str]) -> Path:
    """The per-user folder, or TRIMTAB_ROLLOUT_DIR."""
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
def published(environment: Mapping[str, str], url: str, job: Path, token_file: Path | None) -> Iterator[Path]:
    """Publishes the gateway for other commands while the block runs."""
    me = this()
    target = folder(environment) / f"rollout-{urlsplit(url).port}.json"
    kept_in = str(token_file.resolve()) if token_file else ""
    record = RunningGateway(url, me.pid, me.born, str(job.resolve()), kept_in)
    write_private(target, json.dumps(asdict(record)))
    try:
        yield target
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


def running_gateways(environment: Mapping[str, str]) -> list[RunningGateway]:
    """Running gateways of this user, by port."""
    found = []
    for path in sorted(folder(environment).glob("rollout-*.json")):
        try:
            gateway = RunningGateway(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # incompletely written, or of another release
        if gateway.is_alive:
            found.append(gateway)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def find_gateway(environment: Mapping[str, str], url: str | None, token_file: Path | None) -> GatewayTarget:
    """The named gateway, or the only local gateway of this user."""
    url = url or environment.get(URL)
    gateways = running_gateways(environment)
    if url is None:
        if not gateways:
            raise UnreachableError("no rollout gateway of this user runs here", hint=f"{START_ONE}, or pass --url")
        if len(gateways) > 1:
            which = ", ".join(f"{gateway.url} ({Path(gateway.job).name})" for gateway in gateways)
            raise InputError("several rollout gateways run here", where="command line: --url", hint=f"one of {which}")
        (chosen,) = gateways
    else:
        url = url.rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"'{url}' is not a gateway address", where="command line: --url", hint="http://HOST:PORT")
        found = [gateway for gateway in gateways if gateway.url == url]
        chosen = found[0] if found else RunningGateway(url, 0, 0.0, "", "")
    return GatewayTarget(chosen.url, _token_of(environment, token_file, chosen), chosen.job)


def _token_of(environment: Mapping[str, str], token_file: Path | None, chosen: RunningGateway) -> str | None:
    if token_file is None and environment.get(TOKEN):
        return environment[TOKEN]
    path = token_file or (Path(chosen.token_file) if chosen.token_file else None)
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as fault:
        if token_file is None:
            return None  # it has just ended, or the file belongs to another user: reading needs no token
        raise InputError(
            f"the token cannot be read: {getattr(fault, 'strerror', None) or fault}", where=os.fspath(path)
        ) from None
