"""Answers made in segments beside whole ones: the same tokens, the same log-probs, the same lengths.

Greedy answers are compared token by token: up to where two whole runs (asked in another order, half of them at a time)
part as well, and by how little the token there had won. Log-probs are compared up to there too; and, for sampled
answers, each token's log-prob as generated with that of the same tokens read at once as a prompt, so that every token
counts however runs part. Ends and lengths of sampled answers are compared as two samples of one distribution.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.rollout_gpu.asking import Answer, Bench, Order, through, tokens_of
from bench.rollout_gpu.weights import agreed, compare, told

GREEDY, SCORED, SCORED_TOKENS = 128, 32, 512
GOAL_P = 0.01


async def segments(bench: Bench) -> dict[str, Any]:
    """All of it."""
    found = bench.results.setdefault("segments", {})
    found["greedy"] = await _greedy(bench)
    found["scored"] = await _scored(bench)
    found["sampled"] = await _sampled(bench)
    return dict(found)


async def _in_segments(bench: Bench, orders: Sequence[Order]) -> tuple[list[Answer], float]:
    """Answers by the pool, and how many requests an engine got for each of them."""
    name = "vllm:request_success_total"
    before = [await bench.direct.counted(url, name) for url in bench.urls]
    async with bench.pool(bench.urls, resume_every=str(bench.segment)) as pool:
        answers = await through(pool, orders)
    after = [await bench.direct.counted(url, name) for url in bench.urls]
    asked = sum(now[0] - then[0] for now, then in zip(after, before, strict=True))
    return answers, asked / len(answers)


async def _greedy(bench: Bench) -> dict[str, Any]:
    count = min(GREEDY, bench.answers)
    orders = [Order(prompt, bench.tokens, temperature=0.0, logprobs=2) for prompt in bench.prompts(count)]
    first = await bench.direct.all(bench.urls, orders)
    mixed = list(range(count))
    random.Random(1).shuffle(mixed)
    second: list[Answer] = list(first)
    for half in (mixed[: count // 2], mixed[count // 2 :]):
        for at, answer in zip(half, await bench.direct.all(bench.urls, [orders[at] for at in half]), strict=True):
            second[at] = answer
    third, asked = await _in_segments(bench, orders)
    found: dict[str, Any] = {
        "answers": count, "tokens": bench.tokens, "segment": bench.segment, "requests_per_answer": round(asked, 2),
        "whole": compare(first, second), "segments": compare(first, third),
        "logprobs_whole": _spread(_until_parted(first, second)),
        "logprobs_segments": _spread(_until_parted(first, third)),
    }  # fmt: skip
    print(
        f"\n{count} greedy answers of {bench.tokens} tokens, segments of {bench.segment}: {asked:.1f} requests for each"
    )
    for way in ("whole", "segments"):
        print(
            f"  {way:9} beside whole: {told(found[way])}; log-probs differ by {_told(found[f'logprobs_{way}'])}",
            flush=True,
        )
    return found


async def _scored(bench: Bench) -> dict[str, Any]:
    count, tokens = min(SCORED, bench.answers), min(SCORED_TOKENS, bench.tokens)
    orders = [Order(prompt, tokens, logprobs=0) for prompt in bench.prompts(count)]
    whole = await bench.direct.all(bench.urls, orders)
    cut, asked = await _in_segments(bench, orders)
    found: dict[str, Any] = {
        "answers": count, "tokens": tokens, "requests_per_answer": round(asked, 2),
        "whole": _spread(await _against_prompt(bench, orders, whole)),
        "segments": _spread(await _against_prompt(bench, orders, cut)),
    }  # fmt: skip
    print(
        f"{count} sampled answers of {tokens} tokens, log-probs as generated and of the same tokens read as a prompt:"
    )
    for way in ("whole", "segments"):
        print(f"  {way:9} differ by {_told(found[way])}", flush=True)
    return found


async def _against_prompt(bench: Bench, orders: Sequence[Order], answers: Sequence[Answer]) -> list[float]:
    async def one(url: str, order: Order, answer: Answer) -> list[float]:
        ids = [*order.prompt, *answer.token_ids]
        body = replace(order, prompt=tuple(ids), max_tokens=1, temperature=0.0, logprobs=None).body(bench.direct.model)
        reply = await bench.direct.post(url, body | {"prompt_logprobs": 0})
        read = reply["choices"][0]["prompt_logprobs"][len(order.prompt) :]
        assert answer.logprobs is not None
        return [
            made - place[str(token)]["logprob"]
            for token, made, place in zip(answer.token_ids, answer.logprobs, read, strict=True)
            if made is not None
        ]

    found: list[float] = []
    pairs = list(zip(orders, answers, strict=True))
    for at in range(0, len(pairs), 8):
        rows = await asyncio.gather(*(one(bench.urls[0], *pair) for pair in pairs[at : at + 8]))
        found += [value for row in rows for value in row]
    return found


async def _sampled(bench: Bench) -> dict[str, Any]:
    vocabulary = json.loads((Path(bench.models[0]) / "config.json").read_text())["vocab_size"]
    mean = max(4, bench.tokens // 5)
    stops = tuple(random.Random(5).sample(range(1, vocabulary), max(1, round(vocabulary / mean))))
    orders = [
        Order(prompt, bench.tokens, stop_ids=stops, exact=False) for prompt in bench.prompts(bench.sampled, seed=2)
    ]
    whole = await bench.direct.all(bench.urls, orders)
    cut, asked = await _in_segments(bench, orders)
    lengths = [[len(answer.token_ids) for answer in answers] for answers in (whole, cut)]
    ends = [sum(answer.stopped for answer in answers) for answers in (whole, cut)]
    found: dict[str, Any] = {
        "answers": len(whole), "stop_ids": len(stops), "requests_per_answer": round(asked, 2),
        "mean_tokens": [round(tokens_of(answers) / len(answers), 1) for answers in (whole, cut)], "stopped": ends,
        "ks_p_lengths": round(ks_p(*lengths), 4), "p_ends": round(share_p(ends, len(whole)), 4),
    }  # fmt: skip
    print(
        f"{len(whole)} sampled answers with {len(stops)} stop ids, {asked:.2f} requests for each; whole, in segments:"
    )
    print(f"  mean length {found['mean_tokens'][0]} and {found['mean_tokens'][1]}, ended by a stop id {ends[0]} and "
          f"{ends[1]}; lengths KS p {found['ks_p_lengths']}, ends p {found['p_ends']} (goal: above {GOAL_P})",
          flush=True)  # fmt: skip
    return found


def _until_parted(ones: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    found: list[float] = []
    for one, other in zip(ones, others, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        same = agreed(one, other)
        found += [(a or 0.0) - (b or 0.0) for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=True)]
    return found


def _spread(differences: Sequence[float]) -> dict[str, float]:
    ordered = sorted(abs(value) for value in differences) or [0.0]
    return {
        "tokens": len(differences), "mean": sum(ordered) / len(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "max": ordered[-1], "bias": sum(differences) / max(1, len(differences)),
    }  # fmt: skip


def _told(spread: dict[str, float]) -> str:
    return (
        f"mean {spread['mean']:.2e}, p99 {spread['p99']:.2e}, max {spread['max']:.2e}, bias {spread['bias']:+.1e} "
        f"({spread['tokens']:,.0f} tokens)"
    )


def ks_p(ones: Sequence[int], others: Sequence[int]) -> float:
    """Two-sample Kolmogorov-Smirnov, asymptotic p; with ties it is too large rather than too small."""
    ones, others = sorted(ones), sorted(others)
    distance, at, to = 0.0, 0, 0
    for value in sorted({*ones, *others}):
        while at < len(ones) and ones[at] <= value:
            at += 1
        while to < len(others) and others[to] <= value:
            to += 1
        distance = max(distance, abs(at / len(ones) - to / len(others)))
    root = math.sqrt(len(ones) * len(others) / (len(ones) + len(others)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0
    return min(1.0, 2 * sum((-1.0) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101)))


def share_p(counts: Sequence[int], of: int) -> float:
    """Two-sided p that two counts out of as many have one probability, by the normal distribution."""
    share = sum(counts) / (2 * of)
    if share in (0.0, 1.0):
        return 1.0
    z = (counts[0] - counts[1]) / of / math.sqrt(share * (1 - share) * 2 / of)
    return math.erfc(abs(z) / math.sqrt(2))
