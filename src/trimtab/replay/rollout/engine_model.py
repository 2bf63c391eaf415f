"""A rollout engine as arithmetic: how fast it makes tokens, given how many requests it has and how much is cached.

Every running request gets a token in each decode step; a step takes a fixed time, a little for each request and a
little for each cached token. Prompts are read first, and nothing is decoded meanwhile; a prompt that somebody of the
same group has brought is not read again. Nothing here is random.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

AttemptKey = tuple[str, int]  # request and attempt


@dataclass(frozen=True)
class EngineSpeed:
    """How fast engines are. As it stands: an 8B model on one H200, fitted by hand to public measurements."""

    decode_s: float = 4.4e-3  # a step, with nobody in it
    request_s: float = 5e-5  # more for each request
    cached_s: float = 2.2e-8  # more for each token in its cache
    read_s: float = 1 / 50_000  # a prompt token

    def text(self) -> str:
        """As a report states it."""
        return (
            f"a decode step takes {self.decode_s * 1e3:g} ms, {self.request_s * 1e3:g} ms for each request and "
            f"{self.cached_s * 1e9:g} ns for each cached token; {1 / self.read_s:,.0f} prompt tokens are read a second"
        )


H200_8B = EngineSpeed()


@dataclass
class _RunningRequest:
    begun: float  # `made` of the engine at its begin
    brought: int  # tokens in the cache when it began
    left: int  # tokens it will make


@dataclass
class SimulatedEngine:
    """One engine."""

    speed: EngineSpeed = H200_8B
    at: float = 0.0  # up to here it is worked out
    made: float = 0.0  # tokens that a request would have that runs since the beginning
    cached: float = 0.0
    reading_until: float = 0.0
    read: set[str] = field(default_factory=set)  # groups whose prompt need not be read again
    running: dict[AttemptKey, _RunningRequest] = field(default_factory=dict)
    ends: list[tuple[float, AttemptKey]] = field(default_factory=list)  # `made` at its end; also of dropped ones
    news: int = 0  # grows with every change: what was foretold before does not count

    def advance(self, now: float) -> None:
        """Work out what has been made by now."""
        seconds = now - max(self.at, self.reading_until)
        self.at = max(self.at, now)
        if seconds <= 0 or not self.running:
            return
        one, growth = self._step_s(), self.speed.cached_s * len(self.running)
        tokens = (math.sqrt(one * one + 2 * growth * seconds) - one) / growth if growth else seconds / one
        self.made += tokens
        self.cached += tokens * len(self.running)

    def add(self, key: AttemptKey, group: str, prompt: int, resumed: int, left: int, now: float) -> None:
        """One request more: what it brings is read before anything else is made."""
        self.advance(now)
        brings = resumed + (0 if group and group in self.read else prompt)
        if group:
            self.read.add(group)
        self.reading_until = max(self.reading_until, now) + brings * self.speed.read_s
        self.running[key] = _RunningRequest(self.made, prompt + resumed, left)
        heapq.heappush(self.ends, (self.made + left, key))
        self.cached += prompt + resumed
        self.news += 1

    def drop(self, key: AttemptKey, now: float) -> int:
        """One request less; the tokens that it got here."""
        self.advance(now)
        one = self.running.pop(key)
        tokens = min(int(self.made - one.begun + 1e-6), one.left)
        self.cached = self.cached - one.brought - (self.made - one.begun) if self.running else 0.0
        self.news += 1
        return tokens

    def next_end(self) -> tuple[float, AttemptKey] | None:
        """When the first of its requests ends, and which."""
        while self.ends and self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        end, key = self.ends[0]
        tokens = max(end - self.made, 0.0)
        seconds = tokens * self._step_s() + self.speed.cached_s * len(self.running) * tokens * tokens / 2
        return max(self.at, self.reading_until) + seconds, key

    def forget(self) -> None:
        """Its cache is flushed."""
        self.read.clear()

    def _step_s(self) -> float:
        return self.speed.decode_s + self.speed.request_s * len(self.running) + self.speed.cached_s * self.cached


def least_engine_s(speed: EngineSpeed, limit: int, answers: list[tuple[int, int]], prompts: int) -> float:
    """Engine-seconds below which nobody can make these answers (prompt tokens, answer tokens), whatever it knows.

    Every token takes its own share of a step, and the fixed part of a step is shared by at most `limit` requests.
    `prompts`: tokens that have to be read at least once.
    """
    fixed = speed.decode_s / limit + speed.request_s
    total = prompts * speed.read_s
    for prompt, tokens in answers:
        total += tokens * fixed + speed.cached_s * tokens * (prompt + tokens / 2)
    return total
