"""Memory that a sleep gives back, and refits with changed weights.

`sleep`: every engine is drained and put to sleep by its pool and woken again, at level 1 (it keeps its weights) and at
level 2 (it is empty afterwards and gets them by a refit); the driver says how much memory is in use each time.
`refit`: greedy answers before, with other weights, and after the way back; and a refit while answers are being made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.rollout_gpu.asking import Answer, Bench, Order, through
from trimtab.rollout import RolloutPool, WorkerState
from trimtab.runtime.procs.gpus import used_bytes

CHANGE_S = 120.0
PROMPTS, TOKENS = 16, 48
GIB = 2**30


def greedy(bench: Bench) -> list[Order]:
    """The same at every call."""
    return [Order(prompt, TOKENS, temperature=0.0, logprobs=2) for prompt in bench.prompts(PROMPTS, seed=1)]


def agreed(one: Answer, other: Answer) -> int:
    """How many of their first tokens are the same."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))


def gap(answer: Answer, place: int) -> float:
    """By how much its token won there, in nat."""
    assert answer.best is not None
    best = answer.best[place]
    return best[0][1] - best[1][1]


def compare(ones: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """Where answers part, and by how little the token there had won."""
    parts = [(agreed(one, other), one) for one, other in zip(ones, others, strict=True)]
    parted = [(place, gap(one, place)) for place, one in parts if place < len(one.token_ids)]
    return {
        "answers": len(ones), "same": len(ones) - len(parted), "tokens_compared": sum(place for place, _ in parts),
        "widest_gap_where_they_part": round(max((won for _, won in parted), default=0.0), 4),
    }  # fmt: skip


def told(what: dict[str, Any]) -> str:
    return (
        f"{what['same']} of {what['answers']} the same to the end, {what['tokens_compared']:,} tokens alike, "
        f"widest gap where they part {what['widest_gap_where_they_part']:.4f} nat"
    )


async def until(pool: RolloutPool, worker: str, *states: WorkerState) -> None:
    def state() -> WorkerState | None:
        return next((view.state for view in pool.workers() if view.worker == worker), None)

    if not await pool.until(lambda: state() in states, CHANGE_S):
        raise RuntimeError(f"{worker} is {state()} after {CHANGE_S:g} s: {pool.story(worker)[-3:]}")


def memory(bench: Bench) -> int | None:
    return used_bytes([bench.gpu])


def gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


async def sleep(bench: Bench) -> dict[str, Any]:
    """Both levels."""
    found: dict[str, Any] = {}
    for level in (1, 2):
        found[f"level {level}"] = await _sleep(bench, level)
    return found


async def _sleep(bench: Bench, level: int) -> dict[str, Any]:
    async with bench.pool(bench.urls, gpus=True, keeps_weights=level == 1, min_workers=0, monitor_s=0.25) as pool:
        names = [view.worker for view in pool.workers()]
        first = await through(pool, greedy(bench))
        used, seconds = [memory(bench)], []
        for name in names:  # one after the other, so that each may be told apart
            begun = time.perf_counter()
            pool.drain(name, deadline_s=10.0)
            await until(pool, name, WorkerState.inactive)
            seconds.append(time.perf_counter() - begun)
            used.append(memory(bench))
        reasons = [row["memory"]["sentence"] if row["memory"] else "" for row in pool.status()["workers"]]
        begun = time.perf_counter()
        for name in names:
            pool.resume(name)
        awake = WorkerState.active if level == 1 else WorkerState.empty
        await asyncio.gather(*(until(pool, name, awake) for name in names))
        wake_s = time.perf_counter() - begun
        if level == 2:
            async with pool.refit(bench.fleet.version + 1) as refit:
                await refit.load(bench.models[0])
            bench.fleet.version += 1
            bench.fleet.save()
            await asyncio.gather(*(until(pool, name, WorkerState.active) for name in names))
        used.append(memory(bench))
        second = await through(pool, greedy(bench))
    same = compare(first, second)
    print(f"\nsleep at level {level}: in use {', then '.join(map(gib, used))} "
          f"(before, after each of {len(names)} engines slept, awake again)")  # fmt: skip
    for name, reason, took in zip(names, reasons, seconds, strict=True):
        print(f"  {name}: {took:.2f} s; {reason}")
    print(f"  all awake after {wake_s:.2f} s{' and a refit' * (level == 2)}; greedy answers: {told(same)}", flush=True)
    return {
        "used_bytes": used, "sleep_s": [round(took, 2) for took in seconds], "wake_s": round(wake_s, 2),
        "reasons": reasons, "answers": same,
    }  # fmt: skip


async def refit(bench: Bench) -> dict[str, Any]:
    """Other weights and back, at rest and with answers under way."""
    if len(bench.models) < 2:
        raise RuntimeError("a second checkpoint is needed: --models V1,V2")
    found: dict[str, Any] = {}
    async with bench.pool(bench.urls) as pool:
        answers = [await through(pool, greedy(bench))]
        for path in (bench.models[1], bench.models[0]):
            begun = time.perf_counter()
            await _load(bench, pool, path)
            found.setdefault("refit_s", []).append(round(time.perf_counter() - begun, 2))
            answers.append(await through(pool, greedy(bench)))
        first, changed, back = answers
        found["versions"] = [sorted({version for one in row for version in one.versions}) for row in answers]
        found["changed"] = compare(first, changed)
        found["back"] = compare(first, back)
        orders = [replace(one, max_tokens=bench.tokens, logprobs=None) for one in greedy(bench)]
        old = bench.fleet.version
        task = asyncio.create_task(through(pool, orders))
        await pool.until(lambda: any(view.running for view in pool.workers()), 10.0)
        await asyncio.sleep(min(1.0, bench.tokens / 1_000))
        await _load(bench, pool, bench.models[1])
        mixed = await task
        found["in_flight"] = {
            "answers": len(mixed), "of_both_versions": sum(one.versions == (old, old + 1) for one in mixed),
            "of_one": sum(len(one.versions) == 1 for one in mixed),
            "exact": all(len(one.token_ids) == bench.tokens for one in mixed),
            "versions": sorted({version for one in mixed for version in one.versions}),
        }  # fmt: skip
        await _load(bench, pool, bench.models[0])
    there, back_again = found["refit_s"]
    print(f"\nrefit in {there} s and back in {back_again} s; versions of answers: {found['versions']}")
    print(f"  with other weights: {told(found['changed'])}\n  and back: {told(found['back'])}\n"
          f"  a refit with answers under way: {found['in_flight']}", flush=True)  # fmt: skip
    return found


async def _load(bench: Bench, pool: RolloutPool, path: str) -> None:
    async with pool.refit(bench.fleet.version + 1) as session:
        await session.load(path)
    assert session.outcome is not None
    if session.outcome.failed:
        raise RuntimeError(f"not refitted: {session.outcome.failed}: {session.outcome.reason.sentence}")
    bench.fleet.version += 1
    bench.fleet.save()
