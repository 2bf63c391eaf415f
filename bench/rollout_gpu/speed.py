"""Tokens per second and client CPU: directly and through the pool, in turns, with the same orders.

`speed` has two loads, on two engines and on one: answers of one exact length at once, and `n` samples with log-probs
whose lengths have a long tail. Two engines on one GPU take turns: there the long tail ends sooner if the longest
answers are on one of them (`--affinity`, as a direct call with n samples has it), unlike on two GPUs. `curve` shows
what `resume_every` costs: the rate at each setting, and how many tokens a lost engine would cost then, for the same
answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.rollout_gpu.asking import Bench, Cost, Order, Stopwatch, tail_lengths, through, tokens_of

GOAL_RATE, GOAL_CPU_S = 0.95, 3.0  # of the direct rate; CPU for half a million tokens


async def speed(bench: Bench) -> dict[str, Any]:
    """Both loads."""
    found: dict[str, Any] = bench.results.setdefault("speed", {})
    await warm_up(bench)
    prompts, samples, mean, longest = bench.tail
    lengths = tail_lengths(prompts, mean, longest) if prompts else []
    for engines in bench.asked:
        urls, who = bench.urls[:engines], f"{engines} engine{'s' * (engines > 1)}"
        if bench.answers:
            title = f"{who}, {bench.answers} answers of {bench.tokens} tokens"
            found[title] = await in_turns(bench, title, urls, bench_equal(bench))
        if prompts:
            title = (
                f"{who}, {prompts} prompts x {samples} samples with log-probs, "
                f"lengths {min(lengths)} to {max(lengths):,}, mean {statistics.mean(lengths):,.0f}"
            )
            found[title] = await in_turns(bench, title, urls, bench_tail(bench, lengths))
    return found


def bench_equal(bench: Bench) -> Callable[[], list[Order]]:
    return lambda: [Order(prompt, bench.tokens) for prompt in bench.prompts(bench.answers)]


def bench_tail(bench: Bench, lengths: Sequence[int]) -> Callable[[], list[Order]]:
    samples = bench.tail[1]
    return lambda: [
        Order(prompt, length, n=samples, logprobs=0)
        for prompt, length in zip(bench.prompts(len(lengths)), lengths, strict=True)
    ]


async def warm_up(bench: Bench) -> None:
    """Every engine has seen the batch sizes of what follows, with log-probs and without."""
    count, tokens = min(max(bench.answers, 64), bench.limit), min(bench.tokens, 64)
    for url in bench.urls:
        for logprobs in (None, 0):
            orders = [Order(prompt, tokens, logprobs=logprobs) for prompt in bench.prompts(count)]
            await bench.direct.all([url], orders)


async def in_turns(bench: Bench, title: str, urls: list[str], orders: Callable[[], list[Order]]) -> dict[str, Any]:
    """Direct, pool, direct, pool ..."""
    print(
        f"\n{title}\n{'':10}{'tokens':>10}{'seconds':>9}{'tokens/s':>10}{'CPU s':>8}{'CPU s per 500k':>16}", flush=True
    )
    ways: dict[str, list[Cost]] = {"direct": [], "pool": []}
    for _ in range(bench.rounds):
        for way, costs in ways.items():
            costs.append(await (directly if way == "direct" else by_pool)(bench, urls, orders()))
            print(f"{way:10}{cells(costs[-1])}", flush=True)
    share = statistics.median(map(rate, ways["pool"])) / statistics.median(map(rate, ways["direct"]))
    worst = max(cost.cpu_per_half_million for cost in ways["pool"])
    print(f"the pool keeps {share:.1%} of the direct rate (medians; goal {GOAL_RATE:.0%}), CPU at most {worst:.2f} s "
          f"for half a million tokens (goal {GOAL_CPU_S:g})", flush=True)  # fmt: skip
    return {
        "direct": [cost.row() for cost in ways["direct"]], "pool": [cost.row() for cost in ways["pool"]],
        "rate_kept": round(share, 4), "cpu_s_per_500k": round(worst, 3),
    }  # fmt: skip


async def directly(bench: Bench, urls: list[str], orders: list[Order]) -> Cost:
    watch = Stopwatch()
    answers = await bench.direct.all(urls, orders)
    cost = watch.cost(tokens_of(answers))
    check_lengths(orders, cost.tokens)
    return cost


async def by_pool(bench: Bench, urls: list[str], orders: list[Order], resume_every: str | None = None) -> Cost:
    async with bench.pool(urls, resume_every=resume_every) as pool:
        watch = Stopwatch()
        answers = await through(pool, orders)
        cost = watch.cost(tokens_of(answers))
    check_lengths(orders, cost.tokens)
    return cost


def check_lengths(orders: Sequence[Order], tokens: int) -> None:
    wanted = sum(order.max_tokens * order.n for order in orders)
    if tokens != wanted:
        raise RuntimeError(f"{tokens:,} tokens came and {wanted:,} were asked for")


def rate(cost: Cost) -> float:
    return cost.rate


def cells(cost: Cost) -> str:
    return (
        f"{cost.tokens:>10,}{cost.seconds:>9.2f}{cost.rate:>10,.0f}{cost.cpu_s:>8.2f}{cost.cpu_per_half_million:>16.2f}"
    )


async def curve(bench: Bench) -> dict[str, Any]:
    """The rate at each `resume_every`, and what a lost engine costs then."""
    urls, orders = bench.urls, bench_equal(bench)
    direct = await directly(bench, urls, orders())
    print(f"\n{len(urls)} engines, {bench.answers} answers of {bench.tokens} tokens; lost: tokens made again if an "
          f"engine is killed, for each answer on it\n{'resume_every':>13}{'tokens/s':>10}{'of direct':>11}"
          f"{'CPU s per 500k':>16}{'lost, mean':>12}{'at most':>9}\n{'direct':>13}{direct.rate:>10,.0f}",
          flush=True)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for every in bench.curve:
        cost = await by_pool(bench, urls, orders(), every)
        most = min(float(every), bench.tokens)
        rows.append({"resume_every": every, "lost_at_most": most, **cost.row()})
        print(f"{every:>13}{cost.rate:>10,.0f}{cost.rate / direct.rate:>11.1%}{cost.cpu_per_half_million:>16.2f}"
              f"{most / 2:>12,.0f}{most:>9,.0f}", flush=True)  # fmt: skip
    return {"direct": direct.row(), "settings": rows}
