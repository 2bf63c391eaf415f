"""Generation on all workers of a Ray cluster, while workers join, leave and are lost: an engine for each member.

    python generators.py                                 # llama.cpp on a tiny random model, an engine for each 4 CPUs
    python generators.py --per-node gpu=1 --engine 'vllm serve MODEL --port {port}'

An engine is any server with OpenAI's /v1/completions and a /health; llama.cpp, vLLM and SGLang have both. It is started
by its member, on the member's GPUs, and ends with it. A step is a list of prompts: each member answers its share. If a
member is lost in the middle, or its engine dies, the others answer all prompts again. docs/guides/elastic.md says more.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import trimtab

TINY = Path(__file__).resolve().parents[1] / "rollout" / "tiny_engine.py"
START_S, ANSWER_S, HEALTH_S = 900.0, 300.0, 4.0
AT_ONCE = 8  # requests of a member


class Generator:
    """A member of the group: one engine, a process of its own."""

    def __init__(self, engine: str, tokens: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.tokens = f"http://127.0.0.1:{port}", tokens
        self.log = Path(tempfile.gettempdir()) / f"generator-{os.getpid()}.log"
        with self.log.open("wb") as log:
            command = shlex.split(engine.replace("{port}", str(port)))
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self.health():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not start: {self.log.read_text(errors='replace')[-500:]}")
            time.sleep(0.1)
        self.model = self._call("/v1/models")["data"][0]["id"]

    def enter(self, world: Any) -> None:
        """A new world: which prompts are this member's. New weights would be loaded here."""
        self.world = world

    def step(self, step: int, prompts: list[str]) -> list[str]:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self.answer, prompts[self.world.share(len(prompts))]))

    def answer(self, prompt: str) -> str:
        request = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0}
        try:
            return str(self._call("/v1/completions", request)["choices"][0]["text"])
        except (OSError, ValueError):
            if self.process.poll() is None:
                raise
            os._exit(1)  # without its engine the member is lost: the group does the step again and starts another

    def health(self) -> bool:
        """Asked by the group between steps and beside them."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_S):
                return self.process.poll() is None
        except OSError:
            return False

    def cancel(self) -> None:
        """The node will go, or the group shrinks."""
        self.process.terminate()
        self.log.unlink(missing_ok=True)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate on all workers of a Ray cluster while they join and leave.")
    tiny = f"{sys.executable} {TINY} --port {{port}} --model {tempfile.gettempdir()}/tiny-{os.getuid()}.gguf"
    parser.add_argument("--engine", default=tiny, help="command of an engine; {port} is replaced (tiny llama.cpp)")
    parser.add_argument("--per-node", default="cpu=4", metavar="NAME=AMOUNT", help="what an engine takes (cpu=4)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32, help="of a step (32)")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most (32)")
    parser.add_argument("--max", type=int, help="maximum of engines (as many as fit)")
    parser.add_argument("--address", help="a Ray cluster (default: RAY_ADDRESS, the one here, or a new one)")
    given = parser.parse_args()
    resource, _, amount = given.per_node.partition("=")
    prompts = [f"{number} + {number} =" for number in range(given.prompts)]
    say = functools.partial(print, flush=True)
    with trimtab.ElasticGroup(
        Generator,
        (given.engine, given.tokens),
        per_node={resource: float(amount or 1)},
        max=given.max,
        address=given.address,
        start_timeout_s=START_S,
        wait_s=START_S,
    ) as group:
        for _ in range(given.steps):
            result = group.step(prompts)
            answers = [answer for share in result.values for answer in share]
            assert len(answers) == len(prompts)
            rate = len(answers) / result.seconds
            say(f"step {result.number}: {result.size} engines, {len(answers)} answers, {rate:.1f} a second")
            for change in result.changes:
                say(f"  {change.sentence}")
    say("done; no engine is left")


if __name__ == "__main__":
    main()
