"""Local gateways: their discovery by files, and an HTTP client for commands: one request, one answer, a deadline.

A file per gateway in a per-user folder has its address and token file. `serve` writes and removes both files; the other
commands read them. Files of dead processes are removed when found. The token is in its own file that only its owner can
read; it is never printed nor in the other file, and is sent to no other address than the gateway's. Standard library
only, so that the serve dependencies are not needed. Proxies are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.runtime.http.tokens import own_folder, write_private
from trimtab.runtime.procs.processes import ProcessIdentity, this

TOKEN = "TRIMTAB_ROLLOUT_TOKEN"
URL = "TRIMTAB_ROLLOUT_URL"
PLACE = "TRIMTAB_ROLLOUT_DIR"
START_ONE = "start one: trimtab engine serve FILE"


class RunningGateway(Frozen):
    """A gateway of this user on this machine."""

    url: str
    pid: int
    born: float
    job: str
    token_file: str  # empty: its token is in the environment of its process
    logs: str = ""  # folder of the engines that it starts


class GatewayTarget(Frozen):
    """A gateway to call: address and token."""

    url: str
    token: str | None
    job: str = ""
    logs: str = ""


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
def published(
    environment: Mapping[str, str], url: str, job: Path, token_file: Path | None, logs: Path | None = None
) -> Iterator[Path]:
    """Publishes the gateway for other commands while the block runs."""
    me = this()
    target = folder(environment) / f"rollout-{urlsplit(url).port}.json"
    kept_in = str(token_file.resolve()) if token_file else ""
    in_folder = str(logs.resolve()) if logs else ""
    record = RunningGateway(url, me.pid, me.born, str(job.resolve()), kept_in, in_folder)
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
        if ProcessIdentity(gateway.pid, gateway.born).alive:
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
    return GatewayTarget(chosen.url, _token_of(environment, token_file, chosen), chosen.job, chosen.logs)


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


ANSWER_S = 30.0
LARGEST = 64 * 2**20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class GatewayClient:
    """Client of a gateway."""

    def __init__(self, at: GatewayTarget, answer_s: float = ANSWER_S) -> None:
        self.at = at
        self._answer_s = answer_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/status")

    def story(self, name: str) -> dict[str, Any]:
        return self._call("GET", f"/story/{quote(name, safe='')}")

    def drain(self, worker: str, deadline_s: float | None, why: str) -> dict[str, Any]:
        return self._call("POST", f"/workers/{quote(worker, safe='')}/drain", {"deadline_s": deadline_s, "why": why})

    def resume(self, worker: str) -> dict[str, Any]:
        return self._call("POST", f"/workers/{quote(worker, safe='')}/resume", {})

    def scale(self, workers: int, for_s: float | None, why: str) -> dict[str, Any]:
        return self._call("POST", "/scale", {"workers": workers, "for_s": for_s, "why": why})

    def release(self) -> dict[str, Any]:
        return self._call("DELETE", "/scale")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(self.at.url + path, method=method)
        request.add_header("Accept", "application/json")
        if self.at.token is not None:
            request.add_header("Authorization", f"Bearer {self.at.token}")
        if body is not None:
            request.data = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=self._answer_s) as answer:
                return _parsed(answer.read(LARGEST + 1), self.at.url)
        except urllib.error.HTTPError as refused:
            with refused:
                raise _refused(refused.code, refused.read(LARGEST), self.at) from None
        except TimeoutError:
            raise UnreachableError(
                f"the gateway at {self.at.url} did not answer in {self._answer_s:g} s", hint="it may be overloaded"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as fault:
            why = getattr(fault, "reason", None) or fault
            raise UnreachableError(f"the gateway at {self.at.url} cannot be reached: {why}", hint=START_ONE) from None


def _parsed(raw: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnreachableError(f"the server at {url} is not a rollout gateway", hint="check --url")
    return found


def _refused(status: int, raw: bytes, at: GatewayTarget) -> TrimtabError:
    """The error of a refused request."""
    message = _message(raw)
    if status == 401:
        hint = f"--token-file, or {TOKEN}" if at.token is None else "the token is not that of this gateway"
        return InputError("the gateway requires its token", where=at.url, hint=hint)
    if status == 404 and not message:
        return UnreachableError(f"the server at {at.url} is not a rollout gateway", hint="check --url")
    if status == 409:
        return InfeasibleError(message or "not possible now", where=at.url)
    if status < 500 and status != 429:
        return InputError(message or f"the gateway refused the request ({status})", where=at.url)
    return UnreachableError(message or f"the gateway failed ({status})", where=at.url)


def _message(raw: bytes) -> str:
    try:
        found = json.loads(raw)
        error = found.get("error", found)
        return str(error.get("message", "") if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return ""
