"""Commands that launchers can start in tests: a real llama.cpp server with a command line, and programs that misbehave.

    python rollout_commands.py MODEL HOST PORT [MARK [RANK NODES HEAD DIST_PORT]]

Of an engine over several nodes, rank 0 serves when all others have come to it; they only stay. None of them notices if
another ends. Greedy answers repeat whatever runs beside: attention is computed in 32 bits, as in `engine_servers`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

from tiny_gguf import tiny_gguf
from trimtab.runtime.rollout.launch.launcher import EngineCommand

HERE = str(Path(__file__).resolve())
SLOTS = 4  # requests that a server computes at once


def llama(model: Path | None = None, mark: str = "", **settings: object) -> EngineCommand:
    """A real llama.cpp server; its command line has the mark, by which a test knows its own."""
    line = (sys.executable, HERE, "{model}", "{host}", "{port}", mark)
    return EngineCommand(str(model or tiny_gguf()), "llamacpp", line, **settings)  # type: ignore[arg-type]


def llama_over_nodes(mark: str = "", **settings: object) -> EngineCommand:
    """A server of several ranks, which find one another as those of vLLM and SGLang do."""
    line = (sys.executable, HERE, "{model}", "{host}", "{port}", mark, "{rank}", "{nodes}", "{head}", "{dist_port}")
    return EngineCommand(str(tiny_gguf()), "llamacpp", line, **settings)  # type: ignore[arg-type]


def python(code: str, **settings: object) -> EngineCommand:
    """A program that gets host and port, and is no engine."""
    return EngineCommand("none", command=(sys.executable, "-c", code, "{host}", "{port}"), **settings)  # type: ignore[arg-type]


def meet(rank: int, nodes: int, head: str, port: int) -> list[socket.socket]:
    """Connections of rank 0 to all others, or of another to rank 0."""
    if rank == 0:
        with socket.create_server((head, port)) as server:
            return [server.accept()[0] for _ in range(nodes - 1)]
    while True:
        with contextlib.suppress(ConnectionRefusedError):  # rank 0 is not there yet
            return [socket.create_connection((head, port))]
        time.sleep(0.05)


def serve(model: str, host: str, port: str, mark: str = "", rank: str = "0", nodes: str = "1", *place: str) -> None:
    others = meet(int(rank), int(nodes), place[0], int(place[1])) if place else []
    print(f"rank {rank} of {nodes} has met {len(others)}", flush=True)
    if int(rank) > 0:
        signal.pause()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = [host]
    params.port = int(port)
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * 1024
    params.n_threads_http = 2 * SLOTS + 8
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.endpoint_metrics = params.endpoint_slots = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}.", flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(*sys.argv[1:])
