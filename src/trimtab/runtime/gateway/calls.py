"""A generation call, independent of the API it came by."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.model.rollout import End, Span
from trimtab.runtime.gateway.headers import DEFAULT_TERMS, RequestTerms
from trimtab.runtime.rollout.sampling import Completion, Sample, SamplingParams

FINISHES = {End.stop: "stop", End.length: "length", End.abort: "abort", End.cancelled: "abort", End.failed: "error"}


_BOOT = uuid.uuid4().hex[:16]
_NUMBERS = itertools.count(1)


def new_id() -> str:
    """Id of a call, unique over processes."""
    return f"{_BOOT}{next(_NUMBERS):08x}"


@dataclass
class GenerationCall:
    """Prompts to be answered. Answers are numbered over all prompts: see `number`."""

    prompts: list[tuple[int, ...]]
    params: list[SamplingParams]  # per prompt
    terms: RequestTerms = DEFAULT_TERMS
    stream: bool = False
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time.time()))

    def number(self, prompt: int, index: int) -> int:
        """Number of the answer `index` of a prompt among all answers."""
        return prompt * self.params[0].n + index if prompt else index

    @property
    def alike(self) -> bool:
        first = self.params[0]
        return all(params is first for params in self.params)


def samples_of(completions: Sequence[Completion]) -> list[Sample]:
    return [sample for completion in completions for sample in completion.samples]


def is_answer(sample: Sample) -> bool:
    """Whether it counts as an answer: complete, or partial after an abort. A failure does not, with or without
    tokens.
    """
    return sample.ok or sample.end is End.abort or (sample.end is End.cancelled and bool(sample.token_ids))


def details(sample: Sample) -> dict[str, object]:
    """Execution details of an answer."""
    return {
        "request": sample.request,
        "workers": list(sample.workers),
        "moves": sample.moves,
        "restarts": sample.restarts,
        "versions": [{"version": span.version, "tokens": span.tokens} for span in sample.spans],
        "missing_tokens": sample.missing,
        "reason": {"code": sample.reason.code.value, "sentence": sample.reason.sentence},
    }


def response_headers(call: GenerationCall, samples: Sequence[Sample]) -> list[tuple[bytes, bytes]]:
    """Headers of an answer: workers, moves, and tokens per weight version."""
    if len(samples) == 1:
        workers: Sequence[str] = samples[0].workers
        moves, versions = samples[0].moves + samples[0].restarts, versions_text(samples[0].spans)
    else:
        workers = sorted({worker for sample in samples for worker in sample.workers})
        moves = sum(sample.moves + sample.restarts for sample in samples)
        versions = ",".join(sorted({str(span.version) for sample in samples for span in sample.spans}))
    return [
        (b"x-trimtab-id", call.id.encode("ascii", "replace")),
        (b"x-trimtab-workers", ",".join(workers[:16]).encode("ascii", "replace")),
        (b"x-trimtab-moves", str(moves).encode()),
        (b"x-trimtab-versions", versions.encode()),
    ]


def versions_text(spans: Sequence[Span]) -> str:
    """`3:120,4:7`: version 3 made 120 tokens, then version 4 made 7."""
    return ",".join(f"{span.version}:{span.tokens}" for span in spans)
