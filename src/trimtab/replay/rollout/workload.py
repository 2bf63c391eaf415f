"""Generated answer lengths of RL rollouts: no public trace of them exists. Every parameter is stated.

Lengths are lognormal: a part of the variance belongs to the prompt, so that samples of a prompt are similar, the rest
to the sample. The median drifts from step to step. Lengths are capped at `most` tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated

from trimtab.core.errors import InputError, check_known
from trimtab.formats.sections import Count, FieldsOf, Made, Positive, Share, Within
from trimtab.replay.common.timing import P99


@dataclass(frozen=True)
class LengthProfile:
    """A distribution of answer lengths."""

    name: str
    prompt_tokens: Count
    median: Positive
    p99: Positive
    most: Annotated[int, Within(1, 1_000_000_000)]
    alike: Share = 0.65  # share of the variance (of the logarithm) common to a prompt's samples
    drift: Annotated[float, Within(-0.999, 1e6)] = 0.0  # growth of the median per step

    def __post_init__(self) -> None:
        if self.p99 < self.median:
            raise InputError("p99 must not be below the median", where=f"profile {self.name}")

    def lengths(self, steps: int, prompts: int, samples: int, seed: int) -> list[dict[str, int]]:
        """Tokens by request, for each step. `s3p7.2` is sample 2 of prompt 7 in step 3."""
        sigma = math.log(self.p99 / self.median) / P99
        of_prompt, of_sample = sigma * math.sqrt(self.alike), sigma * math.sqrt(1 - self.alike)
        source = random.Random(f"lengths {self.name} {seed}")
        found = []
        for step in range(steps):
            middle = math.log(self.median * (1 + self.drift) ** step)
            batch = {}
            for prompt in range(prompts):
                of_this = middle + source.gauss(0, of_prompt)
                for sample in range(samples):
                    tokens = int(math.exp(of_this + source.gauss(0, of_sample)))
                    batch[f"s{step}p{prompt}.{sample}"] = min(max(tokens, 8), self.most)
            found.append(batch)
        return found

    def text(self) -> str:
        drift = f", {self.drift:+.1%} a step" if self.drift else ""
        return (
            f"{self.name}: {self.prompt_tokens} prompt tokens, answers of median {self.median:g} and p99 {self.p99:g}"
            f"{drift}, at most {self.most:,}; {self.alike:.0%} of the variance is the prompt's"
        )


PROFILES = {
    profile.name: profile
    for profile in (
        LengthProfile("reasoning", 512, 1_600, 16_000, 32_768),
        LengthProfile("growing", 512, 1_000, 8_000, 32_768, drift=0.04),
        LengthProfile("short", 256, 300, 1_200, 2_048, alike=0.4),
        LengthProfile("agents", 2_048, 4_000, 24_000, 32_768, alike=0.8),
    )
}


def _profile(stated: str | LengthProfile) -> LengthProfile:
    if isinstance(stated, str):
        check_known([stated], PROFILES, "", "unknown profile {}")
        return PROFILES[stated]
    return stated


Profile = Annotated[LengthProfile, Made(str | Annotated[LengthProfile, FieldsOf(LengthProfile)], _profile)]
"""A profile by name, or as described in a scenario."""
