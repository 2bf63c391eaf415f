"""Parses NeMo RL's logs: a block of bullets under `Timing:` for every step, and TensorBoard's `timing/train/*`.

Asynchronous runs log `exposed_generation`, the part of generation that the trainer waited for; it is a wait and must
never count as the cost of generation. The blocks of validation and of worker start-up look alike and are no steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, number, tokens_of

_STEP = re.compile(r"=+ Step (\d{1,12})/\d+ =+")
_TIMING = re.compile(r"^\W*Timing:\s*$")
_BULLET = re.compile(r"^\s*• ([^:]{1,120}): ([0-9.eE+-]+)s(?: \(([0-9.]+)%\))?\s*$")
_TOTAL = "Total step time"
_LENGTH = re.compile(r"^\s*• Mean Generation Length: ([0-9.eE+-]+)\s*$")
_REWARD = re.compile(r"^\s*• Avg Reward: ([0-9.eE+-]+)\s*$")
_TOTAL_BULLET = re.compile(r"^\s*• Total step time: [0-9.]+s")


class _Parser:
    """Blocks of bullets, each under its step header."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._seen = 0
        self._results: dict[str, float] = {}
        self._block: StepRecord | None = None

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        text = line.text
        if self._block is not None:
            if bullet := _BULLET.match(text) if "•" in text else None:
                self._read(self._block, bullet, line.whole)
                return
            if text.strip() and _ends_block(text):
                yield from self.end()
        if found := _STEP.search(text):
            self._step = int(found[1])
        elif found := _LENGTH.match(text):
            self._result("train/mean_gen_tokens_per_sample", found[1])
        elif found := _REWARD.match(text):
            self._result("train/reward", found[1])
        elif _TIMING.match(text):
            # Runs with the single controller print no step header: blocks are counted instead.
            self._seen = self._seen + 1 if self._step is None else self._step
            self._step = None
            self._block = StepRecord(self._seen, self._results)
            self._results = {}

    def _result(self, name: str, text: str) -> None:
        if (value := number(text)) is not None:
            self._results[name] = value

    def end(self) -> Iterator[StepRecord]:
        block, self._block = self._block, None
        if block is not None:
            yield block

    @staticmethod
    def _read(block: StepRecord, bullet: re.Match[str], whole: bool) -> None:
        name, seconds = bullet[1].strip(), number(bullet[2])
        if seconds is not None and whole:
            block.values["timing/train/" + ("total_step_time" if name == _TOTAL else name)] = seconds
        block.whole = block.whole and whole


def _ends_block(text: str) -> bool:
    """Whether a line ends the block, rather than being another process's output between two bullets."""
    return bool(_STEP.search(text) or "Timing:" in text or "Performance Metrics:" in text or "Results:" in text)


def _waiting(names: frozenset[str]) -> dict[str, str]:
    if "timing/train/exposed_generation" not in names:
        return {}
    return {"generation": "in asynchronous runs exposed_generation is only what the trainer waited for"}


def _token_counts(values: Mapping[str, float]) -> tuple[float | None, float | None]:
    return tokens_of(values.get("train/mean_gen_tokens_per_sample"), values.get("train/global_valid_seqs"))


NEMO_RL = LogFramework(
    name="nemo_rl",
    supported_logs="NeMo RL: console blocks `Timing:` / `• Total step time: ...s`, TensorBoard",
    prefix="timing/train/",
    kept_prefixes=("timing/train/", "train/mean_gen_tokens_per_sample", "train/global_valid_seqs", "train/reward"),
    marker=_TOTAL_BULLET,
    parser=_Parser,
    needles=("•".encode(), b"Timing:", b" Step ", b"Performance Metrics:", b"Results:"),
    parts={
        "generation": (("generation",), ("exposed_generation",)),
        "reward": (("reward_calculation",),),
        "logprobs": (("policy_and_reference_logprobs", "logprob_inference_prep"),),
        "teacher_logprobs": (("teacher_logprob_inference", "teacher_logprob_inference_prep"),),
        "value_inference": (("value_inference",),),
        "value_training": (("value_training", "value_training_prep"),),
        "policy": (("policy_training", "training_prep"),),
        "weight_sync": (
            ("weight_sync",),
            ("prepare_for_generation/transfer_and_update_weights",),
        ),
    },
    total="total_step_time",
    periodic=("checkpointing", "validation", "total_validation_time", "idle/validation"),
    idle=("idle/",),
    waiting=_waiting,
    token_counts=_token_counts,
    reward="train/reward",
)
