"""Open streams of engines: their events, and what reads them."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from trimtab.runtime.engines.engine import (
    ROUTED_EXPERTS,
    EngineCall,
    EngineRefusedError,
    FinishReason,
    GenerateRequest,
    PartialOutput,
    StreamDelta,
)


class DeltaReader(Protocol):
    """Converts the events of a stream to deltas; raises `MalformedOutput` for impossible ones."""

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        """Deltas of one event."""


class EventStream(Protocol):
    """An open stream of events; raises the errors of `engine.py`."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Events until the end, or an error."""

    def close(self, *, on_purpose: bool = False) -> None:
        """Closes the connection, which the engine takes as an abort."""

    def close_within(self, seconds: float) -> None:
        """Closes it after this time unless it has ended."""

    async def rest(self) -> None:
        """Reads what follows the last delta."""


class MalformedOutput(Exception):  # noqa: N818 - not raised beyond this folder
    """An impossible answer of an engine."""


def token_ids(given: Sequence[Any]) -> tuple[int, ...]:
    """Token ids of an event; raises TypeError or OverflowError for anything else."""
    array("q", given)  # checks all of them without a loop here
    return tuple(given)


def routed_experts(
    request: GenerateRequest, finish: FinishReason | None, reply: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The experts of a whole answer, if they were requested; an engine that cannot say them refuses the request."""
    if finish not in (FinishReason.stop, FinishReason.length) or not request.extra.get(ROUTED_EXPERTS):
        return None
    if reply.get("routed_experts") is None:
        raise EngineRefusedError(
            "the answer has no routed_experts", hint="start the engine with --enable-return-routed-experts"
        )
    return {"routed_experts": reply["routed_experts"]}


class ForwardReader:
    """Reads the reply to a forwarded request: OpenAI's form with `choices`, or SGLang's with `meta_info`."""

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        meta = event.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("status_code"):  # it failed, and nothing was aborted
            raise MalformedOutput(str(reason.get("message")))
        finishes = {choice.get("finish_reason") for choice in event.get("choices") or ()} | {reason.get("type")}
        finish = FinishReason.length if "length" in finishes else FinishReason.stop
        finish = FinishReason.aborted_elsewhere if "abort" in finishes else finish
        tokens = (event.get("usage") or meta).get("completion_tokens")
        return [StreamDelta(finish=finish, missing=int(tokens or 0), extra={"body": event})]


class OpenStream:
    """A request whose stream is open."""

    def __init__(self, request: EngineCall, attempt: str) -> None:
        self.request = request
        # Request id at the engine, never reused: SGLang aborts an id once more
        # two seconds after its stream has ended, even if it is in use again by then, and releases before 0.5.5 abort
        # every id that begins like the given one: hence the end mark.
        self.key = f"{request.id}.{attempt}."
        self.events: EventStream | None = None
        self.aborting = False
        self.ended = False  # by itself, successfully or not
        self._stream_pieces: list[StreamDelta] = []

    def add(self, piece: StreamDelta) -> None:
        self._stream_pieces.append(piece)
        self.ended = piece.finish is not None

    def so_far(self) -> PartialOutput:
        return PartialOutput.of(self._stream_pieces)
