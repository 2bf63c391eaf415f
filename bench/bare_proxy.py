"""A proxy that reads every event of an answer and decides nothing: the floor of what Python can do before an engine.

    python -m bench.bare_proxy URL        # says its address, and serves until it is ended

It has uvloop, httptools and msgspec, connections that are kept on both sides, and no limits, queues, routes or errors.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import ClassVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.instant_engine import serve
from trimtab.runtime.gateway.server import run_alone

read, written = msgspec.json.decode, msgspec.json.encode


class Upstream(asyncio.Protocol):
    """A connection to the engine: what it answers goes to the client that has it now."""

    client: Downstream

    def __init__(self) -> None:
        self.parser, self.streams, self.parts, self.out = httptools.HttpResponseParser(self), False, b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if self.out:
            self.client.transport.write(self.out)
            self.out = b""

    def on_message_begin(self) -> None:
        self.streams, self.parts = False, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.streams |= value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        if self.streams:
            self.out += b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def on_body(self, body: bytes) -> None:
        self.parts += body
        if self.streams:
            *lines, self.parts = self.parts.split(b"\n\n")
            for line in lines:
                event = line if line.endswith(b"[DONE]") else b"data: " + written(read(line[6:]))
                self.out += b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event)

    def on_message_complete(self) -> None:
        if self.streams:
            self.out += b"0\r\n\r\n"
        else:
            body = written(read(self.parts))
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self.out += head % len(body) + body
        self.client.idle.append(self)


class Downstream(asyncio.Protocol):
    """A connection of a client."""

    engine = ""
    idle: ClassVar[deque[Upstream]] = deque()

    def __init__(self) -> None:
        self.parser, self.body, self.opening = httptools.HttpRequestParser(self), b"", set[asyncio.Task[None]]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        body, self.body = written(read(self.body)), b""
        head = (
            b"POST /generate HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        if self.idle:
            self.send(self.idle.pop(), head % len(body) + body)
        else:
            self.opening.add(asyncio.ensure_future(self.open(head % len(body) + body)))

    async def open(self, request: bytes) -> None:
        address = urlsplit(self.engine)
        _, upstream = await asyncio.get_running_loop().create_connection(Upstream, address.hostname, address.port)
        self.send(upstream, request)

    def send(self, upstream: Upstream, request: bytes) -> None:
        upstream.client = self
        upstream.transport.write(request)


if __name__ == "__main__":
    Downstream.engine = sys.argv[1]
    run_alone(serve(Downstream))
