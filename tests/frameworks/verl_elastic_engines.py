"""Engines (llama.cpp servers) and ends of weight syncs for verl_elastic.py, as actors that need no verl."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import ray

CYCLE = 32  # samples between two weight syncs
LONG = 15  # steps with long answers; shorter ones follow
SYNC_S, WAKE_S, SLEEP_S = 0.1, 0.3, 0.1
TOKEN_S = float(os.environ.get("TOKEN_S", "0.03"))  # the pace of a large model: a tiny one is too quick to be drained
PIECE = 10  # tokens of a call, which is paced as a whole
SLOTS, CONTEXT = 8, 512
ROOT = Path(__file__).parents[2]
PYTHON, HELPERS = ROOT / ".venv" / "bin" / "python", ROOT / "tests" / "helpers"


def prompt_ids(prompt):
    return [1 + prompt // 90, 1 + prompt % 90]


def length(prompt):
    """Tokens of an answer: long tails in the first steps, short answers afterwards."""
    tokens = int(min(400.0, 25.0 * random.Random(prompt).paretovariate(1.1)))
    return max(40, tokens) if prompt // CYCLE < LONG else min(20, tokens)


def completion(ids, tokens):
    """A request of llama.cpp's own for the likeliest tokens."""
    return {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}


@ray.remote(num_cpus=0, max_concurrency=1000)
class Engine:
    """A llama.cpp server with the calls of verl's. Asleep, it is stopped by a signal; it ends with its actor."""

    def __init__(self, name):
        self.name, self.version, self.asleep, self.session = name, 0, False, None
        self.open, self.aborting, self.rejecting = asyncio.Event(), asyncio.Event(), False
        self.open.set()
        self.running, self.starts, self.faults, self.aborted = 0, [], [], 0
        self.made = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.up = f"http://127.0.0.1:{port}", False
        given = [os.environ["MODEL"], SLOTS, CONTEXT, port, os.getpid()]
        command = [PYTHON, HELPERS / "engine_servers.py", *map(str, given)]
        quiet = subprocess.DEVNULL
        self.server = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

    async def _wait_up(self):
        self.session = self.session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))
        while not self.up:
            assert self.server.poll() is None, f"the llama.cpp server of {self.name} has ended"
            try:
                async with self.session.get(f"{self.url}/health") as answer:
                    self.up = answer.status == 200
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)

    def pids(self):
        return os.getpid(), self.server.pid

    async def generate(self, request_id, prompt_ids, sampling_params, **others):
        if not self.open.is_set():
            if self.rejecting:
                return self._output([], "aborted")
            await self.open.wait()
        if self.asleep:
            self.faults.append(f"{self.name} was asked for tokens while asleep")
        self.starts.append((time.time(), self.version))
        prompt, had, made = (prompt_ids[0] - 1) * 90 + prompt_ids[1] - 1, len(prompt_ids) - 2, []
        left = min(length(prompt) - had, sampling_params["max_tokens"])
        self.running += 1
        work = asyncio.ensure_future(self._complete(prompt_ids, made, left))
        abort = asyncio.ensure_future(self.aborting.wait())
        try:
            await asyncio.wait({work, abort}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # what went wrong with the server
            elif self.server.poll() is not None:
                self.faults.append(f"{self.name} was aborted after its server had ended")
        finally:
            abort.cancel()
            work.cancel()  # closes the connection: the server stops
            await asyncio.wait({work})
            self.running -= 1
        self.made += len(made)
        self.aborted += len(made) < left
        return self._output(made, "completed" if len(made) == left else "aborted")

    async def _complete(self, ids, made, left):
        await self._wait_up()
        began = time.monotonic()
        while len(made) < left:
            due = min(PIECE, left - len(made))
            body = completion([*ids, *made], due) | {"stream": True}
            async with self.session.post(f"{self.url}/completion", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        made += json.loads(line[6:]).get("tokens") or ()
            await asyncio.sleep(began + len(made) * TOKEN_S - time.monotonic())

    def _output(self, tokens, why):
        fields = {"global_steps": self.version, "server": self.name}
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[0.0] * len(tokens),
            stop_reason=why,
            extra_fields=fields,
            routed_experts=None,
            num_preempted=None,
        )

    async def abort_all_requests(self, reset_prefix_cache=True, reject_request=False):
        self.rejecting = reject_request
        self.open.clear()
        self.aborting.set()
        while self.running:
            await asyncio.sleep(0.005)
        self.aborting.clear()

    async def resume_generation(self):
        self.rejecting = False
        self.open.set()

    async def sleep(self):
        if self.running:
            self.faults.append(f"{self.name} was put to sleep with {self.running} requests")
        await self._wait_up()
        await asyncio.sleep(SLEEP_S)
        self.server.send_signal(signal.SIGSTOP)
        self.asleep = True

    async def wake_up(self):
        self.server.send_signal(signal.SIGCONT)
        await self._wait_up()
        self.asleep = False

    async def load(self, version, wake):
        """New weights, as a checkpoint engine or the colocated trainer sends them."""
        if wake:
            await self.wake_up()
        await asyncio.sleep(WAKE_S if wake else SYNC_S)
        self.version = version

    async def clear_kv_cache(self): ...

    async def release_kv_cache(self): ...

    async def resume_kv_cache(self): ...

    async def seen(self):
        counts = {"aborted": self.aborted, "made": self.made}
        return {"starts": self.starts, "faults": self.faults} | counts


@ray.remote(num_cpus=0)
class SyncWorker:
    """A dedicated replica's end of the weight sync."""

    def __init__(self, engine):
        self.engine, self.group = engine, None

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        if method == "init_process_group":
            self.group = kwargs
        return {"rank": None}

    async def update_weights(self, global_steps=None):
        await self.engine.load.remote(global_steps, False)


@ray.remote(num_cpus=0)
class TrainWorker:
    """One GPU of the trainer; its shared replica's engine is found by name, as verl does."""

    def __init__(self, rank):
        self.rank, self.groups = rank, []

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        if method == "init_process_group":
            self.groups.append(kwargs["of"])
        return {"rank": self.rank}

    async def update_weights(self, global_steps=None, mode=None):
        if mode == "naive":
            await ray.get_actor(f"engine_{self.rank}").load.remote(global_steps, True)
        else:
            await asyncio.sleep(SYNC_S)

    def seen(self):
        return self.groups
