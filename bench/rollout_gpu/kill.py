"""One of two engines is killed -9 in the middle: every request is answered once, and what was made again is counted.

Tokens are counted by the engines (`vllm:generation_tokens_total`), read just before the kill and at the end, so what an
engine made and nobody got is in it. The time after the kill is compared with what the surviving engine needs alone for
what was left at that moment: the requests that it had itself, with their tokens in its cache, and those of the other,
which it must read first; asked directly, as many at a time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from bench.rollout_gpu.asking import Answer, Bench, Books, Order, through, tokens_of

SHARE, POLL_S, SETTLE_S = 0.4, 0.02, 0.5
GOAL_TIME = 1.15


@dataclass(frozen=True)
class AtKill:
    """What was there when the engine was killed."""

    at: float  # when the last count was asked for, on the clock of time.perf_counter
    made: tuple[float, float]  # by the engine that was killed and by the other, since the start
    running: tuple[int, int]  # requests on them


async def kill(bench: Bench) -> dict[str, Any]:
    """The whole test. The first engine is dead afterwards."""
    doomed = next((server for server in bench.fleet.servers if server.alive and server.pid), None)
    if doomed is None or len(bench.urls) < 2:
        raise RuntimeError("two live engines are needed, one of them started by this bench")
    urls = [doomed.url, next(url for url in bench.urls if url != doomed.url)]
    count = min(bench.answers, 2 * bench.limit)  # none waits in a queue
    orders = [Order(prompt, bench.tokens) for prompt in bench.prompts(count)]
    wanted = count * bench.tokens
    before = await bench.direct.generated(urls)
    books = Books()
    async with bench.pool(urls) as pool:
        pool.add_listener(books)
        names = [worker.worker for worker in pool.workers()]
        begun = time.perf_counter()
        task = asyncio.create_task(through(pool, orders))
        at_kill = await _until_share(bench, pool, names, urls, before, wanted * SHARE, task)
        doomed.kill()
        killed = time.perf_counter()
        blind_s = killed - at_kill.at  # at most: tokens of that time are not counted
        answers = await task
        after_s = time.perf_counter() - killed
        counters = pool.counters
    bench.fleet.save()
    await asyncio.sleep(SETTLE_S)
    made = at_kill.made[0] + (await bench.direct.generated(urls[1:]))[0] - before[1]
    again, useful = made - tokens_of(answers), tokens_of(answers)
    alone_s = await _rest_alone(bench, urls[1], names, orders, answers, at_kill)
    every = bench.rules().resume_every
    bound = min(every or bench.tokens, bench.tokens) * at_kill.running[0]
    found = {
        "answers": len(answers), "each_once": books.each_once, "exact": useful == wanted, "tokens": useful,
        "killed_after_s": round(at_kill.at - begun, 2), "made_at_kill": [round(count) for count in at_kill.made],
        "running_at_kill": list(at_kill.running), "made_again": round(again),
        "kept_of_the_killed": sum(books.resumed.values()), "blind_s": round(blind_s, 4),
        "resume_every": every, "made_again_at_most": bound, "sent_again": len(books.resumed),
        "from_the_prompt": sum(not kept for kept in books.resumed.values()), "after_kill_s": round(after_s, 2),
        "one_engine_alone_s": round(alone_s, 2), "ratio": round(after_s / alone_s, 3), "counters": dict(counters),
    }  # fmt: skip
    share = sum(at_kill.made) / wanted
    print(f"\none of two engines killed after {at_kill.at - begun:.1f} s, at {share:.0%} of {wanted:,} tokens")
    print(f"the killed engine had made {at_kill.made[0]:,.0f} tokens of {at_kill.running[0]} answers; "
          f"{sum(books.resumed.values()):,} of them were kept")  # fmt: skip
    print(f"answers {len(answers)}, each once: {books.each_once}, all of {bench.tokens} tokens: {useful == wanted}; "
          f"sent again {found['sent_again']}, {found['from_the_prompt']} of them from the prompt")  # fmt: skip
    print(f"made again {again:,.0f} tokens (those of the last {blind_s * 1e3:.1f} ms of that engine may be missing), "
          f"allowed {bound:,.0f}: resume_every {every or 'inf'} x {at_kill.running[0]} requests on it")  # fmt: skip
    print(f"after the kill {after_s:.2f} s; one engine alone needs {alone_s:.2f} s for the rest: "
          f"{after_s / alone_s:.3f}x (goal {GOAL_TIME}x)", flush=True)  # fmt: skip
    return found


async def _until_share(
    bench: Bench,
    pool: Any,
    names: list[str],
    urls: list[str],
    before: list[float],
    wanted: float,
    task: asyncio.Task[Any],
) -> AtKill:
    while not task.done():
        there = await bench.direct.generated(urls)
        if sum(there) - sum(before) >= wanted:
            running = {worker.worker: worker.running for worker in pool.workers()}
            at = time.perf_counter()
            last = (await bench.direct.generated(urls[:1]))[0]  # once more, as late as possible
            return AtKill(at, (last - before[0], there[1] - before[1]), (running[names[0]], running[names[1]]))
        await asyncio.sleep(POLL_S)
    task.result()
    raise RuntimeError("everything was answered before the engine could be killed: ask for more, or longer, answers")


async def _rest_alone(
    bench: Bench, url: str, names: list[str], orders: list[Order], answers: list[Answer], at_kill: AtKill
) -> float:
    """Seconds that one engine needs, asked directly, for what was left when the other was killed."""
    per_request = [
        min(round(made / max(running, 1)), bench.tokens - 1)
        for made, running in zip(at_kill.made, at_kill.running, strict=True)
    ]
    own: list[Order] = []
    others: list[Order] = []
    for order, answer in zip(orders, answers, strict=True):
        stayed = answer.workers == (names[1],)
        done = per_request[1 if stayed else 0]
        rest = Order(order.prompt + tuple(answer.token_ids[:done]), bench.tokens - done)
        (own if stayed else others).append(rest)
    await bench.direct.flush([url])
    await bench.direct.all([url], [Order(rest.prompt, 1) for rest in own])  # these were in its cache
    begun = time.perf_counter()
    await bench.direct.all([url], [*own, *others])
    return time.perf_counter() - begun
