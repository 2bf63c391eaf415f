"""What the gateway adds to a call, beside direct calls to the same engine and beside sglang-router, in one run.

The engine answers at once (`bench/instant_engine.py`), so all that is measured is what stands before it. Each way is a
process of its own; the client is the same for all: connections that are kept, a request on each as soon as the one
before it is answered, time from the first byte sent to the last byte of the stream. It acknowledges every packet at
once: a client that does not sees 40 ms more of sglang-router 0.3.2 at one stream, which waits for it between packets.
Rounds of the ways alternate, so that whatever else the machine does falls on all of them. CPU is that of the process in
between alone, all its threads.
The pool in process has no HTTP in front: its time is that of `pool.generate`, its CPU that of the whole process, and it
is compared with a direct call by a bare client, which only reads and looks for the end.

sglang-router is taken from `--router PATH` (its executable, `pip install sglang-router`), from the environment
(TRIMTAB_BENCH_ROUTER), or from the search path; without it, its rows are left out, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from trimtab.rollout import RolloutPool, SamplingParams

ROUNDS = 3
REQUESTS = {1: 200, 32: 1_000, 256: 1_500}  # in each round
TOKENS = 16
PROMPT = list(range(10, 18))
ROUTER, INSIDE = "sglang-router", "RolloutPool in process"
GOAL_MS, GOAL_INSIDE_MS = 3.0, 0.5
START_S, ROUND_S = 60.0, 120.0
SAID = re.compile(r"at (http://[\d.]+:\d+)")
TICKS = os.sysconf("SC_CLK_TCK")


def generate(tokens: int) -> tuple[str, dict[str, object]]:
    """As SGLang is asked."""
    return "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens}, "stream": True}


def completions(tokens: int) -> tuple[str, dict[str, object]]:
    """As OpenAI is asked."""
    return "/v1/completions", {"model": "instant", "prompt": PROMPT, "max_tokens": tokens, "stream": True}


# ---- the client ------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One connection that is kept, with one request on it at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.got: list[bytes] = []
        self.whole: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Some of the answer: it is whole when its last chunk is there."""
        assert self.transport is not None
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self.got.append(data)
        tail = data if len(data) >= 7 else b"".join(self.got[-4:])
        over = tail.endswith(b"\r\n0\r\n\r\n") or not self.got[0].startswith(b"HTTP/1.1 200")
        if over and self.whole is not None and not self.whole.done():
            self.whole.set_result(b"".join(self.got))

    def connection_lost(self, error: Exception | None) -> None:
        """It broke."""
        if self.whole is not None and not self.whole.done():
            self.whole.set_exception(ConnectionError(f"the connection was closed after {b''.join(self.got)[:300]!r}"))

    async def ask(self, request: bytes) -> bytes:
        """A whole answer."""
        assert self.transport is not None
        self.got, self.whole = [], asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.whole


class Client:
    """Asks one address, on so many connections."""

    def __init__(self, url: str, what: tuple[str, dict[str, object]]) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)
        path, body = what
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        self.request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        self.open: list[Connection] = []

    async def round(self, streams: int, requests: int) -> list[float]:
        """Seconds of each request."""
        loop = asyncio.get_running_loop()
        while len(self.open) < streams:
            _, one = await loop.create_connection(Connection, self.host, self.port)
            self.open.append(one)

        async def ask(at: int) -> None:
            answer = await self.open[at].ask(self.request)
            if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer[-64:]:
                raise RuntimeError(f"no whole answer: {answer[:400]!r}")

        return await closed_loop(ask, streams, requests)

    def close(self) -> None:
        """Connections are not needed any more."""
        for one in self.open:
            if one.transport is not None:
                one.transport.close()
        self.open = []


async def closed_loop(ask: Callable[[int], Awaitable[None]], streams: int, requests: int) -> list[float]:
    """So many at once until all are asked; seconds of each."""
    seconds: list[float] = []
    left = iter(range(requests))

    async def one(at: int) -> None:
        for _ in left:
            begin = time.perf_counter()
            await ask(at)
            seconds.append(time.perf_counter() - begin)

    await asyncio.wait_for(asyncio.gather(*(one(at) for at in range(streams))), ROUND_S)
    return seconds


