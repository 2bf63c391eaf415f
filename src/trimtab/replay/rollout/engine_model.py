"""Model of a rollout engine: decoding speed as a function of running requests and cached tokens.

Every running request gets a token per decode step; a step takes a fixed time plus a share per request and per cached
token. Prefill comes first and blocks decoding; a prompt that is cached from the same group is not prefilled again.
Deterministic.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

AttemptKey = tuple[str, int]  # request and attempt


@dataclass(frozen=True)
class EngineSpeed:
    """Speed of an engine. Defaults: an 8B model on one H200, fitted by hand to public measurements."""

    decode_s: float = 4.4e-3  # a decode step without requests
    request_s: float = 5e-5  # plus per request
    cached_s: float = 2.2e-8  # plus per token in the KV cache
    read_s: float = 1 / 50_000  # per prompt token

    def text(self) -> str:
        return (
            f"a decode step takes {self.decode_s * 1e3:g} ms, {self.request_s * 1e3:g} ms for each request and "
            f"{self.cached_s * 1e9:g} ns for each cached token; {1 / self.read_s:,.0f} prompt tokens are read a second"
        )


H200_8B = EngineSpeed()


@dataclass
class _RunningRequest:
    begun: float  # `made` of the engine when it began
    brought: int  # cached tokens when it began
    left: int  # tokens still to generate


@dataclass
class SimulatedEngine:
    """A simulated engine."""

    speed: EngineSpeed = H200_8B
    at: float = 0.0  # simulated up to here
    made: float = 0.0  # tokens of a request that has run since the start
    cached: float = 0.0
    reading_until: float = 0.0
    read: set[str] = field(default_factory=set)  # groups whose prompt is cached
    running: dict[AttemptKey, _RunningRequest] = field(default_factory=dict)
    # `made` at the end of a request; entries may be stale
    ends: list[tuple[float, AttemptKey]] = field(default_factory=list)
    revision: int = 0  # grows with every change: earlier predictions are void

    def advance(self, now: float) -> None:
        """Simulates up to `now`."""
        seconds = now - max(self.at, self.reading_until)
        self.at = max(self.at, now)
        if seconds <= 0 or not self.running:
            return
        step_s, growth = self._step_s(), self.speed.cached_s * len(self.running)
        tokens = (math.sqrt(step_s * step_s + 2 * growth * seconds) - step_s) / growth if growth else seconds / step_s
        self.made += tokens
        self.cached += tokens * len(self.running)

    def add(self, key: AttemptKey, group: str, prompt: int, resumed: int, left: int, now: float) -> None:
        """Adds a request; its prefill comes first."""
        self.advance(now)
        brings = resumed + (0 if group and group in self.read else prompt)
        if group:
            self.read.add(group)
        self.reading_until = max(self.reading_until, now) + brings * self.speed.read_s
        self.running[key] = _RunningRequest(self.made, prompt + resumed, left)
        heapq.heappush(self.ends, (self.made + left, key))
        self.cached += prompt + resumed
        self.revision += 1

    def drop(self, key: AttemptKey, now: float) -> int:
        """Removes a request; returns the tokens generated here."""
        self.advance(now)
        request = self.running.pop(key)
        tokens = min(int(self.made - request.begun + 1e-6), request.left)
        self.cached = self.cached - request.brought - (self.made - request.begun) if self.running else 0.0
        self.revision += 1
        return tokens

    def next_end(self) -> tuple[float, AttemptKey] | None:
        """Time and key of the next request to end."""
        while self.ends and self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        end, key = self.ends[0]
        tokens = max(end - self.made, 0.0)
        seconds = tokens * self._step_s() + self.speed.cached_s * len(self.running) * tokens * tokens / 2
        return max(self.at, self.reading_until) + seconds, key

    def flush_cache(self) -> None:
        """Flushes the prefix cache."""
        self.read.clear()

    def _step_s(self) -> float:
        return self.speed.decode_s + self.speed.request_s * len(self.running) + self.speed.cached_s * self.cached


def least_engine_s(speed: EngineSpeed, limit: int, answers: list[tuple[int, int]], prompts: int) -> float:
    """Lower bound of engine-seconds for these answers (prompt tokens, answer tokens), for any policy.

    Every token takes its own share of a step, and the fixed part of a step is shared by at most `limit` requests.
    `prompts`: tokens that must be prefilled at least once.
    """
    fixed = speed.decode_s / limit + speed.request_s
    total = prompts * speed.read_s
    for prompt, tokens in answers:
        total += tokens * fixed + speed.cached_s * tokens * (prompt + tokens / 2)
    return total
