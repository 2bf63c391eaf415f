"""Commands that launchers can start in tests: a real llama.cpp server with a command line, and programs that misbehave.

    python rollout_commands.py MODEL HOST PORT [MARK]

Greedy answers repeat whatever runs beside: attention is computed in 32 bits, as in `engine_servers`.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tiny_gguf import tiny_gguf
from trimtab.runtime.rollout.launch.launcher import EngineCommand

HERE = str(Path(__file__).resolve())
SLOTS = 4  # requests that a server computes at once


def llama(model: Path | None = None, mark: str = "", **settings: object) -> EngineCommand:
    """A real llama.cpp server; its command line has the mark, by which a test knows its own."""
    line = (sys.executable, HERE, "{model}", "{host}", "{port}", mark)
    return EngineCommand(str(model or tiny_gguf()), "llamacpp", line, **settings)  # type: ignore[arg-type]


def python(code: str, **settings: object) -> EngineCommand:
    """A program that gets host and port, and is no engine."""
    return EngineCommand("none", command=(sys.executable, "-c", code, "{host}", "{port}"), **settings)  # type: ignore[arg-type]


def serve(model: str, host: str, port: str, mark: str = "") -> None:
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