# ---- the ways --------------------------------------------------------------------------------------------------------


Address = tuple["int | None", str]  # of a way: the process in between, and where it listens


@dataclass
class Way:
    """How the engine is reached, and what came of it at one number of streams."""

    name: str
    ask: Callable[[int, int], Awaitable[list[float]]]  # streams, requests
    pid: int | None = None  # of the process in between
    seconds: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    async def measure(self, streams: int, requests: int) -> None:
        """A round."""
        cpu, begin = cpu_s(self.pid), time.perf_counter()
        self.seconds += await self.ask(streams, requests)
        self.wall_s += time.perf_counter() - begin
        self.cpu_s += cpu_s(self.pid) - cpu

    def share_ms(self, share: float) -> float:
        """So many of them were at most this long."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))] * 1_000


def cpu_s(pid: int | None) -> float:
    """What a process has used, all its threads together."""
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measured(
    addresses: dict[str, Address],
    streams: int,
    what: tuple[str, dict[str, object]],
    in_process: Callable[[int, int], Awaitable[list[float]]] | None,
) -> list[Way]:
    """All ways at one number of streams: rounds in turn, after one that does not count."""
    clients = {name: Client(url, what) for name, (_, url) in addresses.items()}
    ways = [Way(name, clients[name].round, pid) for name, (pid, _) in addresses.items()]
    if in_process is not None:
        ways.append(Way(INSIDE, in_process, os.getpid()))
    for way in ways:
        await way.ask(streams, max(2 * streams, 20))
    for _ in range(ROUNDS):
        for way in ways:
            await way.measure(streams, REQUESTS[streams])
    for client in clients.values():
        client.close()
    return ways


def table(ways: list[Way], title: str) -> None:
    """A row for each way; the first is what the others are compared with."""
    titles = f"{'p50 ms':>9}{'p99 ms':>9}{'added p50':>11}{'added p99':>11}{'requests/s':>12}{'CPU s/1,000':>13}"
    print(f"{title:36}{titles}")
    least = [ways[0].share_ms(share) for share in (0.5, 0.99)]
    for way in ways:
        took = [way.share_ms(share) for share in (0.5, 0.99)]
        more = [f"{one - base:.2f}" for one, base in zip(took, least, strict=True)] if way is not ways[0] else ["", ""]
        cpu = "" if way.pid is None else f"{1_000 * way.cpu_s / len(way.seconds):.2f}"
        rate = len(way.seconds) / way.wall_s
        print(f"  {way.name:34}{took[0]:>9.2f}{took[1]:>9.2f}{more[0]:>11}{more[1]:>11}{rate:>12,.0f}{cpu:>13}")


# ---- processes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*line: str, url: str = "") -> Iterator[tuple[int, str]]:
    """A process with its address, which it says itself where it is not known; ended with the block."""
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL if url else subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        if not url:
            assert child.stdout is not None
            said = child.stdout.readline().decode()
            found = SAID.search(said)
            if found is None:
                raise RuntimeError(f"{' '.join(line)} said {said!r}")
            url = found[1]
        yield child.pid, url
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def router_at(path: str, engine: str) -> Iterator[tuple[int, str]]:
    """sglang-router before the engine."""
    port = free_port()
    line = (
        path,
        "launch",
        "--worker-urls",
        engine,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        "round_robin",
    )
    quiet = ("--log-level", "error", "--prometheus-port", str(free_port()), "--max-concurrent-requests", "4096")
    with process(*line, *quiet, url=f"http://127.0.0.1:{port}") as (pid, url):
        yield pid, url


async def until_it_answers(url: str) -> None:
    """Whoever is asked before it is up says no."""
    deadline = time.monotonic() + START_S
    while True:
        client = Client(url, generate(1))
        try:
            await client.round(1, 1)
            return
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        finally:
            client.close()


async def serve(engine: str) -> None:
    """The gateway, in a process of its own."""
    from trimtab.runtime.gateway.server import Gateway
    from trimtab.runtime.gateway.settings import GatewaySettings

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with pooled(engine) as pool, Gateway(pool, GatewaySettings(secrets.token_hex(16))) as gateway:
        print(f"at {gateway.url}", flush=True)
        await ended.wait()


@contextlib.asynccontextmanager
async def pooled(engine: str) -> AsyncIterator[RolloutPool]:
    """A pool with the engine, as anybody would have it; room for all streams."""
    async with RolloutPool() as pool:
        await pool.attach(engine, limit=1_024, version=0)
        yield pool


def inside(pool: RolloutPool, tokens: int) -> Callable[[int, int], Awaitable[list[float]]]:
    """Requests to the pool of this process."""
    params = SamplingParams(max_tokens=tokens)

    async def ask(at: int) -> None:
        answer = await pool.generate([PROMPT], params)
        if len(answer[0].samples[0].token_ids) != tokens:
            raise RuntimeError(f"no whole answer: {answer}")

    return lambda streams, requests: closed_loop(ask, streams, requests)


# ---- all of it -------------------------------------------------------------------------------------------------------


async def compare(addresses: dict[str, Address], pool: RolloutPool) -> None:
    """The tables."""
    for _, url in addresses.values():
        await until_it_answers(url)
    added: dict[str, list[float]] = {"gateway": [], INSIDE: []}
    for streams, tokens in ((1, 1), (1, TOKENS), (32, TOKENS), (256, TOKENS)):
        ways = await measured(addresses, streams, generate(tokens), inside(pool, tokens))
        table(ways, f"/generate, {streams} stream{'s'[: streams > 1]}, {tokens} token{'s'[: tokens > 1]}")
        for way in ways if streams == 1 else ():
            if way.name in added:
                added[way.name].append(way.share_ms(0.5) - ways[0].share_ms(0.5))
    ids = {name: one for name, one in addresses.items() if name != ROUTER}
    table(await measured(ids, 32, completions(TOKENS), None), f"/v1/completions, 32 streams, {TOKENS} tokens")
    if ROUTER in addresses:
        print(f"  ({ROUTER} takes no token ids there)")
    for name, goal in (("gateway", GOAL_MS), (INSIDE, GOAL_INSIDE_MS)):
        one, many = added[name]
        verdict = " and ".join("met" if value < goal else "MISSED" for value in (one, many))
        said = f"{one:.2f} ms (1 token), {many:.2f} ms ({TOKENS} tokens)"
        print(f"{name}: added p50 at 1 stream {said}; goal under {goal:g}: {verdict}")


async def run(addresses: dict[str, Address]) -> None:
    """With a pool in this process."""
    async with pooled(addresses["direct"][1]) as pool:
        await compare(addresses, pool)


def main(router: str | None = None) -> None:
    router = router or os.environ.get("TRIMTAB_BENCH_ROUTER") or shutil.which("sglang-router")
    with contextlib.ExitStack() as stack:
        _, engine = stack.enter_context(process(sys.executable, "-m", "bench.instant_engine"))
        addresses: dict[str, Address] = {"direct": (None, engine)}
        line = (sys.executable, "-m", "bench.gateway", "--serve", engine)
        addresses["gateway"] = stack.enter_context(process(*line))
        if router:
            addresses[ROUTER] = stack.enter_context(router_at(router, engine))
        else:
            print(f"{ROUTER} is not here, so it is left out: pip install {ROUTER}, or --router PATH")
        counts = ", ".join(f"{ROUNDS * count:,} at {streams}" for streams, count in REQUESTS.items())
        print(f"streams of tokens, an event each, from an engine that answers at once; requests by streams: {counts}")
        busy = os.getloadavg()[0] / (os.cpu_count() or 1)
        if busy > 1:  # the client, the engine and what is between them need a core each to be measured
            print(f"others keep this machine busy ({busy:.1f} processes for each core): times are upper bounds")
        asyncio.run(run(addresses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--router", help="the executable of sglang-router")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve))
    else:
        main(given.router)
