"""What an answer through `RolloutPool` costs over the same answer asked of the engines directly.

    python -m bench rollout_pieces                       # against servers that cost next to nothing
    python -m bench.rollout_pieces URL URL [--tokens 1024] [--requests 512] [--limit 256] [--logprobs 0] [--n 8]
                                   [--every 128,512,inf] [--tail] [--kill PID] [--ids 5,200]

The second form asks vLLM servers that run already, both ways in turn, three times, with the same parameters; `--tail`
draws lengths with a mean of about 1,000 and a cap of 8,000. `--kill` ends the first server's process, and all below it,
when half of the tokens have been made, and says how many tokens were made again and how long the rest took.

CPU is that of this process, for half a million tokens. `kept` is the pool's tokens/s over the direct ones of the same
round.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp

from trimtab.rollout import RolloutPool, RolloutRules, SamplingParams
from trimtab.runtime.procs.processes import descendants, send

HALF_A_MILLION = 524_288
PROMPT_TOKENS = 128
EVERY: tuple[float, ...] = (64, 128, 256, 512, 1024, math.inf)
CUT_TOKENS = (3, 10, 20)  # of a request, that it could have made while it was cut


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


def lengths(count: int, tokens: int, tail: bool, seed: int) -> list[int]:
    """Tokens of each answer; with a tail: lognormal, a mean of about 1,000, at most 8,000."""
    if not tail:
        return [tokens] * count
    chance = random.Random(seed)
    return [max(1, min(8_000, round(chance.lognormvariate(6.4, 1.0)))) for _ in range(count)]


def prompts(count: int, ids: tuple[int, int]) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randint(*ids) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def direct(urls: Sequence[str], asked: Sequence[Sequence[int]], sizes: Sequence[int], given: Any) -> float:
    """Whole answers, in turn from each server; tokens per second."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get(f"{urls[0]}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        places = [asyncio.Semaphore(given.limit) for _ in urls]

        async def answer(at: int, prompt: Sequence[int], size: int) -> int:
            body = {
                "model": model, "prompt": prompt, "max_tokens": size, "min_tokens": size, "temperature": 1.0,
                "return_token_ids": True,
            }  # fmt: skip
            if given.logprobs is not None:
                body |= {"logprobs": given.logprobs, "return_tokens_as_token_ids": True}
            async with (
                places[at % len(urls)],
                session.post(f"{urls[at % len(urls)]}/v1/completions", json=body) as reply,
            ):
                return len((await reply.json())["choices"][0]["token_ids"])

        begin = time.perf_counter()
        jobs = [
            answer(at * given.n + index, prompt, size)
            for at, (prompt, size) in enumerate(zip(asked, sizes, strict=True))
            for index in range(given.n)
        ]
        made = sum(await asyncio.gather(*jobs))
        return made / (time.perf_counter() - begin)


async def through_pool(
    urls: Sequence[str], asked: Sequence[Sequence[int]], sizes: Sequence[int], every: float, given: Any
) -> dict[str, float]:
    """The same through a pool; tokens per second, CPU, and what a kill cost."""
    found: dict[str, float] = {}
    async with RolloutPool(RolloutRules(resume_every=every)) as pool:
        for url in urls:
            await pool.attach(url, limit=given.limit)
        before = await generated(urls)
        cpu, begin = time.process_time(), time.perf_counter()
        jobs = [
            pool.generate([prompt], SamplingParams(size, size, n=given.n, logprobs=given.logprobs))
            for prompt, size in zip(asked, sizes, strict=True)
        ]
        answers = asyncio.gather(*jobs)
        killed = begin
        if given.kill:
            total = sum(sizes) * given.n
            while (made := await generated(urls) - before) < total / 2:
                await asyncio.sleep(0.05)
            for process in [*descendants(given.kill)]:
                send(process, signal.SIGKILL)
            os.kill(given.kill, signal.SIGKILL)
            killed, found["rest"] = time.perf_counter(), total - made
            at_kill = await generated(urls[1:])
        samples = [sample for row in await answers for completion in row for sample in completion.samples]
        took = time.perf_counter() - begin
        tokens = sum(len(sample.token_ids) for sample in samples)
        assert all(sample.ok for sample in samples), next(sample.reason for sample in samples if not sample.ok)
        found |= {"per_s": tokens / took, "cpu_s": (time.process_time() - cpu) * HALF_A_MILLION / tokens}
        if given.kill:
            found["rest_s"] = time.perf_counter() - killed
            found["again"] = await generated(urls[1:]) - at_kill - found["rest"]
            found["moved"] = sum(sample.moves + sample.restarts for sample in samples)
    return found


