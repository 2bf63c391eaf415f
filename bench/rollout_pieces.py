"""CPU that `RolloutPool` spends on answers, by `resume_every`, beside the same answers asked of the engines directly.

The engines are servers in other processes that answer at once, so that all CPU of this process is the pool's.
`python -m bench.rollout_gpu` measures the same on a GPU, with the throughput kept and what a killed engine costs.
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp

from trimtab.rollout import RolloutPool, RolloutRules, SamplingParams

HALF_A_MILLION = 524_288
REQUESTS, TOKENS, PROMPT_TOKENS, LIMIT = 512, 1_024, 128, 256
EVERY: tuple[float, ...] = (64, 128, 256, 512, 1024, math.inf)


@contextmanager
def instant_servers(count: int) -> Iterator[list[str]]:
    """Addresses of servers that generate nothing."""
    line = [sys.executable, "-m", "bench.instant_vllm"]
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [process.stdout.readline().split()[1] for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def prompts() -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randint(5, 200) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]


async def direct(urls: Sequence[str], asked: Sequence[Sequence[int]], logprobs: int | None) -> int:
    """Whole answers, in turn from each server; their tokens."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get(f"{urls[0]}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]

        async def answer(at: int, prompt: Sequence[int]) -> int:
            body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True}
            if logprobs is not None:
                body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
            async with session.post(f"{urls[at % len(urls)]}/v1/completions", json=body) as reply:
                return len((await reply.json())["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*(answer(at, prompt) for at, prompt in enumerate(asked))))


async def through_pool(
    urls: Sequence[str], asked: Sequence[Sequence[int]], logprobs: int | None, every: float
) -> tuple[int, float]:
    """Tokens, and CPU seconds since the engines were attached."""
    async with RolloutPool(RolloutRules(resume_every=every)) as pool:
        for url in urls:
            await pool.attach(url, limit=LIMIT)
        begin = time.process_time()
        answers = await pool.generate(asked, SamplingParams(TOKENS, TOKENS, logprobs=logprobs))
        cpu_s = time.process_time() - begin
    samples = [sample for completion in answers for sample in completion.samples]
    assert all(sample.ok for sample in samples), next(sample.reason for sample in samples if not sample.ok)
    return sum(len(sample.token_ids) for sample in samples), cpu_s


async def measure(urls: Sequence[str]) -> None:
    asked = prompts()
    alone = []
    for logprobs in (None, 0):
        begin = time.process_time()
        tokens = await direct(urls, asked, logprobs)
        alone.append((time.process_time() - begin) * HALF_A_MILLION / tokens)
    print(f"{REQUESTS} answers of {TOKENS} tokens; CPU s per {HALF_A_MILLION:,} tokens, and over direct calls")
    print(f"{'resume_every':>14}{'ids':>10}{'':>8}{'logprobs=0':>12}{'':>8}")
    print(f"{'direct, whole':>14}{alone[0]:>10.2f}{'1.0x':>8}{alone[1]:>12.2f}{'1.0x':>8}")
    for every in EVERY:
        row = []
        for logprobs in (None, 0):
            tokens, cpu_s = await through_pool(urls, asked, logprobs, every)
            row.append(cpu_s * HALF_A_MILLION / tokens)
        ratios = [f"{cost / least:.1f}x" for cost, least in zip(row, alone, strict=True)]
        print(f"{every:>14g}{row[0]:>10.2f}{ratios[0]:>8}{row[1]:>12.2f}{ratios[1]:>8}", flush=True)


def main() -> None:
    with instant_servers(2) as urls:
        asyncio.run(measure(urls))


if __name__ == "__main__":
    main()
