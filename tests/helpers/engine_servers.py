"""Real llama.cpp servers as processes of their own, for tests: started in a fraction of a second, and hurt on demand.

Each listens on a free port that it chose itself and told through its log. None outlives the tests: `servers` ends what
it started, and the kernel ends a server whose parent died. Their logs stay where the caller says.

Greedy answers are the same whatever runs beside them, up to 3e-6 nat, because attention is computed in 32 bits: with
flash attention, which rounds to 16 bits, the same prompt differs by 1.5e-3 nat between a lone and a crowded server.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiny_gguf import tiny_gguf

SAID = re.compile(r"serving at (http://[\d.]+:\d+)\.")  # its own log may run on in the same line
START_S = 30.0


@dataclass
class LlamaServer:
    """One server process."""

    model: Path
    log: Path
    slots: int
    process: subprocess.Popen[bytes]
    url: str = ""
    log_since: int = 0  # what is before this in its log was said by the process before it

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """As kill -9 does: no farewell."""
        self.process.kill()
        self.process.wait(START_S)

    def freeze(self) -> None:
        """It stands still with all its connections open."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @asynccontextmanager
    async def slowed(self, share: float = 0.2, beat_s: float = 0.05) -> AsyncIterator[None]:
        """It computes for only this share of the time."""
        task = asyncio.create_task(self._beat(share, beat_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if self.alive:
                self.thaw()

    async def _beat(self, share: float, beat_s: float) -> None:
        while self.alive:
            self.freeze()
            await asyncio.sleep(beat_s * (1 - share))
            if self.alive:
                self.thaw()
            await asyncio.sleep(beat_s * share)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Whatever state it is in, it is gone afterwards."""
        if self.alive:
            self.process.kill()  # also ends one that stands still
        self.process.wait(START_S)


def start(
    folder: Path, *, model: Path | None = None, slots: int = 4, context: int = 1024, port: int = 0, name: str = ""
) -> LlamaServer:
    """Begins one; `wait_up` waits for it. `context` is for each slot. It ends with the thread that calls this."""
    model = model or tiny_gguf()
    log = folder / f"{name or f'engine-{time.monotonic_ns()}'}.log"
    since = len(log.read_text(errors="replace")) if log.exists() else 0
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, str(model), str(slots), str(context), str(port), str(os.getpid())],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    return LlamaServer(model, log, slots, process, log_since=since)


def wait_up(server: LlamaServer) -> LlamaServer:
    """Until it listens."""
    for _ in _tries(server):
        time.sleep(0.01)
    return server


async def come_up(server: LlamaServer) -> LlamaServer:
    """Until it listens, while other things go on."""
    for _ in _tries(server):
        await asyncio.sleep(0.01)
    return server


def _tries(server: LlamaServer) -> Iterator[None]:
    """Until its log says where it listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        said = server.log.read_text(errors="replace")[server.log_since :]
        if found := SAID.search(said):
            server.url = found[1]
            return
        assert server.alive, f"it ended at once:\n{said[-2000:]}"
        yield
    server.stop()
    raise AssertionError(f"no engine in {START_S:g} s:\n{said[-2000:]}")


def again(server: LlamaServer, *, model: Path | None = None, context: int = 1024) -> LlamaServer:
    """A new process at the address of one that is gone, as a supervisor would start it; not yet up."""
    assert not server.alive
    return start(
        server.log.parent, model=model or server.model, slots=server.slots, context=context, port=server.port,
        name=server.log.stem,
    )  # fmt: skip


@contextmanager
def servers(count: int, folder: Path, **wishes: object) -> Iterator[list[LlamaServer]]:
    """So many, started side by side; all of them end with the block. What is appended to the list ends with it too."""
    started = [start(folder, name=f"engine-{index}", **wishes) for index in range(count)]  # type: ignore[arg-type]
    try:
        for server in started:
            wait_up(server)
        yield started
    finally:
        for server in started:
            server.stop()


def serve(model: str, slots: int, context: int, port: int, parent: int) -> None:
    """The server itself, in its own process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.n_threads_http = 2 * slots + 8
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.endpoint_metrics = params.endpoint_slots = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}.", flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
