"""GRPO's rollout as a pool of engines: what is asked of them, and an engine that answers with the policy.

    rollout:
      use: trimtab.rollout:EngineRollout
      settings: {ask: examples.grpo.engine:Asking, engine: examples.grpo.engine:PolicyEngine}

The engine answers many requests at once, a token for each at a time, as engines for large models do. What it draws
depends on a request's seed and on the place of the token alone: an answer that was cut goes on elsewhere as it would
have gone on here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from examples.grpo.components import make_policy
from examples.grpo.task import BLANK, END, VOCABULARY, Floats, lengths, questions
from numpy.typing import NDArray

from trimtab import Batch, Place, Result
from trimtab.rollout import Completion, SamplingParams

PIECE = 8  # tokens that go out together


class Asking:
    """Questions of a batch as prompts, and answers as the other components take them."""

    def __init__(self, *, place: Place, questions: int = 16, group: int = 16, digits: int = 16) -> None:
        self.place = place
        self.questions, self.group, self.digits = questions, group, digits

    def requests(self, batch: Batch) -> tuple[list[list[int]], SamplingParams]:
        """Each question as token ids, to be answered several times."""
        asked = questions(self.place.seed, batch.iteration, batch.index, self.questions, self.digits)
        # `resume`: what is drawn is drawn by the place of the token, so a cut changes nothing.
        params = SamplingParams(max_tokens=self.digits + 1, n=self.group, stop_ids=(END,), logprobs=0, resume=True)
        return asked.tolist(), params

    def answers(self, batch: Batch, completions: Sequence[Completion]) -> Result:
        """Questions, answers and log-probabilities, one row for each answer."""
        asked = questions(self.place.seed, batch.iteration, batch.index, self.questions, self.digits)
        asked = np.repeat(asked, self.group, axis=0)
        answered, logs = np.full(asked.shape, BLANK), np.zeros(asked.shape)
        samples = [sample for one in completions for sample in one.samples]
        for row, sample in enumerate(samples):
            count = len(sample.token_ids)
            answered[row, :count], logs[row, :count] = sample.token_ids, sample.logprobs
        return Result({"asked": asked, "answered": answered, "logs": logs}, {"longest": float(lengths(answered).max())})


@dataclass
class Answer:
    """One answer that is being made."""

    key: str
    asked: list[int]
    made: list[int]  # also what was made elsewhere, before a cut
    seed: int
    most: int  # tokens to make here
    first: int = 0  # tokens that were there when it came
    given: int = 0  # tokens made here that were given out
    chances: list[float] = field(default_factory=list)  # of tokens made here
    end: str | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class PolicyEngine:
    """An engine on the policy. `token_s`: each token takes so long at least, as it would with a larger model."""

    def __init__(
        self,
        *,
        place: Place,
        backend: str = "numpy",
        digits: int = 16,
        size: dict[str, Any] | None = None,
        token_s: float = 0.0,
    ) -> None:
        self.policy = make_policy(backend, place, digits, size or {})
        self.places = digits + 1
        self.token_s = token_s
        self.weights = "0"
        self.running: dict[str, Answer] = {}
        self.working: asyncio.Task[None] | None = None

    async def ready(self) -> dict[str, Any]:
        """It would serve, with these weights."""
        return {"up": True, "version": self.weights}

    async def load(self) -> dict[str, int]:
        """What it has to do."""
        return {"running": len(self.running)}

    async def version(self) -> str:
        """Of its weights."""
        return self.weights

    async def refit(self, refit: dict[str, Any]) -> None:
        """Work with these weights."""
        self.policy.take(refit["weights"])
        self.weights = refit["version"]

    async def sleep(self, level: int) -> None:
        """Leave the GPU."""
        self.policy.offload()

    async def wake(self, parts: list[str]) -> None:
        """Come back to it."""
        self.policy.onload()

    async def abort(self, keys: list[str] | None) -> None:
        """These end with what they have."""
        for key, answer in list(self.running.items()):
            if keys is None or key in keys:
                self._ends(answer, "aborted")

    async def generate(self, order: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The tokens of one answer, a few at a time."""
        ids = order["token_ids"]
        made = list(ids[self.places :])
        answer = Answer(order["id"], ids[: self.places], made, order["seed"] or 0, order["max_tokens"], len(made))
        self.running[answer.key] = answer
        if self.working is None or self.working.done():
            self.working = asyncio.create_task(self._work())
        try:
            while answer.end is None or answer.given < len(answer.chances):
                await answer.news.wait()
                answer.news.clear()
                since, answer.given = answer.given, len(answer.chances)
                yield {
                    "token_ids": answer.made[answer.first + since :],
                    "logprobs": answer.chances[since:],
                    "finish": answer.end,
                }
                if answer.end is not None:
                    return
        finally:
            self.running.pop(answer.key, None)

    # ---- making tokens -----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """A token for every answer at a time, until there is none to make."""
        while self.running:
            self._turn(list(self.running.values()))
            await asyncio.sleep(self.token_s)

    def _turn(self, answers: list[Answer]) -> None:
        at = np.array([len(one.made) for one in answers])
        asked = np.array([one.asked for one in answers])
        made = np.full(asked.shape, BLANK)
        for row, one in enumerate(answers):
            made[row, : len(one.made)] = one.made
        logs = self.policy.next_logs(asked, made, at)
        seeds = np.array([one.seed for one in answers], dtype=np.uint64)
        tokens = (logs + noise(seeds, at)).argmax(axis=1)
        chances = logs[np.arange(len(answers)), tokens]
        for one, token, chance in zip(answers, tokens.tolist(), chances.tolist(), strict=True):
            one.made.append(token)
            one.chances.append(chance)
            if token == END:
                self._ends(one, "stop")
            elif len(one.chances) >= one.most:
                self._ends(one, "length")
            elif len(one.chances) - one.given >= PIECE:
                one.news.set()

    def _ends(self, answer: Answer, how: str) -> None:
        self.running.pop(answer.key, None)
        answer.end = how
        answer.news.set()


def noise(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> Floats:
    """Gumbel noise for every token that may come next, by seed and place alone."""
    with np.errstate(over="ignore"):
        mixed = seeds[:, None] * np.uint64(0x9E3779B97F4A7C15) + places.astype(np.uint64)[:, None] * np.uint64(
            0xD1B54A32D192ED03
        )
        mixed = mixed + np.arange(1, VOCABULARY + 1, dtype=np.uint64) * np.uint64(0x8CB92BA72F3D8DD7)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    even = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    return np.asarray(-np.log(-np.log(even)))
