"""In which pieces an answer is fetched from an engine.

An event for each token costs an engine's HTTP front more than the GPU needs for the token. So an answer comes in pieces
of `resume_every` tokens, which is what a lost engine costs: by a stream with that interval where the engine takes one,
else in segments: requests for so many tokens, each with the prompt and the answer so far, which the engine has in its
prefix cache. Only answers that may be resumed are cut. All others come whole, unless the caller streams.

What must never happen: a cut that changes the answer; two segments at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.model.rollout import RolloutRules
from trimtab.runtime.engines.engine import PieceSupport

FIRST_TOKENS = 32  # of a piece, before the speed of an engine is known
INTERVAL_TOKENS = 128  # of an event; fewer cost the engine, more save next to nothing
PHASES = 8  # lengths of first segments


@dataclass(frozen=True)
class PiecePlan:
    """How one attempt asks its engine."""

    piece: int | None  # tokens of a delta (`GenerateRequest.piece`)
    segment: int | None = None  # tokens of a call; None: all that are left
    first: int | None = None  # the same, of the first call

    def tokens(self, calls: int, left: int) -> int:
        """Tokens to ask for, after so many calls."""
        if self.segment is None:
            return left
        return min(left, self.first or self.segment) if calls == 0 else min(left, self.segment)


class PiecePlanner:
    """Chooses the pieces of each attempt."""

    def __init__(self, rules: RolloutRules) -> None:
        self._rules = rules
        self._phase = 0

    def every(self, token_rate: float | None) -> int | None:
        """Tokens of a piece on an engine that makes so many tokens a second for one request; None: no limit."""
        bounds = [] if self._rules.resume_every is None else [int(self._rules.resume_every)]
        if self._rules.resume_every_s is not None:
            bounds.append(FIRST_TOKENS if token_rate is None else max(1, int(token_rate * self._rules.resume_every_s)))
        return min(bounds, default=None)

    def plan(
        self, support: PieceSupport, *, streams: bool, may_cut: bool, left: int, token_rate: float | None = None
    ) -> PiecePlan:
        if streams or not support.whole:
            return PiecePlan(1)
        every = self.every(token_rate) if may_cut else None
        if every is None or left <= every:
            return PiecePlan(None)
        if support.interval or every == 1 or 1 < support.every <= every:
            return PiecePlan(min(every, INTERVAL_TOKENS))
        # Requests that begin together would all be cut at the same step, and leave the engine idle meanwhile. A few
        # groups are better than many: steps that read prompts are slower than steps that only decode.
        self._phase = self._phase % PHASES + 1
        return PiecePlan(None, every, -(-every * self._phase // PHASES))
