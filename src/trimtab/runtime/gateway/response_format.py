"""Response format protocol, and helpers of its implementations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trimtab.runtime.gateway.calls import GenerationCall
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.rollout.sampling import Chunk, Completion

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""ASCII JSON, so that lone surrogates cannot break a response."""


class ResponseFormat(Protocol):
    """Format of the response to one call."""

    call: GenerationCall

    async def whole(self, completions: Sequence[Completion]) -> Any:
        """Body of a response in one piece."""

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        """Bytes for a chunk; empty if it adds nothing."""

    def aborted(self, why: str) -> bytes:
        """Ends the unfinished answers of a stream as aborted, with what they have."""

    def fault(self, refusal: Refusal) -> bytes:
        """Error within a stream that has begun."""

    def end(self) -> bytes:
        """Last bytes of a stream."""


def sse(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


def flag(extra: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(extra.get(name, default))
