"""Request headers of trimtab: `x-trimtab-*` and `Idempotency-Key`.

An unknown `x-trimtab-` header is refused, because its sender relies on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core.errors import nearest
from trimtab.model.rollout import DEFAULT_CLASS
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.guard import Headers

PREFIX = b"x-trimtab-"
KNOWN = ("class", "group", "session", "version", "at-least", "spans", "deadline-s", "details")
MAX_CHARS = 256
MAX_VERSION_DIGITS = 18


@dataclass(frozen=True)
class RequestTerms:
    """Scheduling terms of one call."""

    class_: str = DEFAULT_CLASS
    group: str = ""
    version: int | None = None  # only these weights
    at_least: int | None = None  # these weights or newer
    spans: bool = True  # several versions may make one answer
    key: str = ""  # a second call with this key gets the answer of the first
    deadline_s: float | None = None
    details: bool = False  # add workers and weight versions to the answer
    session: str = ""  # its requests stay on one worker

    def key_of(self, prompt: int, prompts: int) -> str:
        """Each prompt of a call is a request of its own."""
        return self.key if prompts == 1 or not self.key else f"{self.key}/{prompt}"


DEFAULT_TERMS = RequestTerms()


def read_terms(headers: Headers, deadline_s: float | None) -> RequestTerms:
    """Terms of a call; `deadline_s` is the default."""
    found = {
        name[len(PREFIX) :].decode("latin-1"): value.decode("latin-1").strip()
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    key = headers.get(b"idempotency-key", b"").decode("latin-1").strip()
    if not found and not key and deadline_s is None:
        return DEFAULT_TERMS
    for name, value in found.items():
        if name not in KNOWN:
            near = nearest(name, KNOWN)
            raise _wrong(name, f"there is no such header{f'; did you mean x-trimtab-{near}?' if near else ''}")
        if len(value) > MAX_CHARS:
            raise _wrong(name, f"longer than {MAX_CHARS} characters")
    if len(key) > MAX_CHARS:
        raise Refusal(400, f"Idempotency-Key is longer than {MAX_CHARS} characters", param="idempotency-key")
    return RequestTerms(
        found.get("class") or DEFAULT_CLASS,
        found.get("group", ""),
        _version("version", found),
        _version("at-least", found),
        _flag("spans", found, default=True),
        key,
        _seconds("deadline-s", found, deadline_s),
        _flag("details", found, default=False),
        found.get("session", ""),
    )


def _version(name: str, found: dict[str, str]) -> int | None:
    if name not in found:
        return None
    if not (found[name].isascii() and found[name].isdecimal() and len(found[name]) <= MAX_VERSION_DIGITS):
        raise _wrong(name, f"'{found[name]}' is no version: a whole number, 0 or more")
    return int(found[name])


def _flag(name: str, found: dict[str, str], *, default: bool) -> bool:
    words = {"1": True, "true": True, "0": False, "false": False}
    if name not in found:
        return default
    if found[name].lower() not in words:
        raise _wrong(name, f"'{found[name]}' is neither true nor false")
    return words[found[name].lower()]


def _seconds(name: str, found: dict[str, str], default: float | None) -> float | None:
    if name not in found:
        return default
    try:
        seconds = float(found[name])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _wrong(name, f"'{found[name]}' is no number of seconds above 0")
    return seconds


def _wrong(name: str, message: str) -> Refusal:
    return Refusal(400, f"x-trimtab-{name}: {message}", param=f"x-trimtab-{name}", code="invalid_header")
