"""What the gateway adds to a call, beside direct calls to the same engine and beside sglang-router, in one run.

The engine answers at once (`bench/instant_engine.py`), so all that is measured is what stands before it. Each way is a
process of its own; the client is the same for all: connections that are kept, a request on each as soon as the one
before it is answered, time from the first byte sent to the last byte of the stream. It acknowledges every packet at
once: a client that does not sees 40 ms more of sglang-router 0.3.2 at one stream, which waits for it between packets.
Rounds of the ways alternate, so that whatever else the machine does falls on all of them. CPU and memory (proportional
set size) are those of all processes in between, their children with them. The bare proxy (`bench/bare_proxy.py`) reads
every event and decides nothing: the floor of Python here.
The pool in process has no HTTP in front: its time is that of `pool.generate`, its CPU that of the whole process, and it
is compared with a direct call by a bare client, which only reads and looks for the end.

sglang-router is taken from the environment (TRIMTAB_BENCH_ROUTER, its executable) or from the search path; `--router`
installs it in an environment of its own, `.venv-router`. Without it, its rows are left out, and that is said.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import cast

from trimtab.rollout import RolloutPool, SamplingParams
from trimtab.runtime.gateway.server import run_alone

ROUNDS = 5
TOKENS = 16
ROUTER, INSIDE, FLOOR = "sglang-router", "RolloutPool in process", "bare proxy"
ONE, TWO, THREE = "gateway", "gateway, 2 processes", "gateway, 3 processes"
START_S, ROUND_S = 60.0, 120.0
SAID = re.compile(r"at (http://[\d.]+:\d+)")
LENGTH = re.compile(rb"content-length: *(\d+)\r\n(?:[^\r]+\r\n)*\r\n", re.IGNORECASE)
TICKS = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = Path(".venv-router")


@dataclass(frozen=True)
class Load:
    """What is asked, and how much of it at once."""

    title: str
    streams: int
    requests: int  # in each round
    tokens: int = TOKENS
    prompt: int = 8
    streamed: bool = True
    path: str = "/generate"

    @property
    def body(self) -> dict[str, object]:
        ids = [10 + at % 50 for at in range(self.prompt)]
        if self.path != "/generate":
            return {"model": "instant", "prompt": ids, "max_tokens": self.tokens, "stream": True}
        logprobs = {} if self.streamed else {"return_logprob": True}
        sampling = {"max_new_tokens": self.tokens}
        return {"input_ids": ids, "sampling_params": sampling, "stream": self.streamed, **logprobs}


SHORT = [Load(f"/generate, {streams} stream{'s'[: streams > 1]} of {TOKENS} tokens", streams, requests)
         for streams, requests in ((1, 200), (32, 1_000), (256, 1_000))]  # fmt: skip
LONG = Load("/generate, 2,000 tokens in, 1,000 out with log-probs, 256 at once", 256, 500, 1_000, 2_000, False)
OPENAI = Load(f"/v1/completions, 32 streams of {TOKENS} tokens", 32, 1_000, path="/v1/completions")


# ---- the client ------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One connection that is kept, with one request on it at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.got: list[bytes] = []
        self.left = 0  # bytes of an answer whose length is said
        self.whole: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        """Some of the answer: it is whole when its last chunk or byte is there."""
        assert self.transport is not None
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if not self.got and (length := LENGTH.search(data)):
            self.left = int(length[1]) + length.end()
        self.got.append(data)
        self.left -= len(data)
        tail = data if len(data) >= 7 else b"".join(self.got[-4:])
        if (self.left == 0 or tail.endswith(b"\r\n0\r\n\r\n")) and self.whole is not None and not self.whole.done():
            self.whole.set_result(b"".join(self.got))

    def connection_lost(self, error: Exception | None) -> None:
        """It broke."""
        if self.whole is not None and not self.whole.done():
            self.whole.set_exception(ConnectionError(f"the connection was closed after {b''.join(self.got)[:300]!r}"))

    async def ask(self, request: bytes) -> bytes:
        """A whole answer."""
        assert self.transport is not None
        self.got, self.left, self.whole = [], 0, asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.whole


class Client:
    """Asks one address, on so many connections."""

    def __init__(self, url: str, load: Load) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)
        data = json.dumps(load.body).encode()
        self.end = b"[DONE]" if load.streamed else b"}"
        head = f"POST {load.path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
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
            if not answer.startswith(b"HTTP/1.1 200") or self.end not in answer[-64:]:
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
    memory_mb: float = 0.0

    async def measure(self, streams: int, requests: int) -> None:
        """A round."""
        cpu, begin = cpu_s(self.pid), time.perf_counter()
        self.seconds += await self.ask(streams, requests)
        self.wall_s += time.perf_counter() - begin
        self.cpu_s += cpu_s(self.pid) - cpu
        self.memory_mb = memory_mb(self.pid)

    def share_ms(self, share: float) -> float:
        """So many of them were at most this long."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))] * 1_000

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.wall_s

    @property
    def cpu_of_1000(self) -> float:
        return 1_000 * self.cpu_s / len(self.seconds)