async def generated(urls: Sequence[str]) -> float:
    """Tokens that these servers have made, by their own count."""
    total = 0.0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        for url in urls:
            async with session.get(f"{url}/metrics") as reply:
                lines = [line for line in (await reply.text()).splitlines() if not line.startswith("#")]
            total += sum(float(line.split()[-1]) for line in lines if "generation_tokens_total" in line)
    return total


async def compare(urls: Sequence[str], given: Any) -> None:
    """Both ways in turn."""
    sizes = lengths(given.requests // given.n, given.tokens, given.tail, 3)
    asked = prompts(len(sizes), given.ids)
    print(f"{len(sizes)} prompts x {given.n}, {sum(sizes) * given.n:,} tokens, logprobs {given.logprobs}")
    print(f"{'resume_every':>14}{'direct/s':>12}{'pool/s':>12}{'kept':>8}{'CPU s per 524,288':>20}")
    for every in given.every:
        kept, cpus = [], []
        for _ in range(given.rounds):
            alone = await direct(urls, asked, sizes, given)
            found = await through_pool(urls, asked, sizes, every, given)
            kept.append(found["per_s"] / alone)
            cpus.append(found["cpu_s"])
            line = f"{every:>14g}{alone:>12,.0f}{found['per_s']:>12,.0f}{kept[-1]:>8.1%}{cpus[-1]:>20.2f}"
            if given.kill:
                line += f"  rest {found['rest']:,.0f} in {found['rest_s']:.2f} s, again {found['again']:,.0f}"
            print(line, flush=True)
            if given.kill:
                return
        print(f"{every:>14g}{'median':>12}{'':>12}{statistics.median(kept):>8.1%}{statistics.median(cpus):>20.2f}")


async def instant(urls: Sequence[str], given: Any) -> None:
    """CPU of this process, where engines answer at once."""
    asked, sizes = prompts(given.requests, given.ids), [given.tokens] * given.requests
    print(f"{len(sizes)} answers of {given.tokens} tokens; CPU s per {HALF_A_MILLION:,} tokens")
    print(f"{'resume_every':>14}{'ids':>10}{'logprobs=0':>12}")
    for every in given.every:
        row = []
        for given.logprobs in (None, 0):
            row.append((await through_pool(urls, asked, sizes, every, given))["cpu_s"])
        print(f"{every:>14g}{row[0]:>10.2f}{row[1]:>12.2f}", flush=True)
    row = []
    for given.logprobs in (None, 0):
        begin = time.process_time()
        await direct(urls, asked, sizes, given)
        row.append((time.process_time() - begin) * HALF_A_MILLION / sum(sizes))
    print(f"{'direct, whole':>14}{row[0]:>10.2f}{row[1]:>12.2f}")


def curve(given: Any) -> None:
    """Throughput kept against tokens made again, by what a cut costs its request: some tokens of its own."""
    print(f"\nsegments: throughput kept, by the tokens that a request loses at a cut; answers of {given.tokens} tokens")
    heads = "".join(f"{f'{lost} lost':>10}" for lost in CUT_TOKENS)
    print(f"{'resume_every':>14}{heads}{'made again, mean':>18}{'at most':>9}")
    for every in given.every:
        cuts = 0.0 if every >= given.tokens else given.tokens / every - 0.5
        kept = "".join(f"{given.tokens / (given.tokens + cuts * lost):>10.1%}" for lost in CUT_TOKENS)
        most = min(every, given.tokens)
        print(f"{every:>14g}{kept}{most / 2:>18.0f}{most:>9.0f}")


def main() -> None:
    words = sys.argv[1:] if sys.argv[0].endswith("rollout_pieces.py") else []
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="*")
    for name, kind, usual in (("tokens", int, 1024), ("requests", int, 512), ("limit", int, 256), ("n", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=usual)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--every", type=lambda text: tuple(float(word) for word in text.split(",")), default=EVERY)
    parser.add_argument("--ids", type=lambda text: tuple(int(word) for word in text.split(",")), default=(5, 200))
    given = parser.parse_args(words)
    if given.urls:
        asyncio.run(compare(given.urls, given))
        return
    with instant_servers(2) as urls:
        asyncio.run(instant(urls, given))
    curve(given)


if __name__ == "__main__":
    main()
