"""JSON bodies and their fields: each field has a type and a range, and none is ignored.

Fields that were not taken remain in `rest`, and the caller decides about them. `null` counts as absent. Large bodies
are parsed in another process: the standard parser holds the GIL throughout, seconds for a list of millions of token
ids, in which no other client would get a token. One large body is parsed at a time, and only a few may wait.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.runtime.gateway.errors import Refusal, invalid_value

MAX_WAITING = 16
PARSE_S = 60.0

_PARSER = """
import json, marshal, sys
try:
    answer = marshal.dumps((True, json.loads(sys.stdin.buffer.read().decode())))
except (ValueError, RecursionError) as fault:
    answer = marshal.dumps((False, str(fault)))
sys.stdout.buffer.write(answer)
"""

LARGE_BODY_BYTES = 2**20
"""Larger bodies are parsed in another process."""

MAX_TOKEN_IDS = 2**20
"""Per call, over all prompts: checking and sending them delays other requests."""

_MAX_ID = 2**31
_MAX_NUMBER = 10**15  # of numbers without a range; beyond it arithmetic is not exact


class BodyFields:
    """A JSON object."""

    def __init__(self, body: Any, *, within: str = "") -> None:
        if not isinstance(body, dict):
            raise Refusal(400, f"{within or 'the body'} is no JSON object", param=within or None, code="invalid_value")
        self.rest: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
        self._prefix = f"{within}." if within else ""

    def take(self, name: str) -> Any:
        """Any value; None if absent."""
        return self.rest.pop(name, None)

    def wrong(self, name: str, message: str) -> Refusal:
        return invalid_value(self._prefix + name, f"{self._prefix}{name}: {message}")

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: Any, minimum: int | None = None, maximum: int | None = None) -> Any:
        """The default may be None."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self.wrong(name, f"a whole number, not {_shown(value)}")
        if not (-_MAX_NUMBER if minimum is None else minimum) <= value <= (_MAX_NUMBER if maximum is None else maximum):
            raise self.wrong(name, f"{_shown(value)} is not {_range(minimum, maximum)}")
        return value

    def number(self, name: str, default: float, minimum: float | None = None, maximum: float | None = None) -> float:
        """A finite number."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not -_MAX_NUMBER <= value <= _MAX_NUMBER:  # excludes NaN
            raise self.wrong(name, f"a number, not {_shown(value)}")
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            raise self.wrong(name, f"{value} is not {_range(minimum, maximum)}")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, f"a string, not {_shown(value)}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or several; none of them empty."""
        value = self.take(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.wrong(name, f"a string or a list of strings, not {_shown(value)}")
        if "" in found:
            raise self.wrong(name, "an empty string would end every answer at once")
        return tuple(found)

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids; empty if absent."""
        value = self.take(name)
        return () if value is None else self.as_ids(name, value)

    def as_ids(self, name: str, value: Any) -> tuple[int, ...]:
        whole = isinstance(value, list) and set(map(type, value)) <= {int}  # excludes bool
        if not whole or (value and (min(value) < 0 or max(value) >= _MAX_ID)):
            raise self.wrong(name, "a list of token ids, whole numbers of 0 or more")
        return tuple(value)

    def prompts(self, name: str, given: list[Any]) -> list[tuple[int, ...]]:
        """Token ids of one prompt or several. Their number is checked before their content."""
        nested = isinstance(given[0], list)
        ids = sum(len(prompt) for prompt in given if isinstance(prompt, list)) if nested else len(given)
        if ids > MAX_TOKEN_IDS:
            raise self.wrong(name, f"{ids} token ids in one call; the maximum is {MAX_TOKEN_IDS}")
        return [self.as_ids(name, prompt) for prompt in given] if nested else [self.as_ids(name, given)]

    def neutral(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Drops fields with neutral values."""
        for name in list(self.rest):
            if name in table and any(_same(self.rest[name], value) for value in table[name]):
                del self.rest[name]


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as fault:
        raise not_json(str(fault)) from None


def not_json(why: str) -> Refusal:
    return Refusal(400, f"the body is no JSON: {why[:100]}", code="invalid_json")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


def _range(minimum: float | None, maximum: float | None) -> str:
    if maximum is None:
        return f"{minimum} or more, and at most {_MAX_NUMBER}" if minimum is not None else f"within {_MAX_NUMBER}"
    return f"{minimum} to {maximum}" if minimum is not None else f"{maximum} or less"


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _MAX_NUMBER:
        return "a number of many digits"  # repr refuses very long ones
    return repr(value)[:60]


class BodyParser:
    """Parses the bodies of a gateway."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def parsed(self, body: bytes) -> Any:
        if len(body) <= LARGE_BODY_BYTES:
            return parsed(body)
        if self._waiting >= MAX_WAITING:
            raise Refusal(
                503, f"{MAX_WAITING} large bodies are already waiting to be parsed", code="too_many",
                headers={"retry-after": "1"},
            )  # fmt: skip
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.wait_for(_parse_in_process(body), PARSE_S)
        except asyncio.TimeoutError:
            raise Refusal(503, f"the body was not parsed within {PARSE_S:g} s", code="timeout") from None
        finally:
            self._waiting -= 1


async def _parse_in_process(body: bytes) -> Any:
    pipe = asyncio.subprocess.PIPE
    parser = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _PARSER, stdin=pipe, stdout=pipe, env={}
    )
    try:
        answer, _ = await parser.communicate(body)
    finally:
        if parser.returncode is None:
            parser.kill()
            await parser.wait()
    if parser.returncode != 0:
        raise Refusal(503, f"the body was not parsed: the parser ended with {parser.returncode}", code="fault")
    ok, value = marshal.loads(answer)
    if not ok:
        raise not_json(value)
    return value