def tree(pid: int | None) -> list[int]:
    """A process and all that it has started."""
    if pid is None:
        return []
    children = [
        int(word) for at in Path(f"/proc/{pid}/task").iterdir() for word in (at / "children").read_text().split()
    ]
    return [pid, *(each for child in children for each in tree(child))]


def cpu_s(pid: int | None) -> float:
    """What a process and its children have used, all their threads together."""
    used = 0
    for each in tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / TICKS


def memory_mb(pid: int | None) -> float:
    rollups = (Path(f"/proc/{each}/smaps_rollup").read_text() for each in tree(pid))
    return sum(int(line.split()[1]) for text in rollups for line in text.splitlines() if line.startswith("Pss:")) / 1024


async def measured(
    addresses: dict[str, Address], load: Load, in_process: Callable[[int, int], Awaitable[list[float]]] | None
) -> list[Way]:
    """All ways under one load: rounds in turn, after one that does not count."""
    clients = {name: Client(url, load) for name, (_, url) in addresses.items()}
    ways = [Way(name, clients[name].round, pid) for name, (pid, _) in addresses.items()]
    if in_process is not None:
        ways.append(Way(INSIDE, in_process, os.getpid()))
    for way in ways:
        await way.ask(load.streams, max(2 * load.streams, 20))
    for _ in range(ROUNDS):
        for way in ways:
            await way.measure(load.streams, load.requests)
    for client in clients.values():
        client.close()
    return ways


def table(ways: list[Way], title: str) -> None:
    """A row for each way; the first is what the others are compared with, and so is the router."""
    router = next((way for way in ways if way.name == ROUTER), None)
    titles = f"{'added p50':>11}{'added p99':>11}{'requests/s':>12}{'CPU s/1,000':>13}{'MB':>6}"
    print(f"{title:66}" + ("" if router is None else "of the router's: requests/s, CPU"))
    print(f"  {'':24}{'p50 ms':>9}{'p99 ms':>9}{titles}")
    least = [ways[0].share_ms(share) for share in (0.5, 0.99)]
    for way in ways:
        took = [way.share_ms(share) for share in (0.5, 0.99)]
        more = [f"{one - base:.2f}" for one, base in zip(took, least, strict=True)] if way is not ways[0] else ["", ""]
        cpu, memory = ("", "") if way.pid is None else (f"{way.cpu_of_1000:.2f}", f"{way.memory_mb:,.0f}")
        against = ""
        if router is not None and way not in (router, ways[0]):
            against = f"  {way.rate / router.rate:.0%}, {way.cpu_of_1000 / router.cpu_of_1000:.1f}x"
        figures = f"{took[0]:>9.2f}{took[1]:>9.2f}{more[0]:>11}{more[1]:>11}{way.rate:>12,.0f}{cpu:>13}{memory:>6}"
        print(f"  {way.name:24}{figures}{against}", flush=True)


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
        path, "launch", "--worker-urls", engine, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
    )  # fmt: skip
    quiet = ("--log-level", "error", "--prometheus-port", str(free_port()), "--max-concurrent-requests", "4096")
    with process(*line, *quiet, url=f"http://127.0.0.1:{port}") as (pid, url):
        yield pid, url


