"""JSON bodies: small ones are parsed at once, large ones in a process beside, so that others are served meanwhile.

The standard parser holds the interpreter's lock from the first byte to the last, also in a thread: seconds for a list
of millions of token ids, in which no other client would get a token. What comes back from the process is read in a
small part of that time. One large body is parsed at a time, and only a few may wait for their turn.
"""

from __future__ import annotations

import asyncio
import marshal
import sys
from typing import Any

from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.fields import LARGE, not_json, parsed

MOST_WAITING = 16
PARSE_S = 60.0

_PARSER = """
import json, marshal, sys
try:
    answer = marshal.dumps((True, json.loads(sys.stdin.buffer.read().decode())))
except (ValueError, RecursionError) as fault:
    answer = marshal.dumps((False, str(fault)))
sys.stdout.buffer.write(answer)
"""


class BodyParser:
    """Of one gateway."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def parsed(self, body: bytes) -> Any:
        """JSON, or a refusal."""
        if len(body) <= LARGE:
            return parsed(body)
        if self._waiting >= MOST_WAITING:
            raise Refusal(
                503, f"{MOST_WAITING} large bodies wait to be parsed already", code="too_many",
                headers={"retry-after": "1"},
            )  # fmt: skip
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.wait_for(_parsed_beside(body), PARSE_S)
        except asyncio.TimeoutError:
            raise Refusal(503, f"the body was not parsed within {PARSE_S:g} s", code="timeout") from None
        finally:
            self._waiting -= 1


async def _parsed_beside(body: bytes) -> Any:
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
