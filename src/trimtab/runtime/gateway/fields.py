"""Reading the fields of a body: each has a type and a range, and none is passed over.

Whatever is not taken is left in `rest`, and its owner has to say what becomes of it. `null` is as good as nothing, as
both dialects have it.
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
"""Bytes of a body; what has more is parsed beside (`bodies`)."""

MAX_TOKEN_IDS = 2**20
"""Token ids of all prompts of one call: checking and sending them keeps others waiting."""

_MAX_ID = 2**31
_MAX_NUMBER = 10**15  # of numbers that have no range of their own; beyond it arithmetic is not exact


class BodyFields:
    """One JSON object."""

    def __init__(self, body: Any, *, within: str = "") -> None:
        if not isinstance(body, dict):
            raise Refusal(400, f"{within or 'the body'} is no JSON object", param=within or None, code="invalid_value")
        self.rest: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
        self._prefix = f"{within}." if within else ""

    def take(self, name: str) -> Any:
        """Whatever it is; None where it is not there."""
        return self.rest.pop(name, None)

    def wrong(self, name: str, message: str) -> Refusal:
        """A field that is not as it should be."""
        return invalid_value(self._prefix + name, f"{self._prefix}{name}: {message}")

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: Any, minimum: int | None = None, maximum: int | None = None) -> Any:
        """A whole number; the default may be None."""
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
        if type(value) not in (int, float) or not -_MAX_NUMBER <= value <= _MAX_NUMBER:  # no NaN is
            raise self.wrong(name, f"a number, not {_shown(value)}")
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            raise self.wrong(name, f"{value} is not {_range(minimum, maximum)}")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        """A string."""
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
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.wrong(name, f"a string or a list of strings, not {_shown(value)}")
        if "" in found:
            raise self.wrong(name, "an empty string would end every answer at once")
        return tuple(found)

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids; none where it is not there."""
        value = self.take(name)
        return () if value is None else self.as_ids(name, value)

    def as_ids(self, name: str, value: Any) -> tuple[int, ...]:
        """Token ids, or a refusal that names the field."""
        whole = isinstance(value, list) and set(map(type, value)) <= {int}  # a bool is no int here
        if not whole or (value and (min(value) < 0 or max(value) >= _MAX_ID)):
            raise self.wrong(name, "a list of token ids, whole numbers of 0 or more")
        return tuple(value)

    def prompts(self, name: str, given: list[Any]) -> list[tuple[int, ...]]:
        """Token ids of one prompt, or of several. How many there are is looked at before what they are."""
        nested = isinstance(given[0], list)
        ids = sum(len(one) for one in given if isinstance(one, list)) if nested else len(given)
        if ids > MAX_TOKEN_IDS:
            raise self.wrong(name, f"{ids} token ids in one call; {MAX_TOKEN_IDS} are the most")
        return [self.as_ids(name, one) for one in given] if nested else [self.as_ids(name, given)]

    def neutral(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Drops what says only what holds anyway."""
        for name in list(self.rest):
            if name in table and any(_same(self.rest[name], one) for one in table[name]):
                del self.rest[name]


def parsed(body: bytes) -> Any:
    """JSON, or a refusal."""
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as fault:
        raise not_json(str(fault)) from None


def not_json(said: str) -> Refusal:
    """A body that is none."""
    return Refusal(400, f"the body is no JSON: {said[:100]}", code="invalid_json")


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
        return "a number of many digits"  # repr refuses the longest
    return repr(value)[:60]


class BodyParser:
    """Of one gateway."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def parsed(self, body: bytes) -> Any:
        """JSON, or a refusal."""
        if len(body) <= LARGE_BODY_BYTES:
            return parsed(body)
        if self._waiting >= MAX_WAITING:
            raise Refusal(
                503, f"{MAX_WAITING} large bodies wait to be parsed already", code="too_many",
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
    found, said = marshal.loads(answer)
    if not found:
        raise not_json(said)
    return said