async def until_it_answers(url: str) -> None:
    """Whoever is asked before it is up says no."""
    deadline = time.monotonic() + START_S
    while True:
        client = Client(url, SHORT[0])
        try:
            await client.round(1, 1)
            return
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        finally:
            client.close()


async def serve(engine: str, processes: int) -> None:
    """The gateway, in a process of its own."""
    from trimtab.runtime.gateway.server import Gateway
    from trimtab.runtime.gateway.settings import GatewaySettings

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    settings = GatewaySettings(secrets.token_hex(16), processes=processes)
    async with pooled(engine) as pool, Gateway(pool, settings) as gateway:
        print(f"at {gateway.url}", flush=True)
        await ended.wait()


@contextlib.asynccontextmanager
async def pooled(engine: str) -> AsyncIterator[RolloutPool]:
    """A pool with the engine, as anybody would have it; room for all streams."""
    async with RolloutPool() as pool:
        await pool.attach(engine, limit=1_024, version=0)
        yield pool


def inside(pool: RolloutPool, load: Load) -> Callable[[int, int], Awaitable[list[float]]]:
    """Requests to the pool of this process."""
    params, prompt = SamplingParams(max_tokens=load.tokens), list(range(10, 10 + load.prompt))

    async def ask(at: int) -> None:
        answer = await pool.generate([prompt], params)
        if len(answer[0].samples[0].token_ids) != load.tokens:
            raise RuntimeError(f"no whole answer: {answer}")

    return lambda streams, requests: closed_loop(ask, streams, requests)


# ---- all of it -------------------------------------------------------------------------------------------------------


async def compare(addresses: dict[str, Address]) -> None:
    """The tables."""
    for _, url in addresses.values():
        await until_it_answers(url)
    async with pooled(addresses["direct"][1]) as pool:
        for load in SHORT:
            table(await measured(addresses, load, inside(pool, load)), load.title)
    table(await measured(addresses, LONG, None), LONG.title)
    # The router takes no token ids there, and the bare proxy knows one path.
    some = {name: one for name, one in addresses.items() if name not in (ROUTER, FLOOR)}
    table(await measured(some, OPENAI, None), OPENAI.title)


def router_path(install: bool) -> str | None:
    """The executable of sglang-router, if it is here or is to be installed."""
    found = os.environ.get("TRIMTAB_BENCH_ROUTER") or shutil.which(ROUTER)
    here = ENVIRONMENT / "bin" / ROUTER
    if found is None and install and not here.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(ENVIRONMENT / "bin" / "pip"), "install", "--quiet", ROUTER], check=True)
    return found or (str(here) if here.exists() else None)


def main() -> None:
    router = router_path("--router" in sys.argv)
    with contextlib.ExitStack() as stack:
        _, engine = stack.enter_context(process(sys.executable, "-m", "bench.instant_engine"))
        addresses: dict[str, Address] = {"direct": (None, engine)}
        addresses[FLOOR] = stack.enter_context(process(sys.executable, "-m", "bench.bare_proxy", engine))
        for count, name in enumerate((ONE, TWO, THREE), 1):
            line = (sys.executable, "-m", "bench.gateway", "--serve", engine, str(count))
            addresses[name] = stack.enter_context(process(*line))
        if router:
            said = subprocess.run([router, "--version"], capture_output=True, text=True, check=False).stdout
            print(f"{ROUTER}: {said.split()[-1] if said else 'of unknown version'}")
            addresses[ROUTER] = stack.enter_context(router_at(router, engine))
        else:
            print(f"{ROUTER} is not here, so it is left out; --router installs it")
        counts = ", ".join(f"{ROUNDS * load.requests:,} at {load.streams}" for load in (*SHORT, LONG))
        print(f"an engine that answers at once; a stream has an event for each token; requests: {counts}")
        busy = os.getloadavg()[0] / (os.cpu_count() or 1)
        if busy > 1:  # the client, the engine and what is between them need a core each to be measured
            print(f"others keep this machine busy ({busy:.1f} processes for each core): times are upper bounds")
        run_alone(compare(addresses))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        run_alone(serve(sys.argv[2], int(sys.argv[3])))
    else:
        main()
