"""Real vLLM and SGLang servers on CPU, each in its own environment and process group, with a tiny random model."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_answers import answer, greedy
from trimtab.core.errors import UnreachableError
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import open_session

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".venv-engines-vllm" / "tiny"
RELEASES = {"vllm": "0.32.0", "vllm-0.26": "0.26.0", "vllm-0.11": "0.11.0", "sglang": "0.5.23"}
"""By the end of the names of their environments (`.venv-engines-vllm` ...)."""
START_S = 900.0
"""For all that are started together; half a minute each where the machine has nothing else to do."""
PROMPT = (40, 41, 42, 43, 44)
_LIBC = ctypes.CDLL(None)


@dataclass
class Process:
    """One server and all that it started."""

    release: str  # a key of RELEASES
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def kind(self) -> str:
        return self.release.partition("-")[0]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """To the whole group when it is to be gone, otherwise to the server alone, as a supervisor would."""
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)

    def gone(self, within_s: float = 60.0) -> bool:
        deadline = time.monotonic() + within_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.alive

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@contextmanager
def engine(release: str, folder: Path) -> Iterator[Process]:
    """Started, not yet up; ended with the block whatever happened."""
    port, venv = _free_port(), ROOT / f".venv-engines-{release}"
    if not (venv / ".ready").exists():
        assert "ENGINE_RELEASES" in os.environ, f"{release} is not here: tools/make-engine-envs makes it"
        pytest.skip(f"{release} was left out by ENGINE_RELEASES")
    command, environment = (_sglang if release == "sglang" else vllm_command)(venv, port)
    template = folder / "chat.jinja"  # the model has none
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    command += ["--chat-template", str(template)]
    log = folder / f"{release}-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            cwd=folder,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    started = Process(release, f"http://127.0.0.1:{port}", log, process)
    try:
        yield started
    finally:
        started.signal(signal.SIGKILL)
        process.wait(60)


async def come_up(process: Process) -> Process:
    """Waits until it serves, by what its adapter says."""
    async with open_session() as session:
        while True:
            assert process.alive, process.tail()
            try:
                adapter, _ = await attach("new", process.url, session, EngineDeadlines(call_s=10))
                if (await adapter.ready()).up:
                    await answer(adapter, greedy("first", PROMPT, 2))
                    await adapter.close()
                    return process
            except UnreachableError:
                pass
            await asyncio.sleep(0.5)


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind: their own session keeps signals for the run from them.

    That is the server alone. vLLM's core is a process of its own, which outlives a server that was killed (seen for an
    hour); the end of the block takes the whole group.
    """
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def vllm_command(venv: Path, port: int) -> tuple[list[str], dict[str, str]]:
    # A release whose transformers cannot read that tokenizer has the same weights with one of its own.
    own = venv / "tiny"
    command = [
        str(venv / "bin/vllm"), "serve", str((own if own.exists() else MODELS) / "v1"), "--host", "127.0.0.1",
        "--port", str(port), "--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni",
        "--kv-cache-memory-bytes", "64M", "--enable-server-load-tracking", "--max-model-len", "2048",
    ]  # fmt: skip
    return command, {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise three processes and 2.9 GB
        "VLLM_CPU_OMP_THREADS_BIND": "all" if venv.name.endswith("-0.11") else "nobind",  # it knows no "nobind"
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _sglang(venv: Path, port: int) -> tuple[list[str], dict[str, str]]:
    command = [
        str(venv / "bin/python"), "-m", "sglang.launch_server", "--model-path", str(MODELS / "v1"),
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native",
        "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16", "--context-length", "2048",
        "--disable-overlap-schedule", "--enable-metrics", "--sleep-on-idle",
    ]  # fmt: skip
    return command, {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
