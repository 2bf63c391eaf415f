"""vLLM servers for this bench: started in sessions of their own, so that a later command can measure them.

What was started is written to FOLDER/servers.json (address, process, log, weight version); a command with the same
folder attaches to what is left of it. Addresses given by hand have no process here, so they cannot be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

TAIL = 3_000  # characters of a log
CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass
class Server:
    """One vLLM server."""

    url: str
    pid: int = 0  # 0: not started here
    log: str = ""

    @property
    def alive(self) -> bool:
        """An ended child that was not waited for counts as ended."""
        if not self.pid:
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """To the server and all that it started."""
        if not self.pid:
            raise RuntimeError(f"{self.url} was not started by this bench, so it is not killed")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def tail(self) -> str:
        return Path(self.log).read_text(errors="replace")[-TAIL:] if self.log else "no log"


@dataclass
class Fleet:
    """The servers, and which weights they have."""

    record: Path
    servers: list[Server] = field(default_factory=list)
    version: int = 0

    @classmethod
    def of(cls, folder: Path, urls: Sequence[str]) -> Fleet:
        """Those at `urls`; without any, those that an earlier command started in this folder and that are alive."""
        fleet = cls(folder / "servers.json")
        if urls:
            fleet.servers = [Server(url.rstrip("/")) for url in urls]
        elif fleet.record.exists():
            known = json.loads(fleet.record.read_text())
            fleet.servers = [server for row in known["servers"] if (server := Server(**row)).alive]
            fleet.version = known["version"]
        return fleet

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers if server.alive]

    def save(self) -> None:
        if any(server.pid for server in self.servers):
            rows = [asdict(server) for server in self.servers if server.alive]
            self.record.write_text(json.dumps({"version": self.version, "servers": rows}, indent=1) + "\n")

    def start(self, count: int, command: Sequence[str], environment: dict[str, str]) -> None:
        """Starts what is missing to `count`. They are not up yet: see `come_up`."""
        for number in range(len(self.servers), count):
            port = _free_port()
            log = self.record.parent / f"vllm-{number}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [*command, "--host", "127.0.0.1", "--port", str(port)],
                    env=os.environ | environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
            self.servers.append(Server(f"http://127.0.0.1:{port}", process.pid, str(log)))
        self.save()

    async def come_up(self, within_s: float) -> float:
        """Waits until all of them answer a request; seconds that it took."""
        begun = time.monotonic()
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._up(server, session, begun + within_s) for server in self.servers))
        return time.monotonic() - begun

    async def _up(self, server: Server, session: aiohttp.ClientSession, deadline: float) -> None:
        while True:
            if not server.alive:
                raise RuntimeError(f"{server.url} has ended; its log ends so:\n{server.tail()}")
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with session.get(f"{server.url}/health", timeout=aiohttp.ClientTimeout(5)) as reply:
                    if reply.status == 200:
                        return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{server.url} is not up; its log ends so:\n{server.tail()}")
            await asyncio.sleep(0.5)

    def stop(self) -> None:
        """Ends what was started here."""
        for server in self.servers:
            if server.pid and server.alive:
                server.kill(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(server.pid and server.alive for server in self.servers) and time.monotonic() < deadline:
            time.sleep(0.1)
        for server in self.servers:
            if server.pid:
                server.kill()  # also children that outlived it
        self.record.unlink(missing_ok=True)


def serve_command(
    python: str, model: Path, *, cpu: bool, gpu_share: float, max_num_seqs: int, max_model_len: int, more: str
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one server, without its address."""
    command = [
        python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--max-num-seqs", str(max_num_seqs),
        "--max-model-len", str(max_model_len),
    ]  # fmt: skip
    if cpu:
        command += [
            "--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni",
            "--kv-cache-memory-bytes", "64M",
        ]  # fmt: skip
    else:
        command += ["--gpu-memory-utilization", str(gpu_share), "--enable-sleep-mode", "--dtype", "bfloat16"]
    return [*command, *shlex.split(more)], ENVIRONMENT | (CPU if cpu else {})


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
