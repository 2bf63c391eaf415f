"""Parses OpenRLHF's logs: a line `Global step N: {...}` for every step, and TensorBoard's `train/timing/*`.

In a synchronous run the total is the sum of the timers. Otherwise generation ran beside training; each timer is still
the component's own work, except the weight sync, which then waits for a generated batch: it is marked and must never
count as a cost. Checkpoints and evaluation are in no timer and no total.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, number, tokens_of

_STEP = re.compile(r"\bGlobal step (\d{1,12}): \{")
_STEP_WITH_TIMES = re.compile(r"\bGlobal step \d{1,12}: \{.*'timing/step_total': ")
_ITEM = re.compile(r"'([^']{1,120})': ([^',{}]+|[A-Za-z][\w.]*\([^'{}]*\))(?=, '|\})")
_PREFIX = "train/"
_TIMING = "train/timing/"
_BESIDE = "train/generation_beside_training"
_PARTS = ("generation", "make_experience", "ppo_train", "broadcast")
_OFF = 0.01  # relative difference that is more than rounding


class _Parser:
    """A step per line."""

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        if found := _STEP.search(line.text):
            rest = line.text[found.end() - 1 :]
            record = StepRecord(int(found[1]), whole=line.whole and rest.rstrip().endswith("}"))
            for name, value in _ITEM.findall(rest):
                if OPENRLHF.keeps(_PREFIX + name) and (read := number(value)) is not None:
                    record.values[_PREFIX + name] = read
            if _runs_beside(record.values):
                record.values[_BESIDE] = 1.0
            yield record

    def end(self) -> Iterator[StepRecord]:
        yield from ()


def _runs_beside(values: Mapping[str, float]) -> bool:
    total = values.get(_TIMING + "step_total", 0.0)
    return total > 0 and abs(sum(values.get(_TIMING + name, 0.0) for name in _PARTS) - total) > _OFF * total


def _waiting(names: frozenset[str]) -> dict[str, str]:
    if _BESIDE not in names:
        return {}
    return {"weight_sync": "in asynchronous runs it contains waiting for the batch that is being generated"}


def _token_counts(values: Mapping[str, float]) -> tuple[float | None, float | None]:
    return tokens_of(values.get("train/response_length"), None)


OPENRLHF = LogFramework(
    name="openrlhf",
    supported_logs="OpenRLHF: console lines `Global step 1: {'timing/generation': ...}`, TensorBoard",
    prefix=_TIMING,
    kept_prefixes=(_TIMING, "train/response_length", "train/reward"),
    marker=_STEP_WITH_TIMES,
    parser=_Parser,
    needles=(b"Global step ",),
    parts={
        "rollout": (("generation",),),
        "inference": (("make_experience",),),
        "actor": (("ppo_train",),),
        "weight_sync": (("broadcast",),),
    },
    total="step_total",
    periodic=(),
    idle=(),
    waiting=_waiting,
    token_counts=_token_counts,
    reward="train/reward",
    timers_exclude_waits=True,
)
