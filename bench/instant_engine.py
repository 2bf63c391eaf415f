"""An engine that answers at once, for measuring what stands before it: SGLang's interface, and OpenAI's completions.

    python -m bench.instant_engine        # says its port, and serves until it is ended

Answers are made once for each number of tokens and written whole: an event for each token, with ids, text and counts as
SGLang has them, all in one write. So what it takes is next to nothing, and nothing is batched, queued or generated.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import signal
import time
from typing import cast

from trimtab.runtime.gateway.server import run_alone

TOKENS = re.compile(rb'"(?:max_new_tokens|max_tokens)": ?(\d+)')
INTERVAL = re.compile(rb'"stream_interval": ?(\d+)')
STREAMS = re.compile(rb'"stream": ?true')
LOGPROBS = re.compile(rb'"return_logprob": ?true')
VERSION = "0"
INFO = {
    "/server_info": {"version": "0.5.23"},
    "/get_server_info": {"version": "0.5.23"},
    "/model_info": {"weight_version": VERSION, "model_path": "instant", "is_generation": True},
    "/get_model_info": {"weight_version": VERSION, "model_path": "instant", "is_generation": True},
    "/v1/models": {"object": "list", "data": [{"id": "instant", "object": "model", "owned_by": "bench"}]},
}


def answer(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    """A whole response."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def streamed(events: list[bytes]) -> bytes:
    """Events as they come one by one, each a chunk of its own."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    lines = [b"data: " + one + b"\n\n" for one in (*events, b"[DONE]")]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in lines) + b"0\r\n\r\n"


def event(count: int, whole: int, logprobs: bool = False) -> dict[str, object]:
    """What SGLang says when so many tokens of the whole are there."""
    ids = [100 + at % 50 for at in range(count)]
    meta: dict[str, object] = {
        "id": "instant",
        "prompt_tokens": 8,
        "completion_tokens": count,
        "finish_reason": {"type": "length", "length": whole} if count == whole else None,
        "weight_version": VERSION,
    }
    if logprobs:
        meta |= {"output_token_logprobs": [[-0.123456789 - at % 7, token, None] for at, token in enumerate(ids)]}
    return {"text": " a" * count, "output_ids": ids, "meta_info": meta}


def completion(text: str, last: bool) -> dict[str, object]:
    """What OpenAI's completions say of a piece of text."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length" if last else None}
    return {"id": "instant", "object": "text_completion", "created": 0, "model": "instant", "choices": [choice]}


@functools.cache
def generated(count: int, streams: bool, logprobs: bool, interval: int) -> bytes:
    """The answer of /generate."""
    if not streams:
        return answer(json.dumps(event(count, count, logprobs)).encode())
    ends = [*range(interval, count, interval), count]
    return streamed([json.dumps(event(at, count, logprobs)).encode() for at in ends])


@functools.cache
def completed(count: int, streams: bool, *_: object) -> bytes:
    """The answer of /v1/completions."""
    if not streams:
        usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
        return answer(json.dumps({**completion(" a" * count, True), "usage": usage}).encode())
    return streamed([json.dumps(completion(" a", at == count)).encode() for at in range(1, count + 1)])


class Connection(asyncio.Protocol):
    """One connection; what is answered is said by a subclass."""

    def __init__(self) -> None:
        self.buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        while self.transport is not None:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            at = head.find(b"\r\ncontent-length:")
            size = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            path = self.buffer.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            self.transport.write(self.respond(path, body))

    def respond(self, path: str, body: bytes) -> bytes:
        raise NotImplementedError


class Engine(Connection):
    """SGLang's calls, and OpenAI's."""

    def respond(self, path: str, body: bytes) -> bytes:
        if path in ("/generate", "/v1/completions"):
            found = TOKENS.search(body)
            make = generated if path == "/generate" else completed
            streams, logprobs = STREAMS.search(body) is not None, LOGPROBS.search(body) is not None
            every = INTERVAL.search(body)
            return make(int(found[1]) if found else 16, streams, logprobs, int(every[1]) if every else 1)
        if path == "/v1/loads":
            load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0, "timestamp": time.time()}
            return answer(json.dumps({"loads": [load]}).encode())
        if path in INFO:
            return answer(json.dumps(INFO[path]).encode())
        if path in ("/health", "/ready", "/health_generate", "/abort_request"):
            return answer(b"")
        return answer(b"{}", status="404 Not Found")


async def serve(protocol: type[Connection]) -> None:
    """Until SIGTERM."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    server = await loop.create_server(protocol, "127.0.0.1", 0, backlog=1024)
    print(f"at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await ended.wait()
    server.close()


if __name__ == "__main__":
    run_alone(serve(Engine))
