"""HTTP client of a rollout gateway for commands: one request, one answer, a deadline.

Standard library only, so that the serve dependencies are not needed. Proxies are not used, and the token is sent to no
other address than the gateway's.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

from trimtab.cli.rollout.address_files import START_ONE, TOKEN, GatewayTarget
from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError

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
        """The story of a worker or a request."""
        return self._call("GET", f"/story/{_path(name)}")

    def drain(self, worker: str, deadline_s: float | None, why: str) -> dict[str, Any]:
        """Stops new requests to a worker until it is resumed."""
        return self._call("POST", f"/workers/{_path(worker)}/drain", {"deadline_s": deadline_s, "why": why})

    def resume(self, worker: str) -> dict[str, Any]:
        return self._call("POST", f"/workers/{_path(worker)}/resume", {})

    def scale(self, workers: int, for_s: float | None, why: str) -> dict[str, Any]:
        """Sets the number of workers until released or for a time."""
        return self._call("POST", "/scale", {"workers": workers, "for_s": for_s, "why": why})

    def release(self) -> dict[str, Any]:
        """Returns scaling to the policy."""
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


def _path(name: str) -> str:
    return quote(name, safe="")


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
