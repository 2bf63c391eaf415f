"""A whole RL loop on a rollout pool: generate, reward, train, refit. Runs anywhere in seconds, and learns to count.

    python examples/rollout_loop/loop.py --steps 20 --lose-one-at 10

The engines are two Ray actors with a policy that is a table: for each token, how likely each other one follows. The
reward is the share of tokens that are one more than the token before. The trainer compares the samples of a prompt with
each other (as GRPO does), changes the table by the policy gradient, writes it to disk, and has the engines read it. In
your loop a model takes the place of the table, and vLLM, SGLang or an actor of your own that of the engines:
`await pool.attach("http://host:8000")` instead of `pool.add_engine(...)`; the rest stays as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

from trimtab.rollout import ActorEngine, Completion, RolloutPool, RolloutRules, SamplingParams, WorkerSpec

TOKENS, END = 12, 0
PROMPTS = [[token] for token in range(1, TOKENS - 1)]
SAMPLES, LENGTH, RATE = 8, 6, 4.0


class TableEngine:
    """An engine: any actor with `ready` and `generate` is one; with `refit` and `version` it can get new weights."""

    def __init__(self, path: str) -> None:
        self.table, self.at = np.load(path), "0"
        self.random = np.random.default_rng()
        self.running: set[str] = set()

    async def ready(self) -> dict[str, Any]:
        """Whether it would serve, and which weights it has."""
        return {"up": True, "version": self.at}

    async def load(self) -> dict[str, int]:
        """What it has to do."""
        return {"running": len(self.running)}

    async def generate(self, order: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Tokens as they are made."""
        self.running.add(order["id"])
        try:
            async for piece in self.pieces(order):
                if piece["finish"]:
                    self.running.discard(order["id"])  # whoever has the last piece may refit at once
                yield piece
        finally:
            self.running.discard(order["id"])

    async def pieces(self, order: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One token after the other, each with its log-probability."""
        token, most = order["token_ids"][-1], order["max_tokens"]
        for place in range(most):
            chances = shares(self.table[token])
            token = int(self.random.choice(TOKENS, p=chances))
            finish = "stop" if token == END else "length" if place == most - 1 else None
            yield {"token_ids": [token], "logprobs": [float(np.log(chances[token]))], "finish": finish}
            if finish:
                return
            await asyncio.sleep(0)

    async def refit(self, refit: dict[str, Any]) -> None:
        """Other weights."""
        self.table, self.at = np.load(refit["path"]), refit["version"]

    async def version(self) -> str:
        """Of the weights."""
        return self.at


def shares(row: np.ndarray) -> np.ndarray:
    """Probabilities of a row of logits."""
    raised = np.exp(row - row.max())
    return raised / raised.sum()


def reward(prompt: list[int], answer: tuple[int, ...]) -> float:
    """The share of tokens that are one more than the token before; an end too early costs as much as a wrong token."""
    before = (*prompt, *answer)
    return sum(one + 1 == two for one, two in zip(before, answer, strict=False)) / LENGTH


def train(table: np.ndarray, answers: list[Completion]) -> float:
    """One step of the policy gradient, each sample against the others of its prompt. Gives the mean reward."""
    gradient, rewards = np.zeros_like(table), []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        scores = np.array([reward(prompt, one.token_ids) for one in answer.samples])
        rewards += list(scores)
        for advantage, sample in zip(scores - scores.mean(), answer.samples, strict=True):
            before = (prompt[-1], *sample.token_ids)
            for token, follows in zip(before, sample.token_ids, strict=False):
                gradient[token] -= advantage * shares(table[token])
                gradient[token, follows] += advantage
    table += RATE * gradient / SAMPLES
    return float(np.mean(rewards))


async def loop(steps: int, lose_one_at: int | None, folder: Path) -> None:
    """Step after step."""
    table, path = np.zeros((TOKENS, TOKENS)), str(folder / "0.npy")
    np.save(path, table)
    kind = ray.remote(num_cpus=0)(TableEngine)
    engines = {name: kind.remote(path) for name in ("one", "two")}
    async with RolloutPool(RolloutRules(max_workers=2), look_s=0.2) as pool:
        for name, handle in engines.items():
            await pool.add_engine(ActorEngine(name, handle), WorkerSpec(name, limit=64), version=0)
        for step in range(1, steps + 1):
            asked = pool.generate(PROMPTS, SamplingParams(max_tokens=LENGTH, n=SAMPLES, logprobs=0), spans=False)
            if step == lose_one_at:
                running = asyncio.ensure_future(asked)
                await pool.until(lambda: any(one.worker == "two" and one.running for one in pool.workers()))
                ray.kill(engines["two"])  # what it had goes on elsewhere
                answers = await running
            else:
                answers = await asked
            samples = [sample for answer in answers for sample in answer.samples]
            assert all(sample.ok for sample in samples), "every sample has an answer"
            mean = train(table, answers)

            path = str(folder / f"{step}.npy")
            np.save(path, table)
            async with pool.refit(step) as refit:
                await refit.load(path)
            have = ", ".join(refit.outcome.current) if refit.outcome else "nobody"
            moved = sum(len(sample.workers) > 1 for sample in samples)
            print(f"step {step:>2}: reward {mean:.2f}, {len(samples)} samples, {moved} moved; version {step} on {have}")


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description="Learns to count, on two rollout engines.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lose-one-at", type=int, help="the step in which an engine is killed")
    given = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(loop(given.steps, given.lose_one_at, Path(folder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
