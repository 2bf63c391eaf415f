"""Engines and askers for tests of rollout on a pool of engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from trimtab.rollout import Completion, SamplingParams
from trimtab.runtime.run.component import Batch, Place

CALLS: list[str] = []
"""What was asked of engines in this process; a test clears it first."""


class Asking:
    """One prompt, answered twice."""

    def __init__(self, most: int = 4) -> None:
        self.most = most

    def requests(self, batch: Batch) -> tuple[list[list[int]], SamplingParams]:
        return [[3, 4], [5, 6]], SamplingParams(max_tokens=self.most, n=2)

    def answers(self, batch: Batch, completions: list[Completion]) -> list[list[int]]:
        return [list(sample.token_ids) for one in completions for sample in one.samples]


class Writing(Asking):
    """Asks with parameters that are none."""

    def requests(self, batch: Batch) -> Any:
        return [[1, 2]], "fast"


class Plain:
    """The least that an engine is, with methods that are not asynchronous: it counts on from the prompt."""

    def ready(self) -> bool:
        return True

    def generate(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        last = order["token_ids"][-1]
        for place in range(1, order["max_tokens"] + 1):
            ended = "length" if place == order["max_tokens"] else None
            yield {"token_ids": [last + place], "finish": ended}


class Noting(Plain):
    """Notes what is asked of it, and takes weights: a number that is added to every token."""

    def __init__(self, place: Place) -> None:
        self.place, self.weights, self.at = place, 0, "0"
        CALLS.append(f"made {place.component} {place.devices}")

    def generate(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for piece in super().generate(order):
            yield {**piece, "token_ids": [one + self.weights for one in piece["token_ids"]]}

    def refit(self, refit: dict[str, Any]) -> None:
        self.weights, self.at = refit["weights"], refit["version"]

    def version(self) -> str:
        return self.at

    def sleep(self, level: int) -> None:
        CALLS.append(f"sleep {self.place.component}")

    def wake(self, parts: list[str]) -> None:
        CALLS.append(f"wake {self.place.component}")

    def close(self) -> None:
        CALLS.append(f"close {self.place.component}")


class Broken(Plain):
    def __init__(self) -> None:
        raise ValueError("no such model")


class Raising(Plain):
    """Fails in the midst of the first answers, and then no more."""

    def __init__(self, place: Place) -> None:
        self.left = 2

    def generate(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for piece in super().generate(order):
            yield piece
            if self.left:
                self.left -= 1
                raise RuntimeError("no memory left")


class NoEngine:
    def ready(self) -> bool:
        return True


class Slow(Plain):
    """Takes its time for every token, so that it has something to do whenever one looks."""

    def generate(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for piece in super().generate(order):
            time.sleep(0.03)
            yield piece
