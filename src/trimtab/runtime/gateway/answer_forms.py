"""What a dialect has to be able to say, and what its forms share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trimtab.runtime.gateway.calls import GenerationCall
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.rollout.sampling import Chunk, Completion

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""JSON in ASCII: a text with half a surrogate in it cannot break an answer."""


class ResponseFormat(Protocol):
    """How one call is answered."""

    call: GenerationCall

    async def whole(self, completions: Sequence[Completion]) -> Any:
        """The body of an answer that comes in one piece."""

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        """What is sent for a chunk; nothing where it says nothing new."""

    def aborted(self, why: str) -> bytes:
        """What is sent where a stream ends before its answers do: each ends as aborted, with what it had."""

    def fault(self, refusal: Refusal) -> bytes:
        """What is sent where a stream has begun and cannot be carried on."""

    def end(self) -> bytes:
        """What is sent last."""


def sse(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


def flag(extra: Mapping[str, Any], name: str, default: bool) -> bool:
    """Of what is passed on to engines."""
    return bool(extra.get(name, default))
